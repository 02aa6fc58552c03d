"""What was gathered: hashes that a seed fixes, doublings under their bounds, determinants as from scratch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from fedasync.core import Concurrency, Coordinator, DeterminantDoubled, Publication, Strategy, Tumbling, VisitsDoubled
from fedasync.publication import InformationMatrix, SimHash, VisitCounts

VECTORS = arrays(np.float64, st.tuples(st.integers(1, 40), st.just(3)), elements=st.floats(-10, 10))


def random_walk(seed: int, states: int, actions: int, steps: int) -> Iterator[tuple[int, int]]:
    """State and action of every step in a tabular decision process drawn at random, under a random policy."""
    random = np.random.default_rng(seed)
    chances = random.dirichlet(np.full(states, 0.3), (states, actions))
    policy = random.dirichlet(np.full(actions, 0.5), states)
    state = 0
    for _ in range(steps):
        action = int(random.choice(actions, p=policy[state]))
        yield state, action
        state = int(random.choice(states, p=chances[state, action]))


def publications(rule: Publication, measures: Iterator[dict[str, float]]) -> int:
    """How many versions are published, one version a step of the walk."""
    coordinator = Coordinator(Strategy("walk", Concurrency(1), Tumbling(1), None, rule))
    for now, measured in enumerate(measures):
        lease = coordinator.request(0, float(now))
        assert lease is not None
        coordinator.deliver(lease.id, float(now))
        coordinator.commit(float(now), measured)
    return coordinator.publications


# -- hashes --------------------------------------------------------------------------------------------------------


def test_a_seed_fixes_the_hash() -> None:
    states = np.random.default_rng(5).normal(size=(50, 7))
    first, same, other = SimHash(7, seed=3)(states), SimHash(7, seed=3)(states), SimHash(7, seed=4)(states)
    assert first.tolist() == same.tolist()
    assert first.tolist() != other.tolist()
    assert SimHash(3, seed=3)([[1.0, 2.0, 3.0], [-1.0, 0.0, 0.5]]).tolist() == [252424136, 1721693990]
    assert [int(SimHash(7, seed=3)(state[None])[0]) for state in states] == first.tolist(), "alone as in company"


@given(scale=st.floats(1e-3, 1e3), seed=st.integers(0, 5))
def test_a_hash_knows_directions_only(scale: float, seed: int) -> None:
    states = np.random.default_rng(seed).normal(size=(8, 4))
    hashed = SimHash(4, bits=16, seed=seed)
    assert hashed(scale * states).tolist() == hashed(states).tolist()
    assert (hashed(-states) ^ hashed(states)).tolist() == [2**16 - 1] * 8, "every sign turns"


def test_as_many_bits_differ_as_the_angle_says() -> None:
    """Charikar's law: a bit differs with probability angle/π."""
    differing = 0
    for seed in range(200):
        hashed = SimHash(2, bits=63, seed=seed)
        a, b = hashed([[1.0, 0.0], [np.cos(0.8), np.sin(0.8)]])
        differing += int(a ^ b).bit_count()
    share, expected = differing / (200 * 63), 0.8 / np.pi
    assert abs(share - expected) < 4 * (expected * (1 - expected) / (200 * 63)) ** 0.5


# -- visits --------------------------------------------------------------------------------------------------------


@given(visits=st.lists(st.integers(0, 5), max_size=200))
def test_a_pair_visited_n_times_has_doubled_as_often_as_n_has_bits(visits: list[int]) -> None:
    counts = VisitCounts()
    counts.visit(visits)
    assert counts.doublings == sum(visits.count(pair).bit_length() for pair in set(visits))
    assert counts.measures() == {"visit_doublings": float(counts.doublings)}


@pytest.mark.parametrize("seed", range(4))
def test_visits_double_no_oftener_than_their_bound_on_a_random_walk(seed: int) -> None:
    states, actions, steps = 6, 3, 1500

    def measures() -> Iterator[dict[str, float]]:
        counts = VisitCounts()
        for pair in random_walk(seed, states, actions, steps):
            counts.visit([pair])
            yield counts.measures()

    made = publications(VisitsDoubled(), measures())
    assert 0 < made <= states * actions * (log2(steps) + 1)


def test_the_worst_walk_meets_the_bound_of_visits() -> None:
    """Every pair equally often: P·(log₂(T/P) + 1) doublings, each its own publication."""
    pairs, rounds = 8, 64

    def measures() -> Iterator[dict[str, float]]:
        counts = VisitCounts()
        for step in range(pairs * rounds):
            counts.visit([step % pairs])
            yield counts.measures()

    assert publications(VisitsDoubled(), measures()) == pairs * (log2(rounds) + 1)


# -- information ---------------------------------------------------------------------------------------------------


@given(vectors=VECTORS, exact_every=st.integers(1, 9))
def test_the_determinant_is_that_from_scratch(vectors: NDArray[np.float64], exact_every: int) -> None:
    matrix = InformationMatrix(3, exact_every=exact_every)
    for z in vectors:
        matrix.add(z)
    together = InformationMatrix(3)
    together.add(vectors)
    expected = float(np.linalg.slogdet(vectors.T @ vectors + np.eye(3))[1])
    assert matrix.log_det() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert together.log_det() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    smallest = max(0.0, float(np.linalg.eigvalsh(vectors.T @ vectors)[0]))
    assert matrix.min_eigenvalue() == pytest.approx(smallest, rel=1e-6, abs=1e-9)


def test_rounding_does_not_add_up() -> None:
    """10,000 nearly parallel vectors: updates alone against the value from scratch."""
    random = np.random.default_rng(0)
    vectors = np.array([3.0, 1.0, 0.0, 0.0]) + 1e-3 * random.normal(size=(10_000, 4))
    matrix = InformationMatrix(4)
    for z in vectors:
        matrix.add(z)
    expected = float(np.linalg.slogdet(vectors.T @ vectors + np.eye(4))[1])
    assert matrix.log_det() == pytest.approx(expected, rel=1e-9)


def test_nothing_gathered_is_zero_and_too_few_directions_have_no_smallest_eigenvalue() -> None:
    matrix = InformationMatrix(5)
    assert (matrix.log_det(), matrix.min_eigenvalue()) == (0.0, 0.0)
    for z in np.random.default_rng(1).normal(size=(4, 5)) * 1e3:
        matrix.add(z)
    assert matrix.min_eigenvalue() == 0.0, "of rank 4; rounding alone is not information"
    matrix.add(np.ones(5))
    assert matrix.min_eigenvalue() > 0


@given(vectors=VECTORS)
def test_information_never_falls_and_stays_under_the_elliptical_potential(vectors: NDArray[np.float64]) -> None:
    matrix, before, trace = InformationMatrix(3), 0.0, 0.0
    for z in vectors:
        matrix.add(z)
        trace += float(z @ z)
        assert before <= matrix.log_det() + 1e-9
        assert matrix.log_det() <= 3 * np.log1p(trace / 3) + 1e-6
        before = matrix.log_det()


def of_walk(seed: int, dimension: int, steps: int) -> Iterator[NDArray[np.float64]]:
    features = np.random.default_rng(seed).normal(size=(6, 3, dimension))
    for state, action in random_walk(seed, 6, 3, steps):
        yield features[state, action]


def one_direction_after_another(dimension: int, steps: int) -> Iterator[NDArray[np.float64]]:
    """Each direction grows until the determinant has doubled, then the next: the greedy adversary."""
    size = np.ones(dimension)
    for step in range(steps):
        z = np.zeros(dimension)
        z[step % dimension] = size[step % dimension] ** 0.5
        size[step % dimension] *= 2
        yield z


@pytest.mark.parametrize(
    "sequence",
    [
        *(lambda seed=seed: of_walk(seed, 4, 1500) for seed in range(3)),
        lambda: one_direction_after_another(4, 200),
        lambda: iter(np.random.default_rng(2).standard_cauchy((600, 4))),
    ],
    ids=["walk 0", "walk 1", "walk 2", "adversary", "heavy tails"],
)
def test_determinants_double_no_oftener_than_their_bound(
    sequence: Callable[[], Iterator[NDArray[np.float64]]],
) -> None:
    """dim·log₂(1 + Tr/dim), by the elliptical potential."""
    dimension = 4
    trace = sum(float(z @ z) for z in sequence())

    def measures() -> Iterator[dict[str, float]]:
        matrix = InformationMatrix(dimension)
        for z in sequence():
            matrix.add(z)
            yield matrix.measures()

    made = publications(DeterminantDoubled(), measures())
    assert 0 < made <= dimension * log2(1 + trace / dimension)


def test_the_adversary_is_published_at_every_vector() -> None:
    """diag(2^k) + … doubles each time: the bound is met up to the vectors' own share."""

    def measures() -> Iterator[dict[str, float]]:
        matrix = InformationMatrix(4)
        for z in one_direction_after_another(4, 40):
            matrix.add(z)
            yield {"log_det": matrix.log_det() + 1e-9}  # a hair above what rounding takes away

    assert publications(DeterminantDoubled(), measures()) == 40


def test_blocks_are_matrices_of_their_own() -> None:
    matrix = InformationMatrix(2, blocks=3)
    matrix.add([1.0, 0.0], block=0)
    matrix.add([[3.0, 0.0], [0.0, 2.0]], block=2)
    names = ["log_det_0", "log_det_1", "log_det_2", "min_eigenvalue_2"]
    assert matrix.measures(names) == pytest.approx(
        {"log_det_0": log(2), "log_det_1": 0.0, "log_det_2": log(10 * 5), "min_eigenvalue_2": 4.0}
    )
    assert DeterminantDoubled(blocks=3).measures == set(names[:3])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SimHash(0), "dimension must be an integer ≥ 1, got 0"),
        (lambda: SimHash(3, bits=64), "bits must be an integer ≤ 63, got 64"),
        (lambda: SimHash(3)([[1.0]]), r"states must have shape \[N, 3\], got \[1, 1\]"),
        (lambda: InformationMatrix(2).add([1.0]), r"finite with shape \[2\] or \[N, 2\], got \[1\]"),
        (lambda: InformationMatrix(2).add([1.0, np.nan]), "features must be finite"),
        (lambda: InformationMatrix(2).add([1.0, 0.0], block=1), "block must be between 0 and 0, got 1"),
        (lambda: InformationMatrix(2, blocks=2).measures(["log_det"]), "2 blocks has no measure 'log_det'"),
        (lambda: InformationMatrix(2).measures(["kl"]), "has no measure 'kl'"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
