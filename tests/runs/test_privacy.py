"""What was spent: participation counted beside a recount by hand, ε beside closed forms and another library."""

from __future__ import annotations

import sys
from collections import Counter, deque
from math import exp, inf, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from fedasync.runs.privacy import MissingAccountantError, Participation, Spent, epsilon, spent
from fedasync.runs.rows import Rows, chunks_of

from .logs import STORY, Row, cut, record, table


def rows_of(releases: list[list[int]]) -> Rows:
    """The log of a run whose releases consume contributions of these workers."""
    rows: list[Row] = []
    for version, workers in enumerate(releases):
        rows += [(float(version), "consumed", 0, worker, version, version, 0, None) for worker in workers]
        rows.append((float(version), "committed", -1, -1, -1, version + 1, -1, None))
    return np.concatenate(list(record(rows).chunks()))


def recount(releases: list[list[int]], window: int | None) -> dict[int, int]:
    """Σk² of every worker, release by release."""
    totals: Counter[int] = Counter()
    inside: deque[int] = deque(maxlen=window)
    for workers in releases:
        inside.extend(workers)
        for worker, k in Counter(workers if window is None else inside).items():
            totals[worker] += k * k
    return dict(totals)


many = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=12)


@given(releases=many, window=st.none() | st.integers(1, 9), places=st.lists(st.integers(0, 40), max_size=3))
def test_participation_is_that_of_a_recount_wherever_the_log_is_cut(
    releases: list[list[int]], window: int | None, places: list[int]
) -> None:
    releases = [workers[:window] for workers in releases]  # no buffer takes more than its window holds
    rows = rows_of(releases)
    found = spent(cut(rows, [place for place in places if place < len(rows)]), window)
    squares, used = recount(releases, window), Counter(worker for workers in releases for worker in workers)
    assert (found.releases, found.clients) == (len(releases), len(squares))
    ranked = sorted(squares, key=lambda worker: (squares[worker], -worker))
    for who, worker in ((found.worst, ranked[-1]), (found.median, ranked[len(ranked) // 2])):
        assert who == Participation(worker, used[worker], squares[worker])


def test_a_table_of_events_says_the_same_as_the_record() -> None:
    one_each = Spent(2, 2, Participation(5, 1, 1), Participation(5, 1, 1))
    assert spent(record(STORY).chunks()) == one_each
    assert spent(chunks_of(table(STORY))) == one_each


def test_a_log_without_steps_has_spent_nothing() -> None:
    assert spent(record(STORY[:2]).chunks()) == Spent(0, 0, None, None)
    assert spent([], 3) == Spent(0, 0, None, None)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_sliding_window_costs_the_square_root_of_k_more_noise(window: int) -> None:
    """One contribution is in K releases: as K contributions to tumbling buffers, each in one release."""
    once_each = [[client] for client in range(20)]
    sliding, tumbling = spent([rows_of(once_each)], window), spent([rows_of(once_each)])
    assert sliding.median is not None
    assert tumbling.median is not None
    assert sliding.median.squares == window * tumbling.median.squares == window
    often = [[0]] * (10 * window)  # a window full of one client: K² a release
    assert _worst(spent([rows_of(often)], window)).squares > 9 * window * window**2
    assert _worst(spent([rows_of([[0] * window] * 10)])).squares == 10 * window**2


def test_a_window_of_one_is_each_arrival() -> None:
    releases = [[1], [2], [1], [1]]
    assert spent([rows_of(releases)], 1) == spent([rows_of(releases)])


def _worst(found: Spent) -> Participation:
    assert found.worst is not None
    return found.worst


class TestEpsilon:
    @pytest.fixture(autouse=True)
    def library(self) -> None:
        pytest.importorskip("opacus")

    @pytest.mark.parametrize(
        ("z", "squares", "delta", "found"),
        [
            (1.0, 1, 1e-5, 4.377178095681137),
            (0.5, 1, 1e-6, 10.997151214220652),
            (1.0, 10, 1e-5, 17.856586830107616),
            (4.0, 100, 1e-5, 13.20671224045199),
            (0.3, 50, 1e-5, 377.38345550960133),
        ],
    )
    def test_it_is_that_of_another_library(self, z: float, squares: int, delta: float, found: float) -> None:
        """get_epsilon_gaussian(z/√squares, delta) of dp-accounting 0.6.0."""
        assert epsilon(squares, z, delta) == pytest.approx(found, rel=1e-7)

    def test_releases_of_unequal_participation_are_one_gaussian(self) -> None:
        """k = 1 four times, 2 three times, 3 twice at z = 5: dp-accounting 0.6.0 composes the ten privacy losses.

        It gives 5.2351309 by numbers, without the closed form.
        """
        assert epsilon(4 * 1 + 3 * 4 + 2 * 9, 5.0, 1e-5) == pytest.approx(5.235130898830572, rel=1e-7)

    @given(z=st.floats(0.3, 10), squares=st.integers(1, 200), delta=st.floats(1e-8, 1e-2))
    def test_it_solves_the_dual_of_the_gaussian(self, z: float, squares: int, delta: float) -> None:
        """δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) (Balle and Wang 2018, theorem 8)."""
        found, mu = epsilon(squares, z, delta), sqrt(squares) / z
        if 0 < found < 500:
            told = norm.cdf(mu / 2 - found / mu) - exp(found) * norm.cdf(-mu / 2 - found / mu)
            assert told == pytest.approx(delta, rel=1e-5)

    @given(z=st.floats(0.5, 10), squares=st.integers(1, 50), times=st.integers(1, 6))
    def test_t_releases_are_one_with_noise_over_the_root_of_t(self, z: float, squares: int, times: int) -> None:
        assert epsilon(squares * times**2, z * times, 1e-5) == pytest.approx(epsilon(squares, z, 1e-5), rel=1e-6)

    def test_its_ends(self) -> None:
        assert epsilon(0, 1.0, 1e-5) == 0
        assert epsilon(1, 1e9, 1e-5) == 0  # within δ without any ε
        assert epsilon(10**6, 0.1, 1e-5) == inf
        assert epsilon(1, 1e-200, 1e-5) == inf
        assert epsilon(1, 0.0, 1e-5) == inf


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "opacus"]:
        monkeypatch.delitem(sys.modules, name)

    class Absent:
        def find_spec(self, name: str, *_: Any) -> None:
            if name.split(".", maxsplit=1)[0] == "opacus":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    assert epsilon(0, 1.0, 1e-5) == 0
    with pytest.raises(MissingAccountantError, match=r"pip install 'fedasync\[privacy\]' would do") as refusal:
        epsilon(1, 1.0, 1e-5)
    assert "\n" not in str(refusal.value)
