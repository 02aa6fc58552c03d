"""Calibration: free parameters of a study fitted to published numbers before its runs are made, and said so."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from math import exp, log
from pathlib import Path
from typing import Any

from fedasync.report.published import labels_text, number_of
from fedasync.report.spec import Published
from fedasync.runs.run import SUMMARY, write
from fedasync.studies import store
from fedasync.studies.errors import StudyError
from fedasync.studies.execute import Job, Outcome, checked, groups, jobs
from fedasync.studies.study import Calibration, RunPlan, Study, set_key

CALIBRATION = "calibration.json"
ROOM = "calibration"
"""Folder of the runs that a fit makes, a summary each; the same run is never made twice."""
CLOSE = 1e-3
"""Share of a published number by which a fit may miss it and need not look further."""
NEAR = 0.02
"""Share of a published number by which a fit of as many parameters as numbers may miss it at most (ours)."""
STEP = 0.03
"""Of the logarithm of a parameter, over which a slope is taken: runs are no smooth functions of it."""
MOST_EVALUATIONS = 15

Make = Callable[[Sequence[Sequence[Job]]], list[Outcome]]
"""Makes runs, and says how each went."""


def calibrated(study: Study, folder: Path, make: Make) -> Study:
    """The study with the values of its free parameters, found in ``folder`` or fitted now and left there.

    One parameter and one number: a root by Brent's method; else least squares of relative errors (trust region,
    bounded). Both on a log scale, by runs of the study's first seed, so the same file gives the same values.

    Raises StudyError where a run fails or has no such number, and where values within the bounds come no nearer than
    `NEAR` to as many numbers as there are parameters. More numbers are a compromise, which `calibration_text` says.
    """
    if not study.calibrations:
        return study
    jobs(replace(study, fitted=tuple(_middle(each) for each in study.calibrations)), folder)  # refuses what cannot run
    fits = [_Fit(study, number, calibration, folder, make) for number, calibration in enumerate(study.calibrations, 1)]
    digest = hashlib.sha256(json.dumps([fit.question for fit in fits], sort_keys=True).encode()).hexdigest()
    found = _recall(folder / CALIBRATION, digest)
    if found is None:
        found = [fit.solve() for fit in fits]
        for fit, one in zip(fits, found, strict=True):
            fit.check(one)  # and is not kept
        folder.mkdir(parents=True, exist_ok=True)
        kept = {"digest": digest, "calibrations": found}
        write(folder / CALIBRATION, (json.dumps(kept, indent=1, ensure_ascii=False) + "\n").encode())
    return replace(study, fitted=tuple(one["values"] for one in found))


def calibration_text(study: Study) -> str:
    """Which parameters were fitted to which numbers, a line a calibration."""
    said = []
    for calibration, values in zip(study.calibrations, study.fitted, strict=False):
        points = _points(study, calibration)
        parameters = ", ".join(f"{key} = {value:g}" for key, value in values.items())
        to = "; ".join(f"{labels_text(p.labels)}: {p.metric} = {p.value:g} ({p.source})" for p in points)
        more = f" {len(points)} numbers for {len(values)} parameters: least squares, none is met exactly."
        said.append(f"* Fitted: {parameters}, to {to}.{more if len(points) > len(values) else ''}")
    return "\n".join(said)


class _Fit:
    """One calibration: its numbers, the runs that stand for them, and what has been tried."""

    def __init__(self, study: Study, number: int, calibration: Calibration, folder: Path, make: Make) -> None:
        self.study, self.calibration, self.folder, self.make = study, calibration, folder, make
        self.where = f"{study.path}: calibrate {number}"
        self.points = _points(study, calibration)
        self.plans = [self._plan(point) for point in self.points]
        self.question = {
            "free": [asdict(free) for free in calibration.free],
            "points": [asdict(point) for point in self.points],
            "runs": [job.folder.name for job in self._jobs(list(_middle(calibration).values()))],
            "method": [CLOSE, STEP, MOST_EVALUATIONS],
        }
        self._tried: dict[tuple[float, ...], list[float]] = {}

    def solve(self) -> dict[str, Any]:
        """The values, and what the numbers came to with them."""
        bounds = [(log(free.low), log(free.high)) for free in self.calibration.free]
        values = self._root(bounds[0]) if len(bounds) == len(self.points) == 1 else self._least_squares(bounds)
        errors = self._errors(values)
        return {
            "values": dict(zip((free.key for free in self.calibration.free), values, strict=True)),
            "labels": self.calibration.labels,
            "points": [
                {"labels": dict(p.labels), "metric": p.metric, "published": p.value, "source": p.source, "error": error}
                for p, error in zip(self.points, errors, strict=True)
            ],
            "evaluations": len(self._tried),
        }

    def check(self, found: Mapping[str, Any]) -> None:
        """Raise StudyError for values that miss a number though there is a parameter for each."""
        if len(self.points) > len(self.calibration.free):
            return
        worst = max(found["points"], key=lambda point: abs(point["error"]))
        if abs(worst["error"]) > NEAR:
            values = ", ".join(f"{key} = {value:g}" for key, value in found["values"].items())
            raise StudyError(
                f"{self.where}: the best that was found, {values}, misses {worst['metric']} = {worst['published']:g} "
                f"of {labels_text(worst['labels'])} by {worst['error']:+.1%}; other bounds or other free parameters, "
                f"which come within {NEAR:.0%}, would do"
            )

    def _root(self, bounds: tuple[float, float]) -> list[float]:
        from scipy.optimize import brentq

        free, point = self.calibration.free[0], self.points[0]
        ends = [self._errors([exp(end)])[0] for end in bounds]
        for end, error in zip(bounds, ends, strict=True):
            if abs(error) <= CLOSE:
                return [_rounded(exp(end))]
        if ends[0] * ends[1] > 0:
            low, high = (point.value * (1 + error) for error in ends)
            raise StudyError(
                f"{self.where}: {point.metric} of {labels_text(point.labels)} is {low:.4g} at {free.key} = "
                f"{free.low:g} and {high:.4g} at {free.high:g}, so no value between gives {point.value:g}; other "
                "bounds would do"
            )

        def missed(x: float) -> float:
            error = self._errors([exp(x)])[0]
            return 0.0 if abs(error) <= CLOSE else error

        return [_rounded(exp(brentq(missed, *bounds, xtol=CLOSE / 10, rtol=1e-9)))]

    def _least_squares(self, bounds: Sequence[tuple[float, float]]) -> list[float]:
        from scipy.optimize import least_squares

        low, high = zip(*bounds, strict=True)
        start = [(a + b) / 2 for a, b in bounds]

        def missed(x: Sequence[float]) -> list[float]:
            return self._errors([exp(each) for each in x])

        def slopes(x: Sequence[float]) -> list[list[float]]:
            here = missed(x)
            columns = []
            for i, (_, top) in enumerate(bounds):
                step = STEP if x[i] + STEP <= top else -STEP
                moved = [each + step * (j == i) for j, each in enumerate(x)]
                columns.append([(b - a) / step for a, b in zip(here, missed(moved), strict=True)])
            return [list(row) for row in zip(*columns, strict=True)]

        found = least_squares(
            missed,
            start,
            jac=slopes,
            bounds=(low, high),
            ftol=CLOSE**2,
            xtol=CLOSE,
            gtol=1e-12,
            max_nfev=MOST_EVALUATIONS,
        )
        return [_rounded(exp(each)) for each in found.x]

    def _errors(self, values: Sequence[float]) -> list[float]:
        """(simulated − published)/published of each number, at these values."""
        key = tuple(_rounded(value) for value in values)
        if key not in self._tried:
            self._tried[key] = self._measured(key)
        return self._tried[key]

    def _measured(self, values: Sequence[float]) -> list[float]:
        made = self._jobs(values)
        waiting = [job for job in {job.folder: job for job in made}.values() if not store.is_finished(job.folder)]
        for outcome in self.make(groups(waiting)) if waiting else []:
            if outcome.error:
                raise StudyError(f"{self.where}: {outcome.error}", 1)
        found = []
        for job, point in zip(made, self.points, strict=True):
            summary = json.loads((job.folder / SUMMARY).read_text())
            value = number_of(summary, point.metric)
            if value is None:
                raise StudyError(
                    f"{self.where}: {labels_text(point.labels)}: a run has no number {point.metric!r} (ended: "
                    f"{summary['ended']})"
                )
            found.append(value * point.times / point.value - 1)
        return found

    def _jobs(self, values: Sequence[float]) -> list[Job]:
        """A run for each number."""
        found = []
        for plan in self.plans:
            config = json.loads(json.dumps(plan.config))
            for free, value in zip(self.calibration.free, values, strict=True):
                set_key(config, free.key, _rounded(value), self.where)
            changed = RunPlan(plan.labels, plan.seed, config)
            parts = checked(changed, self.where, {})
            run_id = store.run_id(plan.labels, plan.seed, config, store.inputs(config, *parts.sources))
            found.append(Job(changed, self.study.name, self.where, self.folder / ROOM / run_id, "summary"))
        return found

    def _plan(self, point: Published) -> RunPlan:
        """The one run of the first seed that a number speaks of, as this calibration makes it."""
        matching = [plan for plan in self.study.plans(self.study.header.seed_list[:1]) if point.matches(plan.labels)]
        if len(matching) != 1:
            raise StudyError(
                f"{self.where}: {len(matching)} points of the axes have the labels {labels_text(point.labels)!r} that "
                "a fitted number speaks of; labels of one would do"
            )
        plan = matching[0]
        return replace(plan, config={**plan.config, "run": {**plan.config["run"], **self.calibration.run}})


def _points(study: Study, calibration: Calibration) -> list[Published]:
    return [point for point in study.report.published if point.fitted and calibration.concerns(point.labels)]


def _middle(calibration: Calibration) -> dict[str, float]:
    """A value of each parameter between its bounds, on the scale on which it is fitted."""
    return {free.key: _rounded(exp((log(free.low) + log(free.high)) / 2)) for free in calibration.free}


def _rounded(value: float) -> float:
    """Six digits: what is written is what was run."""
    return float(f"{value:.6g}")


def _recall(file: Path, digest: str) -> list[dict[str, Any]] | None:
    """What a fit that asked the same came to; None where there is none."""
    try:
        kept: Mapping[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return list(kept["calibrations"]) if kept.get("digest") == digest else None
