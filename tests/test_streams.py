"""Random numbers by name: uniform, independent, and the same whoever asks in whatever order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.simulation.laws import Constant, Exponential, Lognormal
from fedasync.simulation.population import Clients, Population
from fedasync.streams import Stream

SIDE = 120


def square(name: str, seed: int = 0) -> np.ndarray:
    """u(a, b) for a, b < SIDE."""
    stream = Stream(seed, name)
    return np.array([[stream.uniform(a, b) for b in range(SIDE)] for a in range(SIDE)])


@given(seed=st.integers(0, 2**64), a=st.integers(0, 2**40), b=st.integers(0, 2**40))
def test_a_draw_lies_inside_the_open_interval_and_depends_on_its_key_alone(seed: int, a: int, b: int) -> None:
    stream = Stream(seed, "x")
    u = stream.uniform(a, b)
    stream.uniform(b, a)
    assert 0 < u < 1
    assert Stream(seed, "x").uniform(a, b) == u
    assert 0 <= stream.seed(a, b) < 2**63


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("name", ["duration_s", "selection", "dropout"])
def test_draws_are_uniform_along_clients_leases_and_both(name: str) -> None:
    """χ² with 15 degrees of freedom: mean 15, s.d. 5.5; also of the low bits, and row by row."""
    u = square(name)
    assert chi_square(np.bincount((u.ravel() * 16).astype(int), minlength=16)) < 45
    low = np.array([Stream(0, name).bits(a, 0) & 15 for a in range(4000)])
    assert chi_square(np.bincount(low, minlength=16)) < 45
    assert abs(u.mean() - 0.5) < 4 / np.sqrt(12 * u.size)
    assert np.abs(u.mean(axis=0) - 0.5).max() < 4.5 / np.sqrt(12 * SIDE)
    assert np.abs(u.mean(axis=1) - 0.5).max() < 4.5 / np.sqrt(12 * SIDE)


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.corrcoef(x.ravel(), y.ravel())[0, 1])


def test_streams_of_other_names_seeds_and_neighbours_are_unrelated() -> None:
    u = square("duration_s")
    others = {
        "name": square("dropout"),
        "longer name": square("duration_s "),
        "seed": square("duration_s", seed=1),
        "next client": np.roll(u, 1, axis=0),
        "next lease": np.roll(u, 1, axis=1),
        "diagonal": np.roll(u, (1, 1), axis=(0, 1)),
        "transposed": u.T,
    }
    for what, other in others.items():
        assert abs(correlation(u, other)) < 4.5 / SIDE, what
    assert len({float(x) for x in u.ravel()}) == u.size


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="seed must be an integer ≥ 0, got -1"):
        Stream(-1, "x")


def test_when_a_client_drops_out_says_nothing_of_how_long_it_would_have_worked() -> None:
    clients = Clients(Population(SIDE, Exponential(1.0), dropout_probability=1.0), 3)
    keys = [(client, turn) for client in range(SIDE) for turn in range(40)]
    work = np.array([clients.work_s(client, turn, 0) for client, turn in keys])
    moment = np.array([clients.fate(client, turn, 0, 0.0).end_s for client, turn in keys]) / work
    assert abs(correlation(work, moment)) < 4.5 / np.sqrt(len(keys))
    assert abs(moment.mean() - 0.5) < 4 / np.sqrt(12 * len(keys))


PLAIN = Population(5, Lognormal(1.0, 1.0))
VARIANTS = {
    "rare dropout": Population(5, Lognormal(1.0, 1.0), dropout_probability=1e-12),
    "frequent crash": Population(5, Lognormal(1.0, 1.0), crash_probability=0.5),
    "drawn samples": Population(5, Lognormal(1.0, 1.0), samples=Exponential(100.0), seconds_per_sample=Constant(0.0)),
    "free network": Population(5, Lognormal(1.0, 1.0), downlink_bytes_per_second=Exponential(1e6), model_bytes=0),
    "more clients": Population(9, Lognormal(1.0, 1.0)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_another_law_with_a_stream_of_its_own_moves_no_duration(variant: str) -> None:
    plain, other = Clients(PLAIN, 7), Clients(VARIANTS[variant], 7)
    for client in range(5):
        for turn in range(20):
            assert plain.work_s(client, turn, 0) == other.work_s(client, turn, 99)


def test_a_law_of_another_shape_keeps_the_order_of_the_clients_luck() -> None:
    ours, theirs = (Clients(Population(50, law), 3) for law in (Exponential(1.0), Lognormal(5.0, 2.0)))
    order = [np.argsort([c.work_s(client, 4, 0) for client in range(50)]).tolist() for c in (ours, theirs)]
    assert order[0] == order[1]
