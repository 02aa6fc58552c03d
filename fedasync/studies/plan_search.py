"""How a plan finds its best candidates: all combinations or a sampler, short runs first, the best confirmed.

Every choice is a function of the plan and of what runs came to, never of how many processes made them: candidates are
asked for in batches of a fixed size, and told in the order in which they were asked.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from fedasync.studies.errors import StudyError
from fedasync.studies.plan_file import Choice, Limit, Plan, Range
from fedasync.studies.plan_trials import Found, Trial, Trials

BATCH = 8
"""Candidates that the sampler is asked for at once."""
SAMPLER_SEED = 0
_REFUSED = 1e6
"""What the sampler is told of a candidate that cannot run, in place of how far it lies outside its limits."""


def search(plan: Plan, trials: Trials) -> list[Trial]:
    """Try candidates, and confirm the best of those within the limits; the confirmed, the best first.

    Of candidates whose runs came to the same (a limit that never binds) the first is confirmed for all.
    Raises StudyError when no candidate can run at all.
    """
    explore(plan, trials)
    if all(trial.error for trial in trials.all):
        raise StudyError(f"{plan.path}: no candidate can run; the first, {trials.all[0]}: {trials.all[0].error}")
    going = [trial for trial in trials.all if not trial.error]
    for rung in range(1, len(plan.header.rungs)):
        going = ranked(plan, going)[: max(plan.header.finalists, math.ceil(plan.header.keep * len(going)))]
        trials.run(going, rung)
        going = [trial for trial in going if not trial.error]
    finalists: list[Trial] = []
    for trial in ranked(plan, going):
        is_new = all(trial.last.by_seed != other.last.by_seed for other in finalists)
        if is_new and len(finalists) < plan.header.finalists and not excess(plan, trial.last):
            finalists.append(trial)
    trials.confirm(finalists)
    made = [trial for trial in finalists if trial.confirmed is not None and trial.confirmed.error is None]
    return sorted(made, key=lambda trial: _key(plan, trial, trial.confirmed))


def explore(plan: Plan, trials: Trials) -> None:
    """Run candidates at the first rung: every combination where there are at most ``trials``, else a sampler's."""
    grid = plan.grid()
    if grid is not None:
        for values in grid:
            trials.add(values)
        trials.run(trials.all, 0)
        return
    sampled = _Sampled(plan)
    asked = 0
    while asked < plan.header.trials:
        batch = sampled.ask(min(BATCH, plan.header.trials - asked))
        asked += len(batch)
        made = [trials.add(values) for values in batch]
        trials.run(made, 0)
        sampled.tell(made)


def ranked(plan: Plan, trials: Sequence[Trial]) -> list[Trial]:
    """By what was found last: those within the limits by the objective, then the others by how far they are outside."""
    return sorted(trials, key=lambda trial: _key(plan, trial, trial.last))


def _key(plan: Plan, trial: Trial, found: Found | None) -> tuple[float, ...]:
    if found is None or found.error:
        return (math.inf, 0.0, 0.0, trial.number)
    against = found.mean(plan.against.name)
    return (
        excess(plan, found),
        plan.objective.sign * (found.mean(plan.objective.name) or 0.0),
        math.inf if against is None else plan.against.sign * against,
        trial.number,
    )


def excess(plan: Plan, found: Found) -> float:
    """By how much the limits are missed in all, as shares of their bounds; 0 within them."""
    return sum(limit.excess(found.mean(name)) for name, limit in plan.header.limits.items())


def broken(plan: Plan, found: Found) -> dict[str, Limit]:
    """The limits that are missed."""
    return {name: limit for name, limit in plan.header.limits.items() if limit.excess(found.mean(name)) > 0}


class _Sampled:
    """Optuna's tree-structured Parzen estimator, asked for batches."""

    def __init__(self, plan: Plan) -> None:
        try:
            import optuna
        except ImportError:
            raise StudyError(
                f"{plan.path}: more combinations than trials = {plan.header.trials} need Optuna: "
                "pip install 'fedasync[plan]', or a smaller search, would do",
                1,
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._plan = optuna, plan
        self._space = {key: _distribution(optuna, choice) for key, choice in plan.search.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                seed=SAMPLER_SEED,
                n_startup_trials=max(BATCH, plan.header.trials // 4),
                multivariate=True,
            )
        self._study = optuna.create_study(
            sampler=sampler, direction="minimize" if plan.objective.better == "lower" else "maximize"
        )
        self._asked: list[Any] = []

    def ask(self, count: int) -> list[dict[str, Any]]:
        self._asked = [self._study.ask(self._space) for _ in range(count)]
        return [
            {key: _value(choice, asked.params[key]) for key, choice in self._plan.search.items()}
            for asked in self._asked
        ]

    def tell(self, trials: Sequence[Trial]) -> None:
        state = self._optuna.trial.TrialState
        for asked, trial in zip(self._asked, trials, strict=True):
            value = None if trial.first.error else trial.first.mean(self._plan.objective.name)
            for name, limit in self._plan.header.limits.items():
                outside = _REFUSED if value is None else min(limit.excess(trial.first.mean(name)), _REFUSED)
                asked.set_constraint(name, outside)
            if value is None:
                self._study.tell(asked, state=state.PRUNED)
            else:
                self._study.tell(asked, value)


def _distribution(optuna: Any, choice: Choice) -> Any:
    """Of a range; of a list, the places: in a row where it ascends, else without order."""
    of = optuna.distributions
    if not isinstance(choice, Range):
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in choice)
        if numbers and list(choice) == sorted(choice) and len(choice) > 1:
            return of.IntDistribution(0, len(choice) - 1)
        return of.CategoricalDistribution(list(range(len(choice))))
    if choice.is_integer:
        step = 1 if choice.step is None else int(choice.step)
        return of.IntDistribution(int(choice.low), int(choice.high), log=choice.log, step=step)
    return of.FloatDistribution(float(choice.low), float(choice.high), log=choice.log, step=choice.step)


def _value(choice: Choice, drawn: Any) -> Any:
    return drawn if isinstance(choice, Range) else choice[drawn]
