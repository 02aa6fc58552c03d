"""What a study asks of its report: the ``[report]`` table of a study's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

FigureName = Literal[
    "metric_over_time",
    "speedup",
    "staleness",
    "utilisation",
    "timeline",
    "speedup_by_axis",
    "ranking",
    "closed_forms",
    "throughput_by_axis",
    "shares",
    "length_bias",
    "staleness_kinds",
    "cluster_timeline",
    "learning_curves",
    "final_by_axis",
]


@dataclass(frozen=True)
class Claim:
    """A published speed-up to hold a study against: ``series`` is ``times`` as fast as ``over``, by ``source``.

    It is a line in ``speedup_by_axis`` and rows of the table ``claims``.
    """

    series: str
    over: str
    times: float
    source: str


@dataclass(frozen=True)
class Reference:
    """A value to hold curves against: a horizontal line with its words in ``metric_over_time``."""

    value: float
    text: str


@dataclass(frozen=True)
class Published:
    """A number of others that runs are held against: a ``[[published]]`` of a study's file.

    labels: axis → label: the runs it speaks of.
    metric: a number of their summary, as `number_of` finds it (``tokens_per_second``, ``shares.trainer.waiting``).
    value, source: the number in the metric's unit, and who says so.
    over: labels of other runs; the metric is divided by theirs, seed by seed, and ``value`` is that ratio.
    times: what the runs' number is multiplied by before (4: a published step is four versions).
    tolerance: how far a prediction may be off, as a share of ``value``; None: it is only shown.
    fitted: parameters were fitted to it, so it is no prediction.
    confidence: how sure the number is, where it is not read in the source itself.
    """

    labels: Mapping[str, str]
    metric: str
    value: float
    source: str
    over: Mapping[str, str] | None = None
    times: float = 1.0
    tolerance: float | None = None
    fitted: bool = False
    confidence: str = ""

    # pydantic reads this when it validates the TOML table: a misspelt key is an error, not silence.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if self.value == 0:
            raise ValueError(f"published: {self.metric} = 0 has no relative error; a value other than 0 would do")
        if self.tolerance is not None and self.tolerance <= 0:
            raise ValueError(f"published: tolerance must be > 0, got {self.tolerance:g}")
        if self.fitted and self.over is not None:
            raise ValueError("published: a ratio (over) is not fitted; the number itself would do")

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether it speaks of a run with these labels."""
        return all(labels.get(axis) == label for axis, label in self.labels.items())


@dataclass(frozen=True)
class Report:
    """Which figures a study draws, and how its axes are laid out in them.

    figures: names of the figures; ``closed_forms`` adds tables instead of a figure, ``ranking`` a table beside it.
    metric: the metric of curves and of the table; None takes that of the first target, else ``tokens_per_second`` of a
        cluster, else the first evaluated one, else ``updates`` (contributions applied), which every run has, as it has
        ``versions``.
    better: which values of the metric are the better ones, ``higher`` or ``lower``; None takes ``lower`` for a metric
        whose name ends in loss, distance, error or perplexity.
    target: which of the metric's recorded targets times are measured to; None takes the first.
    series: the axis whose labels are lines and bars.
    facets: axes that make panels, in this order; axes named nowhere are appended.
    baseline: the label on ``series`` that speed-ups refer to.
    x_axis: the axis along x in ``speedup_by_axis``, ``throughput_by_axis`` and ``final_by_axis``.
    timeline_s: from, to (virtual seconds) in ``timeline``; None shows a few leases and versions from time 0 on.
    timeline_facet: a label for each facet axis, saying which panel ``timeline`` shows; empty takes the first.
    timeline_lanes: lanes a panel of ``timeline`` has at most.
    claims: published speed-ups, looked for at every label of the x axis.
    references: values to hold the metric against, lines in ``metric_over_time``.
    throughput: what ``throughput_by_axis`` shows: ``tokens_per_second`` that were trained, or their ``speedup`` over
        the baseline. This figure and those after it need runs of a cluster.
    published: numbers of others, for the table ``published``; throughputs are hollow marks in ``throughput_by_axis``.
        In a study's file they stand by themselves, as ``[[published]]``.

    Raises ValueError when a figure lacks what it needs, or a number is out of range.
    """

    figures: tuple[FigureName, ...] = ("metric_over_time", "staleness", "utilisation", "timeline")
    metric: str | None = None
    better: Literal["higher", "lower"] | None = None
    target: float | None = None
    series: str = "strategy"
    facets: tuple[str, ...] = ()
    baseline: str | None = None
    x_axis: str | None = None
    timeline_s: tuple[float, float] | None = None
    timeline_facet: tuple[str, ...] = ()
    timeline_lanes: int = 20
    claims: tuple[Claim, ...] = ()
    references: tuple[Reference, ...] = ()
    throughput: Literal["tokens_per_second", "speedup"] = "tokens_per_second"
    published: tuple[Published, ...] = ()

    # pydantic reads this when it validates the TOML table: a misspelt key is an error, not silence.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        for figure in ("speedup", "speedup_by_axis"):
            if figure in self.figures and self.baseline is None:
                raise ValueError(f"report.baseline: figure {figure!r} needs one; give a label of axis {self.series!r}")
        for figure in ("speedup_by_axis", "throughput_by_axis", "final_by_axis"):
            if figure in self.figures and self.x_axis is None:
                raise ValueError(f"report.x_axis: figure {figure!r} needs one; give the name of an axis")
        if self.throughput == "speedup" and self.baseline is None:
            raise ValueError("report.throughput: a speed-up needs report.baseline; give a label of the series")
        if self.series in (*self.facets, self.x_axis):
            raise ValueError(f"report.series: {self.series!r} cannot be a facet or the x axis as well")
        if self.timeline_s is not None and not 0 <= self.timeline_s[0] < self.timeline_s[1]:
            raise ValueError(f"report.timeline_s: {self.timeline_s} is no stretch of time; give 0 <= from < to")
        if self.timeline_lanes < 1:
            raise ValueError(f"report.timeline_lanes: {self.timeline_lanes} lanes; give 1 or more")

    def check(self, axes: Mapping[str, Sequence[str]]) -> None:
        """Compare the names used here with a study's axes (axis name → labels), before any run is made.

        Raises ValueError naming the key, what it holds and what exists. An axis ``strategy`` exists in every
        study, since every run has one; it is checked only where ``axes`` gives its labels.
        """
        if self.series not in axes and self.series != "strategy":
            raise ValueError(f"report.series: no axis {self.series!r}; there are: {listed(axes)}")
        for facet in self.facets:
            if facet not in axes:
                raise ValueError(f"report.facets: no axis {facet!r}; there are: {listed(axes)}")
        if self.x_axis is not None and self.x_axis not in axes:
            raise ValueError(f"report.x_axis: no axis {self.x_axis!r}; there are: {listed(axes)}")
        labels = axes.get(self.series)
        named = [("baseline", self.baseline)]
        named += [("claims", label) for claim in self.claims for label in (claim.series, claim.over)]
        for key, label in named:
            if label is not None and labels is not None and label not in labels:
                there = [axis for axis in axes if label in axes[axis]]
                would_do = f"; report.series = {there[0]!r}, which has it, would do" if there else ""
                raise ValueError(
                    f"report.{key}: no label {label!r} on axis {self.series!r}; there are: {listed(labels)}{would_do}"
                )
        for point in self.published:
            for axis, label in (*point.labels.items(), *(point.over or {}).items()):
                if axis not in axes and axis != "strategy":
                    raise ValueError(f"published: no axis {axis!r}; there are: {listed(axes)}")
                if label not in axes.get(axis, (label,)):
                    raise ValueError(f"published: no label {label!r} on axis {axis!r}; there are: {listed(axes[axis])}")


def listed(names: Mapping[str, object] | Sequence[str]) -> str:
    """Names as a line of text."""
    return ", ".join(repr(name) for name in names) or "none"
