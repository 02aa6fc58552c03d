"""Candidates of a plan and what they come to: runs made in parallel, each once, found again in the plan's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from fedasync.report.statistics import Interval, mean_interval
from fedasync.runs.run import SUMMARY
from fedasync.simulation import Clients
from fedasync.studies import store
from fedasync.studies.errors import StudyError
from fedasync.studies.execute import EARLY, Job, Outcome, checked, groups
from fedasync.studies.plan_file import Plan
from fedasync.studies.study import RunPlan

Make = Callable[[Sequence[Sequence[Job]]], list[Outcome]]
"""Makes runs, and says how each went."""


@dataclass(frozen=True)
class Found:
    """What runs of one candidate came to, over seeds: measure → seed → value; or why there is nothing."""

    share: float
    by_seed: Mapping[str, Mapping[int, float | None]] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    error: str | None = None

    def mean(self, measure: str) -> float | None:
        """Over the seeds; None where one has no value."""
        values = list(self.by_seed.get(measure, {}).values())
        known = [value for value in values if value is not None and isfinite(value)]
        return sum(known) / len(known) if known and len(known) == len(values) else None

    def interval(self, measure: str) -> Interval | None:
        """Mean and Student-t interval over the seeds; None where one has no value."""
        if self.mean(measure) is None:
            return None
        return mean_interval(value for value in self.by_seed[measure].values() if value is not None)


@dataclass
class Trial:
    """A candidate: the values it sets, and what was found, rung by rung."""

    number: int
    values: dict[str, Any]
    config: dict[str, Any]
    found: list[Found] = field(default_factory=list)
    confirmed: Found | None = None
    refused: str | None = None
    """Why its values make no configuration."""

    @property
    def first(self) -> Found:
        return self.found[0]

    @property
    def last(self) -> Found:
        return self.found[-1]

    @property
    def error(self) -> str | None:
        return self.last.error

    def __str__(self) -> str:
        return ", ".join(f"{key.rsplit('.', 1)[-1]} = {plain(value)}" for key, value in self.values.items())


def plain(value: object) -> str:
    """A value as a study file has it."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {plain(item)}' for key, item in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(plain, value))}]"
    return f"{value:.6g}" if isinstance(value, float) and value != int(value) else json.dumps(value, ensure_ascii=False)


class Trials:
    """The candidates of a plan in the order of their making, no two of them alike."""

    def __init__(self, plan: Plan, folder: Path, make: Make) -> None:
        self.plan, self.folder = plan, folder
        self.all: list[Trial] = []
        self._make = make
        self._by_config: dict[str, Trial] = {}
        self._worlds: dict[str, Clients | None] = {}

    def add(self, values: dict[str, Any]) -> Trial:
        """The candidate of these values: a new one, or the one that comes to the same configuration."""
        refused = None
        try:
            config = self.plan.config(values)
        except StudyError as error:
            config, refused = dict(values), str(error).removeprefix(f"{self.plan.path}: ")
        key = json.dumps(config, sort_keys=True)
        if key not in self._by_config:
            self._by_config[key] = Trial(len(self.all), values, config, refused=refused)
            self.all.append(self._by_config[key])
        return self._by_config[key]

    def run(self, trials: Sequence[Trial], rung: int) -> None:
        """Make the runs of these candidates at a rung, where they have not been made."""
        share = self.plan.header.rungs[rung]
        seeds = range(self.plan.header.seeds)
        todo = list({trial.number: trial for trial in trials if len(trial.found) <= rung}.values())
        for trial, found in zip(todo, self._measured(todo, share, seeds, "trials"), strict=True):
            trial.found.append(found)

    def confirm(self, trials: Sequence[Trial]) -> None:
        """Make whole runs with seeds that the search has not seen, and keep all of them."""
        first = self.plan.header.seeds
        seeds = range(first, first + self.plan.header.confirm_seeds)
        for trial, found in zip(trials, self._measured(trials, 1.0, seeds, "runs"), strict=True):
            trial.confirmed = found

    def _measured(
        self, trials: Sequence[Trial], share: float, seeds: Sequence[int], room: Literal["trials", "runs"]
    ) -> list[Found]:
        refused: dict[int, str] = {}
        jobs: dict[int, list[Job]] = {}
        for trial in trials:
            if trial.refused is not None:
                refused[trial.number] = trial.refused
                continue
            try:
                jobs[trial.number] = [self._job(trial, share, seed, room) for seed in seeds]
            except StudyError as error:
                refused[trial.number] = str(error).removeprefix(f"{self.plan.path}: ")
        together = groups([job for own in jobs.values() for job in own])
        unfinished = [[job for job in group if not store.is_finished(job.folder)] for group in together]
        waiting = [group for group in unfinished if group]
        failed = {outcome.folder: outcome.error for outcome in self._make(waiting) if outcome.error} if waiting else {}
        return [
            Found(share, error=refused[trial.number])
            if trial.number in refused
            else self._read(trial, share, jobs[trial.number], failed)
            for trial in trials
        ]

    def _job(self, trial: Trial, share: float, seed: int, room: Literal["trials", "runs"]) -> Job:
        plan = self.plan
        config = {**plan.shortened(trial.config, share), "targets": dict(plan.targets), "seed": seed}
        labels = {key.rsplit(".", 1)[-1]: plain(value) for key, value in trial.values.items()}
        run = RunPlan(labels, seed, config)
        parts = checked(run, str(plan.path), self._worlds)
        run_id = store.run_id(labels, seed, config, store.inputs(config, *parts.sources))
        keep: Literal["all", "summary"] = "all" if room == "runs" else "summary"
        return Job(run, plan.name, str(plan.path), self.folder / room / run_id, keep)

    def _read(self, trial: Trial, share: float, jobs: Sequence[Job], failed: Mapping[Path, str]) -> Found:
        """From the files, for a run just made as for one found there."""
        for job in jobs:
            if job.folder in failed:
                return Found(share, error=failed[job.folder].split(" (traceback")[0])
        summaries = {job.plan.seed: json.loads((job.folder / SUMMARY).read_text()) for job in jobs}
        by_seed: dict[str, dict[int, float | None]] = {}
        for measure in {m.name: m for m in (*self.plan.measures.values(), self.plan.objective)}.values():
            by_seed[measure.name] = {seed: measure.of(summary, trial.config) for seed, summary in summaries.items()}
        found = Found(share, by_seed, tuple(job.folder.name for job in jobs))
        ends = list(dict.fromkeys(str(summary["ended"]) for summary in summaries.values()))
        error = next((end for end in ends if end.startswith(EARLY)), None)
        if error is None and found.mean(self.plan.objective.name) is None:
            error = f"no {self.plan.objective.text} (ended: {', '.join(ends)})"
        return replace(found, error=error)
