"""A plan file: a base configuration, what of it is searched, what is wanted and what must not be exceeded."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedasync.core.bounds import check_integer, check_real
from fedasync.studies.build import is_cluster
from fedasync.studies.errors import StudyError, did_you_mean, parse
from fedasync.studies.plan_measures import Measure, measures
from fedasync.studies.study import CONFIGURATION, apply_changes, read, set_key

TABLES = ("plan", *CONFIGURATION, "targets")
ENDS = ("time_s", "updates", "versions")
"""Keys of [run] that end a run; a shorter run is one with a share of them."""
SPLIT = ("cluster.generation_gpus", "cluster.training_gpus")


@dataclass(frozen=True)
class Limit:
    """What a measure must not exceed, or not fall below."""

    at_most: float | None = None
    at_least: float | None = None

    def __post_init__(self) -> None:
        if self.at_most is None and self.at_least is None:
            raise ValueError("a limit without a number; at_most or at_least would do")
        if self.at_most is not None and self.at_least is not None and self.at_least > self.at_most:
            raise ValueError(
                f"no number is at least {self.at_least:g} and at most {self.at_most:g}; at_least ≤ at_most would do"
            )

    def excess(self, value: float | None) -> float:
        """By how much a value lies outside, as a share of the bound (of 1 for a bound of 0); 0 inside."""
        if value is None or math.isnan(value):
            return math.inf
        over = 0.0 if self.at_most is None else (value - self.at_most) / (abs(self.at_most) or 1.0)
        under = 0.0 if self.at_least is None else (self.at_least - value) / (abs(self.at_least) or 1.0)
        return max(0.0, over, under)

    def __str__(self) -> str:
        bounds = (("≤", self.at_most), ("≥", self.at_least))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both possible; ``step`` apart, or evenly on a ``log`` scale.

    Integers where both ends are. Without a step, numbers that are no integers are endless.
    """

    low: int | float
    high: int | float
    step: int | float | None = None
    log: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"low must be < high, got {self.low} and {self.high}")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError(f"log needs low > 0 and no step, got low = {self.low}, step = {self.step}")
        if self.step is not None:
            check_real("step", self.step, 0, above=True)
            if self.is_integer and not isinstance(self.step, int):
                raise ValueError(f"step must be an integer between integers, got {self.step}")

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def count(self) -> int | None:
        """How many they are; None where they are endless or stand for a scale."""
        if self.log or (self.step is None and not self.is_integer):
            return None
        if self.is_integer:
            return int(self.high - self.low) // int(self.step or 1) + 1
        return math.floor((self.high - self.low) / (self.step or 1) + 1e-9) + 1

    @property
    def values(self) -> list[Any] | None:
        """All of them in ascending order, a list as long as ``count``; None where that is None."""
        return None if self.count is None else [self.low + i * (self.step or 1) for i in range(self.count)]

    def has_between(self, low: int, high: int) -> bool:
        """Whether an integer of an integer range lies between these, both included."""
        step = int(self.step or 1)
        first = self.low + max(0, -((self.low - low) // step)) * step  # the first that is ≥ low
        return first <= min(high, self.high)


Choice = tuple[Any, ...] | Range
"""Values of a key: those of a list, or of a range."""


@dataclass(frozen=True)
class Header:
    """``[plan]`` without its search: what is wanted, within which limits, and how long is looked for it.

    objective: the measure that is to be best; None takes tokens_per_second on a cluster, the time to the first target
        where there is one, else updates_per_second.
    better: which of its values are the better ones, where the measure does not say.
    against: the other quantity of the Pareto figure; it decides between equals, too.
    limits: measure → bounds on its mean.
    total_gpus: generation_gpus + training_gpus of every candidate, so that the split is one number.
    trials: candidates at most; a search with no more combinations tries them all.
    seeds: of a trial, 0 … seeds − 1. confirm_seeds: of the confirmation, those that follow.
    rungs: shares of the run's length, ascending to 1: every candidate is run for the first, the best ``keep`` of them
        for the next.
    finalists: candidates that are confirmed at full length.
    """

    title: str
    description: str = ""
    objective: str | None = None
    better: Literal["higher", "lower"] | None = None
    against: str = "staleness_mean"
    limits: dict[str, Limit] = field(default_factory=dict)
    total_gpus: int | None = None
    trials: int = 60
    seeds: int = 1
    rungs: tuple[float, ...] = (1.0,)
    keep: float = 1 / 3
    finalists: int = 3
    confirm_seeds: int = 5

    def __post_init__(self) -> None:
        for name, least in (("trials", 1), ("seeds", 1), ("finalists", 2), ("confirm_seeds", 2)):
            check_integer(name, getattr(self, name), least)
        if self.total_gpus is not None:
            check_integer("total_gpus", self.total_gpus, 2)
        check_real("keep", self.keep, 0, 1, above=True)
        shares = self.rungs
        ascend = all(before < after for before, after in itertools.pairwise(shares))
        if not (shares and shares[0] > 0 and shares[-1] == 1 and ascend):
            raise ValueError(f"rungs must ascend from > 0 to 1, got {list(shares)}; [0.2, 1.0] would do")


@dataclass(frozen=True)
class Plan:
    """A plan file, read and checked."""

    name: str
    path: Path
    header: Header
    search: Mapping[str, Choice]
    base: dict[str, Any]
    targets: Mapping[str, float]
    measures: Mapping[str, Measure]
    """Those that a run of this kind has."""
    objective: Measure
    against: Measure

    def config(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration of a candidate. Raises StudyError where ``total_gpus`` leaves nobody to train."""
        config = copy.deepcopy(self.base)
        for key in sorted(values, key=lambda key: key.count(".")):
            set_key(config, key, copy.deepcopy(values[key]), str(self.path))
        total = self.header.total_gpus
        if total is not None:
            cluster = config["cluster"]
            if cluster.get("colocated") is True:
                cluster["generation_gpus"] = cluster["training_gpus"] = total
            elif isinstance(generation := cluster.get("generation_gpus"), int):
                if generation >= total:
                    raise StudyError(
                        f"{self.path}: cluster.generation_gpus = {generation} of plan.total_gpus = {total} leave "
                        f"nobody to train; < {total} would do"
                    )
                cluster["training_gpus"] = total - generation
        return config

    def shortened(self, config: Mapping[str, Any], share: float) -> dict[str, Any]:
        """The same run with a share of its length; counts are rounded up, and at least 1."""
        run = dict(config["run"])
        if share < 1:
            for key in ENDS:
                if isinstance(run.get(key), int | float):
                    run[key] = math.ceil(run[key] * share - 1e-9) if key != "time_s" else run[key] * share
            warm_up = run.get("warm_up_versions")
            if isinstance(warm_up, int):
                run["warm_up_versions"] = min(math.floor(warm_up * share), run.get("versions", warm_up + 1) - 1)
        return {**config, "run": run}

    def grid(self) -> Iterator[dict[str, Any]] | None:
        """Every combination, the last key fastest; None where there are more than ``trials``, or they are endless."""
        counts = [choice.count if isinstance(choice, Range) else len(choice) for choice in self.search.values()]
        if None in counts or math.prod(count for count in counts if count is not None) > self.header.trials:
            return None
        values = [(choice.values or []) if isinstance(choice, Range) else choice for choice in self.search.values()]
        return (dict(zip(self.search, each, strict=True)) for each in itertools.product(*values))


def load_plan(path: Path, changes: Sequence[str] = ()) -> Plan:
    """Read a plan file; ``changes`` are ``dotted.key=value`` with a TOML value.

    Raises StudyError: file, key, what it got, what would be accepted.
    """
    content = read(path, TABLES)
    if "plan" not in content:
        raise StudyError(f"{path}: the table [plan] is missing, which says what is searched")
    table = dict(content["plan"])
    search = _search(table.pop("search", {}), f"{path}: plan.search")
    header: Header = parse(Header, table, f"{path}: plan")
    base = {name: content[name] for name in CONFIGURATION if name in content}
    apply_changes(base, (), changes)
    for change in changes:
        key = change.partition("=")[0].strip()
        if any(_overlap(key, other) for other in search):
            raise StudyError(f"--set {change}: the plan searches {key}; change plan.search in the file")
    on_cluster = is_cluster(base, str(path))
    targets = parse(dict[str, float], content.get("targets", {}), f"{path}: targets")
    known = measures(on_cluster=on_cluster, targets=targets)
    _check_split(header, search, base, str(path), on_cluster=on_cluster)
    return Plan(
        path.stem,
        path,
        header,
        search,
        base,
        targets,
        known,
        _objective(header, known, targets, str(path), on_cluster=on_cluster, learns="workload" in base),
        _measure(header.against, known, f"{path}: plan.against"),
    )


def _overlap(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")


def _search(table: Any, where: str) -> dict[str, Choice]:
    """Dotted key → values. Tables are looked into until one is a range."""
    if not isinstance(table, dict):
        raise StudyError(f"{where}: got {table!r}; a table of dotted keys would do")
    found: dict[str, Choice] = {}
    _collect(table, "", found, where)
    if not found:
        raise StudyError(
            f"{where}: nothing is searched; a dotted key with values would do, such as strategy.eta = [0, 1]"
        )
    for key in found:
        table_name = key.split(".")[0]
        if table_name not in CONFIGURATION:
            raise StudyError(f"{where}: {key}: unknown table{did_you_mean(table_name, CONFIGURATION)}")
        if "." not in key:
            raise StudyError(f"{where}: {key}: a whole table; one of its keys, as {key}.name, would do")
    for one, other in itertools.combinations(found, 2):
        if _overlap(one, other):
            raise StudyError(f"{where}: {one} and {other} set the same key; one of them would do")
    return found


def _collect(table: Mapping[str, Any], prefix: str, found: dict[str, Choice], where: str) -> None:
    for name, value in table.items():
        key = prefix + name
        if key in found:
            raise StudyError(f"{where}: {key} is there twice")
        if isinstance(value, dict) and not {"low", "high"} & set(value):
            _collect(value, f"{key}.", found, where)
        elif isinstance(value, dict):
            found[key] = parse(Range, value, f"{where}: {key}")
        elif isinstance(value, list) and value:
            if len({repr(item) for item in value}) < len(value):
                raise StudyError(f"{where}: {key}: values must differ, got {value}")
            found[key] = tuple(value)
        else:
            raise StudyError(f"{where}: {key}: got {value!r}; a list of values, or {{ low = …, high = … }}, would do")


def _check_split(
    header: Header, search: Mapping[str, Choice], base: Mapping[str, Any], where: str, *, on_cluster: bool
) -> None:
    if header.total_gpus is None:
        return
    if not on_cluster:
        raise StudyError(f"{where}: plan.total_gpus: this plan has no [cluster] whose GPUs could be divided")
    if SPLIT[1] in search or "training_gpus" in base["cluster"]:
        raise StudyError(
            f"{where}: plan.total_gpus = {header.total_gpus} gives cluster.training_gpus what generation_gpus leave; "
            "leave cluster.training_gpus out"
        )
    colocated = search.get("cluster.colocated", (base["cluster"].get("colocated", False),))
    generation = search.get(SPLIT[0], (base["cluster"].get("generation_gpus"),))
    most = header.total_gpus - 1
    if isinstance(colocated, tuple) and True not in colocated and not _any_between(generation, 1, most):
        got = f"{generation.low} … {generation.high}" if isinstance(generation, Range) else list(generation)
        raise StudyError(
            f"{where}: plan.total_gpus = {header.total_gpus} cannot be divided with {SPLIT[0]} = {got}: nobody "
            f"generates, or nobody trains; 1 to {most} would do"
        )


def _any_between(choice: Choice, low: int, high: int) -> bool:
    """Whether one of the values may be an integer between these; what is no integer is refused elsewhere."""
    if isinstance(choice, Range):
        return not choice.is_integer or choice.has_between(low, high)
    return any(not isinstance(value, int) or low <= value <= high for value in choice)


def _objective(
    header: Header,
    known: Mapping[str, Measure],
    targets: Mapping[str, float],
    where: str,
    *,
    on_cluster: bool,
    learns: bool,
) -> Measure:
    name = header.objective
    if name is None:
        name = "tokens_per_second" if on_cluster else "time_to_target_s" if targets else "updates_per_second"
    if name in known or not learns or header.better is None:
        found = _measure(name, known, f"{where}: plan.objective")
        return found if header.better is None else found.with_better(header.better)
    return Measure.final(name, header.better)


def _measure(name: str, known: Mapping[str, Measure], where: str) -> Measure:
    if name not in known:
        raise StudyError(f"{where}: no measure {name!r}{did_you_mean(name, known)}")
    return known[name]


def check_limits(plan: Plan) -> None:
    """Raise StudyError for a limit on what is not measured."""
    for name in plan.header.limits:
        _measure(name, plan.measures, f"{plan.path}: plan.limits.{name}")
