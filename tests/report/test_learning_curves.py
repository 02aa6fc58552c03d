"""What was learnt: curves by time and version, and the end of runs along an axis."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from fedasync.report import Report, final_by_axis, final_table, learning_curves, readable_final, write_report
from fedasync.report.cluster_timeline import steps
from fedasync.report.final_by_axis import LAST, final
from fedasync.report.learning_curves import learnt_curve
from fedasync.runs.run import Run

from ..runs.cluster_logs import Cluster
from .synthetic import cohort

VERSIONS = 24
SEEDS = 3
REPORT = Report(figures=("final_by_axis", "learning_curves"), metric="reward_mean", series="correction", x_axis="eta")


def learnt(run: Run, curves: dict[str, dict[int, float]]) -> Run:
    """The run with metrics of what was learnt: name → version → value."""
    times = dict(run.metrics.filter(name="step_s").select("version", "time_s").iter_rows())
    rows = [
        {"time_s": times[version], "version": version, "name": name, "value": value}
        for name, values in curves.items()
        for version, value in values.items()
        if version in times
    ]
    metrics = pl.concat([run.metrics, pl.DataFrame(rows, schema=run.metrics.schema)])
    final = run.summary["final"] | {name: list(values.values())[-1] for name, values in curves.items()}
    return replace(run, tables={**run.tables, "metrics": metrics}, summary={**run.summary, "final": final})


def reward(correction: str, eta: int, seed: int, version: int) -> float:
    slope = 1.0 if correction == "coupled" else 1.0 / (1 + eta)
    return min(1.0, 0.02 * version * slope + 0.01 * seed)


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    """Two corrections × two bounds × three seeds; evaluated every fifth version."""
    made = []
    for seed in range(SEEDS):
        for eta in (0, 4):
            for correction in ("none", "coupled"):
                run = Cluster(eta=eta, seed=seed, versions=VERSIONS, servers=2).run(
                    labels={"correction": correction, "eta": str(eta)}
                )
                values = {v: reward(correction, eta, seed, v) for v in range(1, VERSIONS + 1)}
                evaluated = {v: values[v] ** 2 for v in range(5, VERSIONS + 1, 5)}
                ages = dict.fromkeys(values, 0.5 + eta)
                curves = {"reward_mean": values, "exact": evaluated, "reward": evaluated, "token_staleness_mean": ages}
                made.append(learnt(run, curves))
    return made


def drawn(figure: Figure) -> Figure:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.draw_without_rendering()
    return figure


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_curves_are_means_over_seeds_by_time_and_by_version(runs: list[Run]) -> None:
    figure = drawn(learning_curves([run for run in runs if run.labels["eta"] == "0"], REPORT))
    assert legend(figure) == ["none", "coupled"]
    by_time, by_version, _, exact = figure.axes
    assert [by_time.get_xlabel(), exact.get_xlabel()] == ["", "version"]
    line = by_version.lines[0]
    assert list(line.get_xdata()) == list(range(1, VERSIONS + 1))
    means = [np.mean([reward("none", 0, seed, v) for seed in range(SEEDS)]) for v in range(1, VERSIONS + 1)]
    np.testing.assert_allclose(np.asarray(line.get_ydata(), float), means)
    assert list(exact.lines[0].get_xdata()) == [5, 10, 15, 20]
    bands = [each for each in by_version.collections if each.get_facecolor().size]
    assert len(bands) == 2
    for each in bands:
        heights = each.get_paths()[0].vertices[:, 1]  # type: ignore[index]
        assert (heights.min() >= 0, heights.max() <= 1) == (True, True)


def test_a_panel_a_facet_and_metric(runs: list[Run]) -> None:
    assert len(drawn(learning_curves(runs, REPORT)).axes) == 2 * 2 * 2


def test_where_nothing_was_learnt_the_figures_refuse() -> None:
    timing = [Cluster(seed=0, versions=4).run(labels={"correction": "none", "eta": "0"})]
    for draw in (learning_curves, final_by_axis):
        with pytest.raises(ValueError, match="needs one of the metrics"):
            draw(timing, REPORT)
    with pytest.raises(ValueError, match="needs runs of a cluster"):
        learning_curves([cohort(end_s=20.0)])


def test_a_curve_leaves_out_what_is_not_finite(runs: list[Run]) -> None:
    run = learnt(Cluster(seed=0, versions=4).run(), {"reward_mean": {1: 0.5, 2: float("nan"), 3: 0.7}})
    found = learnt_curve(run, "reward_mean", "version")
    assert found is not None
    assert [list(each) for each in found] == [[1.0, 3.0], [0.5, 0.7]]
    assert learnt_curve(run, "exact", "version") is None


def test_the_end_is_the_mean_of_the_last_versions(runs: list[Run]) -> None:
    run = next(run for run in runs if run.labels == {"correction": "coupled", "eta": "4"} and run.seed == 1)
    last = [reward("coupled", 4, 1, v) for v in range(VERSIONS - LAST + 1, VERSIONS + 1)]
    assert final(run, "reward_mean") == pytest.approx(np.mean(last))
    assert final(run, "exact") == pytest.approx(np.mean([reward("coupled", 4, 1, v) ** 2 for v in (15, 20)]))
    assert final(run, "other") is None


def test_an_evaluation_before_the_last_versions_is_the_last_one() -> None:
    run = learnt(Cluster(seed=0, versions=VERSIONS).run(), {"exact": {3: 0.1, 5: 0.4}})
    assert final(run, "exact") == 0.4


def test_the_figure_has_a_point_a_label_and_bars_over_seeds(runs: list[Run]) -> None:
    figure = drawn(final_by_axis(runs, REPORT))
    assert legend(figure) == ["none", "coupled"]
    rewards, exact = figure.axes
    assert [tick.get_text() for tick in exact.get_xticklabels()] == ["0", "4"]
    lines = [line for line in rewards.lines if line.get_marker() == "o"]
    assert len(lines) == 2
    expected = [
        np.mean([reward("none", eta, seed, v) for seed in range(SEEDS) for v in range(VERSIONS - LAST + 1, 25)])
        for eta in (0, 4)
    ]
    np.testing.assert_allclose(np.asarray(lines[0].get_ydata(), float), expected)
    (bars,) = [each for each in rewards.collections if np.allclose(each.get_color()[0], to_rgba(lines[0].get_color()))]  # type: ignore[attr-defined]
    low, high = bars.get_segments()[0][:, 1]  # type: ignore[attr-defined]
    assert high - low == pytest.approx(0.01 * (SEEDS - 1))


def test_the_table_has_the_spread_of_every_point(runs: list[Run]) -> None:
    table = final_table(runs, REPORT)
    assert table.height == 2 * 2 * 2
    at = (pl.col("metric") == "reward_mean") & (pl.col("eta") == "4") & (pl.col("correction") == "none")
    row = table.row(by_predicate=at, named=True)
    last = [np.mean([reward("none", 4, seed, v) for v in range(VERSIONS - LAST + 1, 25)]) for seed in range(SEEDS)]
    assert row["mean"] == pytest.approx(np.mean(last), abs=1e-6)
    assert (row["least"], row["greatest"]) == (pytest.approx(min(last), abs=1e-6), pytest.approx(max(last), abs=1e-6))
    assert row["half_width"] == pytest.approx(4.302653 * np.std(last, ddof=1) / np.sqrt(SEEDS), abs=1e-6)
    assert (row["seeds"], row["ended_early"]) == (SEEDS, 0)
    assert row["staleness"] == 4.5, "of tokens, which is not the groups' τ"
    assert "± (95 %)" in readable_final(runs, REPORT).columns


def test_the_report_writes_both_with_the_table(runs: list[Run], tmp_path: Path) -> None:
    names = [str(path.relative_to(tmp_path)) for path in write_report(runs, REPORT, tmp_path, "fedasync sim x", "x")]
    assert {"final.csv", "final.md", "figures/final_by_axis.png", "figures/learning_curves.svg"} <= set(names)
    assert "fedasync sim x" in (tmp_path / "final.md").read_text()


def test_a_figure_along_an_axis_needs_one(runs: list[Run]) -> None:
    with pytest.raises(ValueError, match=r"report.x_axis: figure 'final_by_axis' needs one"):
        Report(figures=("final_by_axis",))
    with pytest.raises(ValueError, match=r"report.x_axis: none given"):
        final_by_axis(runs, Report(series="correction"))


def test_evaluating_and_saving_are_parts_of_a_steps_time() -> None:
    run = Cluster(seed=0, versions=2).run()
    rows = [
        {"time_s": 10.0 * version, "version": version, "name": name, "value": value}
        for version, extra in ((1, 0.0), (2, 0.5))
        for name, value in (("wait_s", 1.0), ("train_s", 2.0), ("evaluate_s", extra), ("save_s", extra / 2))
    ]
    run = replace(run, tables={**run.tables, "metrics": pl.DataFrame(rows, schema=run.metrics.schema)})
    assert [step.parts for step in steps(run)] == [
        [("waiting", 1.0), ("training", 2.0)],
        [("saving", 0.25), ("evaluating", 0.5), ("waiting", 1.0), ("training", 2.0)],
    ]
