"""An experiment file: a study whose clients are processes of this machine, and what of it is to be predicted."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedasync.core.bounds import check_choice, check_integer, check_real
from fedasync.report import Report
from fedasync.studies.errors import StudyError, did_you_mean, parse
from fedasync.studies.study import (
    CONFIGURATION,
    Point,
    SeedsUntil,
    Study,
    apply_changes,
    check_axes,
    read,
    read_axis,
    read_header,
    read_report,
    read_toml,
    set_key,
)

OWN = ("workload", "run", "strategy")
"""Tables that configure a run here as in a study; axes may change them."""
INSTEAD = ("federation", "deployment")
"""What stands in place of a study's world."""
WORLD = tuple(table for table in CONFIGURATION if table not in OWN)
NOT_HERE = (*WORLD, "calibrate", "published")
TABLES = ("study", *OWN, *INSTEAD, "targets", "axis", "prediction", "report")
SIMULATED = ("closed_forms", "speedup_by_axis")
"""Figures that need the law of every duration, which only a population has."""

Isolation = Literal["subprocess", "process"]


@dataclass(frozen=True)
class Federation:
    """``[federation]``: the processes of this machine that the runs are made on.

    A SuperLink and ``clients`` SuperNodes, client i on the i-th. ``tls`` brings certificates of a day, and with
    ``authenticate`` a key for each node. ``isolation = "process"`` starts the server's app beside the SuperLink
    instead of under it. ``poll_s``: how often Flower looks for work; ``timeout_s``: how long a start is waited for.
    """

    clients: int
    tls: bool = False
    authenticate: bool = False
    isolation: Isolation = "subprocess"
    poll_s: float = 0.1
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        check_integer("clients", self.clients, 1)
        check_choice("isolation", self.isolation, Isolation)
        check_real("poll_s", self.poll_s, 0.01, 60)
        check_real("timeout_s", self.timeout_s, 0, above=True)
        if self.authenticate and not self.tls:
            raise ValueError("authenticate needs tls = true")


@dataclass(frozen=True)
class Prediction:
    """``[prediction]``: simulated clients are fitted to the runs of the series ``calibrate_on``, and to no other.

    A prediction within the share ``tolerance`` of what was measured counts as good.
    """

    calibrate_on: str
    tolerance: float = 0.2

    def __post_init__(self) -> None:
        check_real("tolerance", self.tolerance, 0, above=True)


@dataclass(frozen=True)
class Experiment:
    """An experiment file, read. The base of its ``study`` has [deployment] and no world."""

    study: Study
    federation: Federation
    prediction: Prediction | None


def load(path: Path, changes: Sequence[str] = (), seeds: int | None = None) -> Experiment:
    """Read an experiment file. ``changes`` are ``dotted.key=value`` with a TOML value; ``seeds``: as many.

    Raises StudyError: file, key, what it got, what would be accepted.
    """
    content = read(path, (*TABLES, *NOT_HERE))
    _demand_tables(content, path)
    base = {table: copy.deepcopy(content[table]) for table in (*OWN, "deployment") if table in content}
    base.setdefault("deployment", {})
    here = {"federation": dict(content["federation"]), "deployment": base["deployment"]}
    axes = tuple(read_axis(i, table, f"{path}: axis") for i, table in enumerate(content.get("axis", []), 1))
    for key in dict.fromkeys(key for axis in axes for point in axis for key in point.values):
        if key.split(".")[0] not in OWN:
            raise StudyError(f"{path}: axis: {key}: unknown table{did_you_mean(key.split('.')[0], OWN)}")
    for change in changes:
        axes = _changed(here, base, axes, change)
    check_axes(axes, f"{path}: axis")
    study, prediction = read_plan(content, base, axes, path, seeds, SIMULATED)
    federation = parse(Federation, here["federation"], f"{path}: federation")
    return Experiment(study, federation, prediction)


def read_plan(
    content: dict[str, Any],
    base: dict[str, Any],
    axes: tuple[tuple[Point, ...], ...],
    path: Path,
    seeds: int | None,
    simulated: Sequence[str],
) -> tuple[Study, Prediction | None]:
    """What every experiment says beside its own tables; figures that are ``simulated`` need the law of every duration.

    Raises StudyError.
    """
    header = dict(content.get("study", {})) | ({} if seeds is None else {"seeds": seeds})
    head = read_header(header, f"{path}: study")
    if isinstance(head.seeds, SeedsUntil):
        raise StudyError(f"{path}: study.seeds: got a rule; a number or a list would do, since runs take real time")
    labels = {name: [point.labels[name] for point in axis] for axis in axes for name in axis[0].labels}
    report = read_report(content, path)
    try:
        report.check(labels)
    except ValueError as error:
        raise StudyError(f"{path}: {error}") from None
    for figure in report.figures:
        if figure in simulated:
            raise StudyError(f"{path}: report.figures: {figure!r} needs a simulated population; the others would do")
    targets = parse(dict[str, float], content.get("targets", {}), f"{path}: targets")
    study = Study(path.stem, path, head, base, axes, targets, report, content)
    return study, read_prediction(content, labels, report, path)


def _demand_tables(content: dict[str, Any], path: Path) -> None:
    """[federation], and no table of a simulated world beside it."""
    strange = [table for table in NOT_HERE if table in content]
    if "federation" not in content:
        if "task" in content and "cluster" not in content:
            raise StudyError(
                f"{path}: the table [processes] is missing, and so is [cluster]; either would do with [task]"
            )
        is_study = any(table in content for table in WORLD)
        hint = f"; without one it is a study, which is for `fedasync sim {path}`" if is_study else ""
        raise StudyError(f"{path}: the table [federation] is missing{hint}")
    if strange:
        written = f"[[{strange[0]}]]" if strange[0] in ("calibrate", "published") else f"[{strange[0]}]"
        raise StudyError(
            f"{path}: {written} beside [federation]: an experiment's clients are processes of this machine; the file "
            "without either would do"
        )
    for table in ("workload", "run"):
        if table not in content:
            raise StudyError(f"{path}: the table [{table}] is missing")


def _changed(here: dict[str, Any], base: dict[str, Any], axes: Any, change: str) -> Any:
    """Apply one ``--set``: to [federation] or [deployment], or as a study does."""
    key, _, text = change.partition("=")
    table, dot, _ = key.strip().partition(".")
    if table in here and dot:
        try:
            value = read_toml(f"value = {text}", f"--set {change}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()  # a bare word is a text
        set_key(here, key.strip(), value, f"--set {change}")
        return axes
    if table not in OWN:
        raise StudyError(f"--set {change}: unknown table{did_you_mean(table, (*OWN, *INSTEAD))}")
    return apply_changes(base, axes, [change])


def read_prediction(
    content: dict[str, Any], labels: dict[str, list[str]], report: Report, path: Path
) -> Prediction | None:
    """What is to be predicted: all series but one, which stand on the file's only axis."""
    if "prediction" not in content:
        return None
    prediction: Prediction = parse(Prediction, content["prediction"], f"{path}: prediction")
    if list(labels) != [report.series]:
        raise StudyError(
            f"{path}: prediction: the axes are {', '.join(map(repr, labels)) or 'none'}; one axis, {report.series!r}, "
            "would do"
        )
    there = labels[report.series]
    if prediction.calibrate_on not in there:
        raise StudyError(
            f"{path}: prediction.calibrate_on: no label {prediction.calibrate_on!r} on axis {report.series!r}; there "
            f"are: {', '.join(map(repr, there))}"
        )
    if len(there) < 2:
        raise StudyError(f"{path}: prediction: {there[0]!r} is the only series; another one to predict would do")
    return prediction
