"""Published numbers: found in a summary by their path, compared seed by seed, and their order judged."""

from __future__ import annotations

from typing import Any

import pytest

from fedasync.report.published import beside, number_of, order_text
from fedasync.report.spec import Published
from fedasync.runs.run import Run

SUMMARY: dict[str, Any] = {
    "rollouts": {
        "throughput": {"tokens_per_second": 9.0, "step_s": {"mean": 4.0, "p50": 3.0}},
        "staleness": [{"kind": "dispatch", "mean": 1.5}, {"kind": "oldest", "mean": 2.5}],
    },
    "shares": {"trainer": {"waiting": 0.25}},
    "time_s": 100.0,
    "ended": "versions",
    "flag": True,
}


def runs(rates: dict[str, list[float]]) -> list[Run]:
    """A run a seed for each label of the axis ``system``."""
    return [
        Run(
            {},
            {
                "run_id": f"{label}-{seed}",
                "strategy": "areal",
                "labels": {"system": label},
                "seed": seed,
                "ended": "versions",
                "rollouts": {"throughput": {"tokens_per_second": rate}},
            },
        )
        for label, values in rates.items()
        for seed, rate in enumerate(values)
    ]


def point(label: str, value: float, **rest: Any) -> Published:
    return Published({"system": label}, "tokens_per_second", value, "a paper", **rest)


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("tokens_per_second", 9.0),
        ("step_s", 4.0),
        ("rollouts.throughput.step_s.p50", 3.0),
        ("rollouts.staleness.oldest.mean", 2.5),
        ("shares.trainer.waiting", 0.25),
        ("time_s", 100.0),
        ("shares.trainer.idle", None),
        ("ended", None),
        ("flag", None),
    ],
)
def test_a_number_is_found_by_its_path(metric: str, value: float | None) -> None:
    assert number_of(SUMMARY, metric) == value


def test_a_prediction_is_the_mean_over_seeds_and_its_error_a_share_of_the_published() -> None:
    (found,) = beside(runs({"a": [90.0, 120.0], "b": [1.0, 1.0]}), [point("a", 100.0, tolerance=0.04)])
    assert found.predicted == 105.0
    assert found.error == pytest.approx(0.05)
    assert found.verdict == "predicted, MISSED: 4 %"
    assert found.half_width == pytest.approx(190.6, abs=0.1)  # t of 1 degree of freedom: 12.71 × 15


def test_a_ratio_is_taken_seed_by_seed_and_times_multiplies() -> None:
    of = runs({"a": [10.0, 40.0], "b": [5.0, 10.0]})
    (ratio,) = beside(of, [point("a", 2.0, over={"system": "b"})])
    assert dict(ratio.by_seed) == {0: 2.0, 1: 4.0}
    (fourfold,) = beside(of, [point("b", 40.0, times=4.0)])
    assert dict(fourfold.by_seed) == {0: 20.0, 1: 40.0}


def test_a_point_without_runs_is_left_out_and_one_of_several_is_refused() -> None:
    assert beside(runs({"a": [1.0]}), [point("b", 1.0)]) == []
    with pytest.raises(ValueError, match="is several runs of seed 0; more labels would do"):
        beside(runs({"a": [1.0], "b": [2.0]}), [Published({"strategy": "areal"}, "tokens_per_second", 1.0, "a paper")])
    with pytest.raises(ValueError, match="run a-0 has no number 'stop_s'"):
        beside(runs({"a": [1.0]}), [Published({"system": "a"}, "stop_s", 1.0, "a paper")])


def test_order_counts_pairs_by_whether_they_can_be_told_apart() -> None:
    of = runs({"a": [1.0, 1.1, 0.9], "b": [2.0, 2.1, 1.9], "c": [1.5, 2.6, 1.9], "d": [3.0, 3.1, 2.9]})
    published = [point("a", 1.0), point("b", 2.0), point("c", 4.0), point("d", 1.0)]
    said = order_text(beside(of, published))
    # a < b, c too near b and to a by its spread, d above b and c though published below; a and d published as equal.
    assert said.startswith("Order: of 5 pairs 1 in the published order, ")
    assert "in the other order" in said
    assert said.endswith("published as equal, predicted 66.7 % apart.")
