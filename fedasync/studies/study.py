"""A study file: a base configuration, axes that vary it, seeds, targets, figures."""

from __future__ import annotations

import copy
import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

from fedasync.report import Report
from fedasync.report.spec import Published
from fedasync.report.tightness import Until
from fedasync.studies.errors import StudyError, did_you_mean, parse

LEARNT = ("task", "policy", "sampling", "objective", "optimiser")
CONFIGURATION = ("run", "population", "workload", "cluster", "prompts", "faults", *LEARNT, "strategy")
"""Tables of a file that configure a run, and that axes and ``--set`` may change."""
TABLES = ("study", *CONFIGURATION, "targets", "axis", "calibrate", "published", "report")
LISTS = ("axis", "calibrate", "published")
"""Tables of which there may be several."""


@dataclass(frozen=True)
class SeedsUntil:
    """Seeds 0, 1, 2, … until the intervals are tight enough: ``at_least`` of them, ``at_most`` of them."""

    at_most: int
    until: Until
    at_least: int = 5

    def __post_init__(self) -> None:
        if self.at_least < 3:
            raise ValueError(f"at_least must be an integer ≥ 3, got {self.at_least}: two seeds tell no spread")
        if self.at_most < self.at_least:
            raise ValueError(f"at_most must be ≥ at_least = {self.at_least}, got {self.at_most}")


@dataclass(frozen=True)
class Header:
    """``[study]``: a title, what it asks, and the seeds (a number n means 0 … n − 1)."""

    title: str
    description: str = ""
    seeds: int | tuple[int, ...] | SeedsUntil = 3

    def __post_init__(self) -> None:
        if isinstance(self.seeds, int) and self.seeds < 1:
            raise ValueError(f"seeds must be an integer ≥ 1 or a list, got {self.seeds}")
        if isinstance(self.seeds, tuple) and (not self.seeds or min(self.seeds) < 0):
            raise ValueError(f"seeds must be integers ≥ 0, at least one, got {list(self.seeds)}")
        if isinstance(self.seeds, tuple) and len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must differ, got {list(self.seeds)}")

    @property
    def seed_list(self) -> list[int]:
        """The seeds; all that may be run where their number is not fixed."""
        if isinstance(self.seeds, SeedsUntil):
            return list(range(self.seeds.at_most))
        return list(range(self.seeds)) if isinstance(self.seeds, int) else list(self.seeds)


@dataclass(frozen=True)
class FreeParameter:
    """A dotted key of the configuration whose value is fitted, between ``low`` and ``high`` > 0, on a log scale."""

    key: str
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high:
            raise ValueError(f"{self.key}: 0 < low < high would do, got low = {self.low:g} and high = {self.high:g}")


@dataclass(frozen=True)
class Calibration:
    """``[[calibrate]]``: ``free`` parameters of the runs with these ``labels`` (none: of all runs).

    They are fitted to the numbers of ``[[published]]`` that are marked ``fitted`` and speak of such runs, by runs whose
    table ``run`` is changed by this one (fewer versions, say), with the study's first seed.
    """

    free: tuple[FreeParameter, ...]
    labels: dict[str, str] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.free:
            raise ValueError("free is empty; a table { key = …, low = …, high = … } would do")

    def concerns(self, labels: Mapping[str, str]) -> bool:
        """Whether runs with these labels have the fitted values."""
        return all(labels.get(axis) == label for axis, label in self.labels.items())


@dataclass(frozen=True)
class Point:
    """One point of an axis: its labels (axis name → label) and the values that it sets (dotted key → value)."""

    labels: Mapping[str, str]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class RunPlan:
    """One run to be made: where it stands in the study, its seed, and its whole configuration."""

    labels: Mapping[str, str]
    seed: int
    config: dict[str, Any]


@dataclass(frozen=True)
class Study:
    """A study file, read and checked."""

    name: str
    path: Path
    header: Header
    base: dict[str, Any]
    axes: tuple[tuple[Point, ...], ...]
    targets: Mapping[str, float]
    report: Report
    content: Mapping[str, Any]
    """The file as read."""
    calibrations: tuple[Calibration, ...] = ()
    fitted: tuple[Mapping[str, float], ...] = ()
    """Dotted key → value, of each calibration; empty before they are made."""

    def plans(self, seeds: Sequence[int] | None = None) -> Iterator[RunPlan]:
        """Every run of the study: the product of its axes, times the seeds (all of them, unless given)."""
        for points in itertools.product(*self.axes):
            config = copy.deepcopy(self.base)
            labels = {name: label for point in points for name, label in point.labels.items()}
            values = {key: value for point in points for key, value in point.values.items()}
            for key in sorted(values, key=lambda key: key.count(".")):  # a table comes before what is changed in it
                set_key(config, key, copy.deepcopy(values[key]), str(self.path))
            for calibration, fitted in zip(self.calibrations, self.fitted, strict=False):
                if calibration.concerns(labels):
                    for key, value in fitted.items():
                        set_key(config, key, value, str(self.path))
            for seed in self.header.seed_list if seeds is None else seeds:
                yield RunPlan(labels, seed, {**config, "targets": dict(self.targets), "seed": seed})


def load(path: Path, changes: Sequence[str] = (), seeds: int | None = None) -> Study:
    """Read a study file. ``changes`` are ``dotted.key=value`` with a TOML value; ``seeds`` overrides their number.

    Raises StudyError: file, key, what it got, what would be accepted.
    """
    content = read(path, TABLES)
    header = dict(content.get("study", {}))
    if seeds is not None:
        header["seeds"] = seeds
    base = {table: content[table] for table in CONFIGURATION if table in content}
    axes = tuple(read_axis(i, table, f"{path}: axis") for i, table in enumerate(content.get("axis", []), 1))
    axes = apply_changes(base, axes, changes)
    check_axes(axes, f"{path}: axis")
    report = read_report(content, path)
    labels = {name: [point.labels[name] for point in axis] for axis in axes for name in axis[0].labels}
    try:
        report.check(labels)
    except ValueError as error:
        raise StudyError(f"{path}: {error}") from None
    calibrations = tuple(
        parse(Calibration, table, f"{path}: calibrate {i}") for i, table in enumerate(content.get("calibrate", []), 1)
    )
    _check_calibrations(calibrations, axes, labels, report, changes, str(path))
    head = read_header(header, f"{path}: study")
    if isinstance(head.seeds, SeedsUntil) and report.baseline is None:
        raise StudyError(
            f"{path}: study.seeds.until: report.baseline is missing; the label that the {head.seeds.until.quantity} of "
            "every other series is compared with would do"
        )
    return Study(
        path.stem,
        path,
        head,
        base,
        axes,
        parse(dict[str, float], content.get("targets", {}), f"{path}: targets"),
        report,
        content,
        calibrations,
    )


def read(path: Path, tables: Sequence[str]) -> dict[str, Any]:
    """The tables of a file, which may have no others. Raises StudyError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StudyError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        content = read_toml(text, str(path))
    except tomllib.TOMLDecodeError as error:
        raise StudyError(f"{path} is not TOML: {error}") from None
    kinds = (
        ("federation", "an experiment", "run"),
        ("processes", "an experiment", "run"),
        ("plan", "a plan", "plan"),
        ("study", "a study", "sim"),
    )
    for table, kind, command in kinds:
        if table in content and table not in tables:
            raise StudyError(f"{path}: [{table}] makes it {kind}, which is for `fedasync {command} {path}`")
    for table, value in content.items():
        if table not in tables:
            raise StudyError(f"{path}: {table}: unknown table{did_you_mean(table, tables)}")
        is_list = isinstance(value, list) and all(isinstance(item, dict) for item in value)
        if not (is_list if table in LISTS else isinstance(value, dict)):
            written = f"[[{table}]]" if table in LISTS else f"[{table}]"
            raise StudyError(f"{path}: {table}: must be a table, written as {written}")
    return content


def read_report(content: Mapping[str, Any], path: Path) -> Report:
    """``[report]`` with the numbers of ``[[published]]``."""
    if "published" in content.get("report", {}):
        raise StudyError(f"{path}: report.published: unknown key; tables written as [[published]] would do")
    published = tuple(
        parse(Published, table, f"{path}: published {i}") for i, table in enumerate(content.get("published", []), 1)
    )
    report: Report = parse(Report, content.get("report", {}), f"{path}: report")
    return replace(report, published=published)


def _check_calibrations(
    calibrations: Sequence[Calibration],
    axes: Sequence[Sequence[Point]],
    labels: Mapping[str, Sequence[str]],
    report: Report,
    changes: Sequence[str],
    where: str,
) -> None:
    """A fitted key has one value: neither an axis, nor ``--set``, nor another calibration of the same runs sets it."""
    for place, calibration in enumerate(calibrations, 1):
        here = f"{where}: calibrate {place}"
        mine = calibration.labels.items()
        met = [
            point for axis in axes for point in axis if all(point.labels.get(k, label) == label for k, label in mine)
        ]
        varied = {key for point in met for key in point.values}
        for axis, label in calibration.labels.items():
            if label not in labels.get(axis, ()):
                there = labels.get(axis)
                known = f"no label {label!r} on axis {axis!r}" if there else f"no axis {axis!r}"
                raise StudyError(f"{here}.labels: {known}; there are: {', '.join(map(repr, there or labels))}")
        for free in calibration.free:
            table = free.key.split(".")[0]
            if table not in CONFIGURATION or "." not in free.key:
                raise StudyError(f"{here}.free: {free.key}: unknown key{did_you_mean(table, CONFIGURATION)}")
            if free.key in varied:
                raise StudyError(f"{here}.free: {free.key} is set by an axis; a key that none varies would do")
            if any(change.partition("=")[0].strip() == free.key for change in changes):
                raise StudyError(f"--set {free.key}: the study fits it; change [[calibrate]] in the file")
        points = [p for p in report.published if p.fitted and calibration.concerns(p.labels)]
        if len(points) < len(calibration.free):
            raise StudyError(
                f"{here}: {len(calibration.free)} free parameters and {len(points)} numbers to fit them to; as many "
                "[[published]] with fitted = true and these labels would do"
            )
    for place, point in enumerate(report.published, 1):
        fits = sum(calibration.concerns(point.labels) for calibration in calibrations)
        if point.fitted and fits != 1:
            raise StudyError(f"{where}: published {place}: fitted = true, but {fits} calibrations concern it")


def read_header(table: dict[str, Any], where: str) -> Header:
    """``[study]``. Raises StudyError."""
    seeds = table.get("seeds")
    if not isinstance(seeds, dict):
        header: Header = parse(Header, table, where)
        return header
    until: SeedsUntil = parse(SeedsUntil, seeds, f"{where}.seeds")
    return replace(read_header({key: value for key, value in table.items() if key != "seeds"}, where), seeds=until)


def read_toml(text: str, where: str) -> dict[str, Any]:
    """Read TOML into what JSON can hold: dates and times become texts, and numbers must be finite."""
    found: dict[str, Any] = json.loads(json.dumps(tomllib.loads(text), default=str))
    _check_finite(found, where, ())
    return found


def _check_finite(value: object, where: str, keys: tuple[object, ...]) -> None:
    if isinstance(value, float) and not isfinite(value):
        raise StudyError(f"{where}: {'.'.join(map(str, keys))}: got {value}; a finite number would do")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _check_finite(item, where, (*keys, key))


def read_axis(number: int, table: dict[str, Any], where: str) -> tuple[Point, ...]:
    """Either ``key`` and ``values`` (one key), or ``points`` that set several keys together."""
    name = table.get("name", number)
    where = f"{where} {', '.join(map(str, name)) if isinstance(name, list) else name}"
    if ("points" in table) == ("values" in table):
        raise StudyError(f"{where}: give either key and values, or points")
    known = ("name", "points") if "points" in table else ("name", "key", "values", "labels")
    for key in table:
        if key not in known:
            raise StudyError(f"{where}.{key}: unknown key{did_you_mean(key, known)}")
    if "values" in table:
        return _one_key(table, where)
    names = table.get("name")
    names = names if isinstance(names, list) else [names]
    points = table["points"]
    if not isinstance(points, list) or not points or not all(isinstance(n, str) for n in names):
        raise StudyError(f"{where}: points is a list of tables, at least one, and name a text or a list of texts")
    return tuple(_point(point, names, f"{where}, point {place}") for place, point in enumerate(points, 1))


def check_axes(axes: Sequence[Sequence[Point]], where: str, tables: Sequence[str] = CONFIGURATION) -> None:
    """Names, labels and keys must differ: what is drawn under a label is what the label says.

    Keys are of these ``tables``. Raises StudyError.
    """
    names = [name for axis in axes for name in axis[0].labels]
    if len(set(names)) < len(names):
        raise StudyError(f"{where}: two axes have the same name, among {', '.join(names)}")
    varied: dict[str, str] = {}
    for axis in axes:
        name = ", ".join(axis[0].labels)
        labels = [", ".join(point.labels.values()) for point in axis]
        for label in labels:
            if labels.count(label) > 1:
                raise StudyError(f"{where} {name}: two points have the label {label!r}; give them different ones")
        for key in dict.fromkeys(key for point in axis for key in point.values):
            table = key.split(".")[0]
            if table not in tables:
                raise StudyError(f"{where} {name}: {key}: unknown table{did_you_mean(table, tables)}")
            if key in varied:
                raise StudyError(f"{where} {name}: {key} is set by axis {varied[key]} already")
            varied[key] = name


def _one_key(table: dict[str, Any], where: str) -> tuple[Point, ...]:
    key, values = table.get("key"), table["values"]
    if not isinstance(key, str) or not isinstance(values, list) or not values:
        raise StudyError(f"{where}: key is a dotted key such as 'population.clients', values a list, at least one")
    labels = table.get("labels", [str(value) for value in values])
    if not isinstance(labels, list) or len(labels) != len(values) or not all(isinstance(x, str) for x in labels):
        raise StudyError(f"{where}.labels: one text for each of the {len(values)} values would do, got {labels}")
    name = table.get("name", key.rsplit(".", 1)[-1])
    if not isinstance(name, str):
        raise StudyError(f"{where}.name: got {name!r}; a text would do")
    return tuple(Point({name: label}, {key: value}) for label, value in zip(labels, values, strict=True))


def _point(point: Any, names: list[str], where: str) -> Point:
    if not isinstance(point, dict) or "label" not in point:
        raise StudyError(f"{where}: a table with a label would do, got {point}")
    label = point["label"]
    labels = label if isinstance(label, list) else [label]
    if len(labels) != len(names) or not all(isinstance(x, str) for x in labels):
        raise StudyError(f"{where}.label: {len(names)} text(s) for {', '.join(names)} would do, got {label!r}")
    return Point(dict(zip(names, labels, strict=True)), _flat({k: v for k, v in point.items() if k != "label"}))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys and what they set: a table that says its name or kind replaces what stands there, any other one is
    looked into."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and not {"name", "kind"} & set(value):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def apply_changes(
    base: dict[str, Any],
    axes: tuple[tuple[Point, ...], ...],
    changes: Sequence[str],
    tables: Sequence[str] = CONFIGURATION,
) -> tuple[tuple[Point, ...], ...]:
    """Apply ``--set`` options of these ``tables`` to the base, and to every point that sets the same table or key."""
    for change in changes:
        key, equals, text = change.partition("=")
        key = key.strip()
        if not equals or not key:
            raise StudyError(f"--set {change}: write it as dotted.key=value")
        try:
            value = read_toml(f"value = {text}", f"--set {change}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()  # a bare word is a text
        if key.split(".")[0] not in tables:
            raise StudyError(f"--set {change}: unknown table{did_you_mean(key.split('.')[0], tables)}")
        set_key(base, key, value, f"--set {change}")
        axes = tuple(tuple(_changed(point, key, value, change) for point in axis) for axis in axes)
    return axes


def _changed(point: Point, key: str, value: Any, change: str) -> Point:
    values = copy.deepcopy(dict(point.values))
    for own in values:
        if own == key or own.startswith(f"{key}."):
            raise StudyError(f"--set {change}: an axis varies {own}; change the axis in the file")
        if key.startswith(f"{own}.") and isinstance(values[own], dict):
            set_key(values[own], key.removeprefix(f"{own}."), value, f"--set {change}")
    return Point(point.labels, values)


def set_key(tables: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set a dotted key in tables, which are made where they are missing. Raises StudyError."""
    *path, last = key.split(".")
    for depth, part in enumerate(path):
        tables = tables.setdefault(part, {})
        if not isinstance(tables, dict):
            raise StudyError(f"{where}: {'.'.join(path[: depth + 1])} is no table, so {key} cannot be set")
    tables[last] = value
