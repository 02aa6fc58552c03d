"""What figures hold: panels, lines, labels; and that nothing breaks at the edges of what can be drawn."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from fedasync.report import (
    Report,
    metric_over_time,
    speedup,
    speedup_by_axis,
    staleness,
    timeline,
    utilisation,
    write_report,
)
from fedasync.report.spec import Reference
from fedasync.report.style import colour, line, seeds_text
from fedasync.runs.run import Run

from .synthetic import asynchronous, cohort

REPORT = Report(baseline="FedAvg", x_axis="tail")
FIGURES = [metric_over_time, speedup, staleness, utilisation, timeline]


def drawn(figure: Figure) -> Figure:
    """Lay it out, with warnings (of a layout that does not fit, of missing letters) as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.draw_without_rendering()
    return figure


def texts(figure: Figure) -> list[str]:
    return [found.get_text() for found in figure.findobj(Text) if isinstance(found, Text)]


def rectangles(ax: Axes) -> list[Rectangle]:
    return [patch for patch in ax.patches if isinstance(patch, Rectangle)]


def legend_labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_metric_over_time_has_a_panel_a_facet_and_a_line_a_series(study: list[Run]) -> None:
    figure = drawn(metric_over_time(study, REPORT, command="make sim EXP=tails"))
    assert [ax.get_title("left") for ax in figure.axes] == ["tail = 0.3", "tail = 1.2"]
    assert legend_labels(figure) == ["FedAvg", "FedBuff", "FedAsync", "target 0.8"]
    assert figure.axes[0].get_xlabel() == "virtual time (s)"
    assert figure.axes[0].get_ylabel() == "accuracy"
    for ax in figure.axes:
        assert len(ax.lines) == 4
        assert len(ax.collections) == 3
    assert "make sim EXP=tails" in figure.get_supxlabel()
    assert "3 seeds" in figure.get_supxlabel()
    first = np.asarray(figure.axes[0].lines[0].get_ydata(), np.float64)
    final = [run.summary["final"]["accuracy"] for run in study if run.labels == {"strategy": "FedAvg", "tail": "0.3"}]
    assert first[-1] == pytest.approx(np.mean(final))


def test_one_seed_has_no_band_and_says_so(study: list[Run]) -> None:
    figure = drawn(metric_over_time([run for run in study if run.seed == 1], REPORT))
    assert all(not ax.collections for ax in figure.axes)
    assert "no interval" in figure.get_supxlabel()


def test_seeds_that_ended_early_are_faint_from_there() -> None:
    runs = [cohort(seed=seed, end_s=end) for seed, end in ((0, 40.0), (1, 20.0))]
    figure = drawn(metric_over_time(runs))
    whole, rest, _ = figure.axes[0].lines
    assert np.max(whole.get_xdata()) == np.min(rest.get_xdata()) == 20.0
    assert np.max(rest.get_xdata()) == 40.0
    assert "carried on" in figure.get_supxlabel()


def test_speedup_labels_every_bar(study: list[Run]) -> None:
    figure = drawn(speedup(study, REPORT))
    mild = [text for text in texts(figure) if "× [" in text]
    assert len(mild) >= 1
    assert sum(text.startswith("≤ ") and "3 of 3 seeds did not reach" in text for text in texts(figure)) == 2
    assert "accuracy 0.8" in figure.get_suptitle()


def test_partly_reached_targets_are_never_hidden() -> None:
    runs = {
        "FedAvg": [cohort(seed=seed, end_s=60.0) for seed in range(3)],
        "FedBuff": [asynchronous(seed=seed, end_s=60.0, gain=0.1 if seed == 2 else 2.0) for seed in range(3)],
    }
    figure = drawn(speedup(runs, baseline="FedAvg"))
    assert any("1 of 3 seeds did not" in text for text in texts(figure))
    missed = {"FedAvg": runs["FedAvg"], "FedBuff": [asynchronous(seed=s, end_s=60.0, gain=0.1) for s in range(3)]}
    (bounded,) = [text for text in texts(speedup(missed, baseline="FedBuff")) if text.startswith("≥ ")]
    assert bounded.endswith(", ∞)\nbaseline: 3 of 3 did not reach")
    neither = {name: [asynchronous(seed=s, end_s=60.0, gain=0.1) for s in range(3)] for name in ("A", "B")}
    figure = drawn(speedup(neither, baseline="A"))
    assert "not reached\nnor by the baseline" in texts(figure)
    assert [patch.get_hatch() for patch in figure.axes[0].patches if patch.get_hatch()] == ["////"]


def test_what_is_within_noise_is_pale_and_says_so() -> None:
    alike = {name: [cohort(seed=seed, end_s=60.0) for seed in range(3)] for name in ("A", "B")}
    figure = drawn(speedup(alike, baseline="A"))
    assert "1.00× [1.00, 1.00]\nwithin noise" in texts(figure)
    assert figure.axes[0].patches[0].get_alpha() == 0.4
    assert "within noise" in figure.get_supxlabel().lower()
    below = metric_over_time(alike, Report(baseline="A")).get_supxlabel().replace("\n", " ")
    assert "No clear difference from A at the end, paired by seed: B." in below


def test_colours_stay_with_their_series(study: list[Run]) -> None:
    series = ("FedAvg", "FedBuff", "FedAsync")
    bars = [patch.get_facecolor() for patch in speedup(study, REPORT).axes[0].patches if not patch.get_hatch()]
    assert bars[0] == to_rgba(colour(series, "FedBuff"))
    lines = metric_over_time(study, REPORT).axes[0].lines
    assert lines[1].get_color() == colour(series, "FedBuff")
    looks = {(look["color"], str(look["linestyle"])) for look in (line("abcdefghijkl", x) for x in "abcdefghijkl")}
    assert len(looks) == 12


def test_speedup_by_axis_draws_lines_ceiling_and_references(study: list[Run]) -> None:
    figure = drawn(speedup_by_axis(study, REPORT, ceilings={"0.3": 1.5, "1.2": 3.0}, references=[(2.0, "H₁₃ − H₃")]))
    assert legend_labels(figure) == ["FedAvg", "FedBuff", "FedAsync", "E[max of n] / E[t]"]
    ax = figure.axes[0]
    assert ax.get_xticks().tolist() == [0.3, 1.2]
    assert "H₁₃ − H₃" in texts(figure)
    assert [line.get_marker() for line in ax.lines].count("v") == 2  # FedAsync, at most so fast
    with pytest.raises(ValueError, match=r"^ceilings: no label '5' on axis 'tail'; there are: '0.3', '1.2'$"):
        speedup_by_axis(study, REPORT, ceilings={"5": 1.0})


def test_speedup_by_axis_over_words_and_facets() -> None:
    runs = [
        make(end_s=30.0, timing_only=True, labels={"strategy": name, "law": law, "n": n})
        for law in ("lognormal", "Pareto")
        for n in ("10", "20")
        for name, make in (("FedAvg", cohort), ("FedBuff", asynchronous))
    ]
    figure = drawn(speedup_by_axis(runs, baseline="FedAvg", x_axis="law"))
    assert [ax.get_title("left") for ax in figure.axes] == ["n = 10", "n = 20"]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["lognormal", "Pareto"]


def test_staleness_panels_and_their_means(study: list[Run]) -> None:
    figure = drawn(staleness(study, REPORT))
    panels = [ax for ax in figure.axes if ax.get_visible()]
    assert len(panels) == 6
    assert panels[0].get_title("right") == "mean 0   p90 0   max 0"
    assert sum(bar.get_height() for bar in rectangles(panels[2])) == pytest.approx(1.0)


def test_utilisation_bars_fill_the_whole(study: list[Run]) -> None:
    figure = drawn(utilisation(study, REPORT))
    assert len(figure.axes) == 4
    widths = [bar.get_width() for bar in rectangles(figure.axes[0])]
    assert sum(widths) == pytest.approx(3.0)
    assert legend_labels(figure) == ["useful", "wasted", "waiting"]


def test_timeline_lanes_are_workers_when_few_and_slots_when_many(study: list[Run], timing_study: list[Run]) -> None:
    many = drawn(timeline(study, REPORT))
    assert [ax.get_ylabel() for ax in many.axes] == ["slot"] * 3
    assert "tail = 0.3" in many.get_suptitle()
    few = drawn(timeline(timing_study, window_s=(2.0, 5.0)))
    assert [ax.get_ylabel() for ax in few.axes] == ["worker"] * 2
    assert few.axes[0].get_xlim() == (2.0, 5.0)
    assert few.axes[0].get_title("left") == "FedAvg"
    assert "new version" in legend_labels(few)
    narrow = timeline(timing_study, Report(timeline_lanes=4))
    assert len(narrow.axes[0].get_yticks()) == 4


def test_timeline_of_a_chosen_facet(study: list[Run]) -> None:
    assert "tail = 1.2" in timeline(study, facet=("1.2",)).get_suptitle()


@pytest.mark.parametrize("draw", FIGURES)
def test_timing_only_runs_can_be_drawn(timing_study: list[Run], draw: Callable[..., Figure]) -> None:
    figure = drawn(draw(timing_study, Report(baseline="FedAvg")))
    if draw is metric_over_time:
        assert figure.axes[0].get_ylabel() == "updates applied"
    if draw is speedup:
        assert "time per applied update" in figure.get_suptitle()


@pytest.mark.parametrize("draw", [metric_over_time, staleness, utilisation, timeline])
def test_a_run_in_which_nothing_happened_can_be_drawn(draw: Callable[..., Figure]) -> None:
    still = cohort(end_s=1e-9, timing_only=True)
    drawn(draw({"still": still}))


@pytest.mark.parametrize("draw", FIGURES)
def test_points_the_study_left_out_leave_gaps(study: list[Run], draw: Callable[..., Figure]) -> None:
    drawn(draw([run for run in study if run.labels != {"strategy": "FedBuff", "tail": "1.2"}], REPORT))


def test_labels_are_text_not_markup() -> None:
    drawn(metric_over_time({"$K$ = 10_{x} 5 $": cohort(end_s=5.0)}))


@pytest.mark.parametrize(("draw", "axes"), [(metric_over_time, 7), (utilisation, 14), (staleness, 7)])
def test_many_panels_fit(draw: Callable[..., Figure], axes: int) -> None:
    runs = [cohort(end_s=4.0, labels={"strategy": "FedAvg", "tail": f"{i}", "clients": "10"}) for i in range(7)]
    assert sum(ax.get_visible() for ax in drawn(draw(runs)).axes) == axes


def test_the_reader_s_own_style_is_neither_used_nor_changed(study: list[Run]) -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 30, "axes.titlesize": 40}):
        assert metric_over_time(study).axes[0].title.get_fontsize() == 9.0
        assert matplotlib.rcParams["font.size"] == 30


def test_seeds_in_words() -> None:
    space = "\N{NO-BREAK SPACE}"
    assert seeds_text([0, 1, 2]) == f"3 seeds{space}(0–2)."
    assert seeds_text([0, 3]) == f"2 seeds{space}(0, 3)."
    assert "no interval" in seeds_text([4])


def test_write_report(study: list[Run], tmp_path: Path) -> None:
    report = Report(figures=("speedup", "speedup_by_axis", "closed_forms"), baseline="FedAvg", x_axis="tail")
    extra = {"closed_forms": pl.DataFrame({"law": ["exponential"], "E[max]": [2.93]})}
    written = write_report(study, report, tmp_path, "make sim EXP=tails", "Tails", {"0.3": 2.0}, extra)
    assert [str(path.relative_to(tmp_path)) for path in written] == [
        "table.csv",
        "table.md",
        "closed_forms.csv",
        "closed_forms.md",
        "figures/speedup.png",
        "figures/speedup.svg",
        "figures/speedup_by_axis.png",
        "figures/speedup_by_axis.svg",
    ]
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(written)
    assert pl.read_csv(tmp_path / "table.csv").height == 6
    page = (tmp_path / "table.md").read_text()
    assert page.startswith("# Tails\n\n| strategy | tail |")
    assert "`make sim EXP=tails`" in page
    svg = tmp_path / "figures/speedup.svg"
    assert not re.search(r"<dc:date>", svg.read_text())
    before = {path: path.read_bytes() for path in written}
    write_report(study, report, tmp_path, "make sim EXP=tails", "Tails", {"0.3": 2.0}, extra)
    assert {path: path.read_bytes() for path in written} == before


def test_a_wrong_report_writes_nothing(study: list[Run], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"report\.metric"):
        write_report(study, Report(metric="loss"), tmp_path / "out", "", "")
    assert not (tmp_path / "out").exists()


def test_importing_the_report_is_cheap() -> None:
    heavy = "('matplotlib', 'polars', 'scipy', 'rich', 'torch', 'pydantic')"
    code = f"import sys, fedasync.report; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_references_are_lines_and_stand_in_the_legend(study: list[Run]) -> None:
    report = Report(references=(Reference(0.5, "where theory puts it"), Reference(0.25, "elsewhere")))
    figure = metric_over_time(study, report)
    for ax in figure.axes:
        dotted = {float(np.asarray(line.get_ydata())[0]) for line in ax.lines if line.get_linestyle() == ":"}
        assert {0.5, 0.25} <= dotted
    (legend,) = figure.legends
    words = " ".join(text.get_text().replace("\n", " ") for text in legend.get_texts())
    assert "where theory puts it, 0.5" in words


def test_a_legend_of_many_series_fits_its_figure(study: list[Run]) -> None:
    figure = metric_over_time({f"strategy number {i}": study[:1] for i in range(30)})
    figure.canvas.draw()
    (legend,) = figure.legends
    assert legend.get_window_extent().y0 >= 0
