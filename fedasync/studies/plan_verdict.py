"""What a plan's trials say: the recommendation, its runner-up, and what binds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedasync.report.paired import Difference, paired_difference, verdicts
from fedasync.studies.build import is_cluster
from fedasync.studies.plan_file import SPLIT, Plan, Range
from fedasync.studies.plan_measures import shown
from fedasync.studies.plan_search import broken, excess
from fedasync.studies.plan_trials import Found, Trial, plain

UNEVEN = 0.02
"""Shares of time that differ by less say nothing of who waits for whom."""


@dataclass(frozen=True)
class Verdict:
    """``best`` and ``second`` are confirmed; ``best`` is None where nothing lies within the limits."""

    best: Trial | None
    second: Trial | None
    difference: Difference | None
    """Of the objective, best less second, paired by seed."""
    said: tuple[str, ...]
    """What is to be known, a sentence each."""


def conclude(plan: Plan, trials: Sequence[Trial], confirmed: Sequence[Trial]) -> Verdict:
    """Draw the conclusions; ``confirmed`` in order of merit."""
    within = [trial for trial in confirmed if trial.confirmed is not None and not excess(plan, trial.confirmed)]
    if not within:
        return Verdict(None, None, None, tuple(_nothing(plan, trials, confirmed)))
    best, second = within[0], within[1] if len(within) > 1 else None
    difference = None
    said: list[str] = []
    if second is not None:
        difference = _difference(plan, best, second)
        said.append(_compared(plan, second, difference))
    said += [*_limits(plan, best), *_sides(plan, best), *_without(plan, trials, best), *_edges(plan, best)]
    said += _excluded(plan, trials)
    return Verdict(best, second, difference, tuple(said))


def keys(plan: Plan, trial: Trial) -> dict[str, Any]:
    """The values of a candidate for a study, by dotted key: those searched, and the split's other side."""
    found = dict(trial.values)
    if plan.header.total_gpus is not None:
        found |= {key: trial.config["cluster"][key.split(".")[1]] for key in SPLIT}
    return found


def quantities(plan: Plan) -> list[str]:
    """Measures that are shown of a candidate: the objective and what is bounded first."""
    named = [plan.objective.name, *plan.header.limits, *shown(on_cluster=is_cluster(plan.base, "")), plan.against.name]
    return list(dict.fromkeys(named))


def _confirmed(trial: Trial) -> Found:
    if trial.confirmed is None:
        raise AssertionError("a trial that was not confirmed")
    return trial.confirmed


def _difference(plan: Plan, best: Trial, second: Trial) -> Difference:
    name = plan.objective.name
    return paired_difference(_confirmed(best).by_seed[name], _confirmed(second).by_seed[name])


def _compared(plan: Plan, second: Trial, found: Difference) -> str:
    name = plan.objective
    mean = _confirmed(second).mean(name.name) or 0.0
    if found.mean is None:
        return f"The runner-up ({second}) shares no seed with the recommendation."
    share = f" ({found.mean / mean:+.2%})" if mean else ""
    told = f"{_signed(found.mean)}{_unit(name.unit)}{share} over the runner-up ({second})"
    if found.low is None or found.high is None:
        return f"{told}, the same in each of {found.pairs} seeds."
    word = {
        "clear": "clear",
        "weak": "clear",
        "within noise": "within noise: take either",
    }[verdicts([found])[0]]
    if found.mean == 0 == found.low == found.high:
        return f"The runner-up ({second}) comes to the same; {plan.against.name} decides, then the order of the search."
    return f"{told}, 95 % interval {_signed(found.low)} to {_signed(found.high)} over {found.pairs} pairs: {word}."


def _signed(value: float) -> str:
    return f"{value:+,.0f}" if abs(value) >= 1000 else f"{value:+.4g}"


def _unit(unit: str) -> str:
    return f" {unit}" if unit else ""


def _limits(plan: Plan, best: Trial) -> list[str]:
    """Where the recommendation stands to its limits: at one, or across it with an end of its interval."""
    said = []
    for name, limit in plan.header.limits.items():
        interval = _confirmed(best).interval(name)
        if interval is None:
            continue
        mean = interval.mean
        bound = limit.at_most if limit.at_most is not None and limit.excess(mean * 1.05) else limit.at_least
        ends = [end for end in (interval.low, interval.high) if end is not None]
        if any(limit.excess(end) for end in ends):
            said.append(f"{name} {limit} holds of the mean, {mean:.4g}, and not of its whole interval.")
        elif bound is not None and abs(mean - bound) <= 0.05 * (abs(bound) or 1.0):
            said.append(f"{name} {limit} binds: {mean:.4g}.")
    return said


def _sides(plan: Plan, best: Trial) -> list[str]:
    """Which side waits for which."""
    found = _confirmed(best)
    if not is_cluster(plan.base, ""):
        waiting, server = found.mean("waiting_share") or 0.0, found.mean("server_share") or 0.0
        if server > 1 - UNEVEN:
            return [f"The server binds: it steps in {server:.1%} of the time."]
        told = f"{waiting:.1%} of slots × time are not filled, and the server steps in {server:.1%} of the time"
        return [f"{'Slots bind' if waiting < UNEVEN else 'Neither side binds'}: {told}."]
    waits, idle = found.mean("trainer_waiting_share"), found.mean("servers_idle_share")
    if waits is None or idle is None:
        return []
    told = f"the trainer waits {waits:.1%} of the time, servers idle {idle:.1%}"
    if waits > idle + UNEVEN:
        return [f"Generation binds: {told}."]
    if idle > waits + UNEVEN:
        return [f"Training binds, or admission: {told}."]
    return [f"The two sides are balanced: {told}."]


def _without(plan: Plan, trials: Sequence[Trial], best: Trial) -> list[str]:
    """For each limit, what it costs: the best candidate that misses this one alone, where it is better.

    By the first rung, where all ran alike. The best of many in few runs looks better than it is, so that both numbers
    are told.
    """
    said = []
    name, sign = plan.objective.name, plan.objective.sign
    own = best.first.mean(name)
    for limited, limit in plan.header.limits.items():
        others = [
            (sign * value, trial.number, trial, value)
            for trial in trials
            if not trial.first.error
            and list(broken(plan, trial.first)) == [limited]
            and (value := trial.first.mean(name)) is not None
        ]
        if others and own:
            _, _, other, value = min(others, key=lambda one: one[:2])
            if sign * value < sign * own:
                share = plan.header.rungs[0]
                runs = f"{plan.header.seeds}-seed runs of {'the whole' if share == 1 else f'{share:g} of the'} length"
                chosen = f"chosen among {len(others)} candidates" if len(others) > 1 else "the only such candidate"
                said.append(
                    f"Without {limited} {limit}: {other} has {value / own - 1:+.1%} {name} in {runs}, {chosen}."
                )
    return said


def _edges(plan: Plan, best: Trial) -> list[str]:
    """Keys whose recommended value is the first or last of those searched."""
    said = []
    for key, choice in plan.search.items():
        values = (choice.low, choice.high) if isinstance(choice, Range) else choice
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        value = best.values[key]
        if len(numbers) < max(2, len(values)) or value not in (min(numbers), max(numbers)):
            continue
        which = "largest" if value == max(numbers) else "smallest"
        said.append(f"{key} = {plain(value)} is the {which} that was searched.")
    return said


def _excluded(plan: Plan, trials: Sequence[Trial]) -> list[str]:
    """How many candidates each limit excludes, and how many cannot run."""
    ran = [trial for trial in trials if not trial.error]
    counts = Counter(name for trial in ran for name in broken(plan, trial.last))
    said = [
        f"{name} {limit} excludes {counts[name]} of {len(ran)} candidates."
        for name, limit in plan.header.limits.items()
        if counts[name]
    ]
    lost = [trial for trial in trials if trial.error]
    if lost:
        said.append(f"{len(lost)} of {len(trials)} candidates cannot run; the first, {lost[0]}: {lost[0].error}")
    return said


def _nothing(plan: Plan, trials: Sequence[Trial], confirmed: Sequence[Trial]) -> list[str]:
    """Why there is no recommendation, and what comes nearest."""
    said = []
    if confirmed:
        said.append(f"{len(confirmed)} candidates were within the limits in the search, and none in its confirmation.")
    said += _excluded(plan, trials)
    ran = [trial for trial in trials if not trial.error]
    if ran:
        nearest = min(ran, key=lambda trial: (excess(plan, trial.confirmed or trial.last), trial.number))
        found = nearest.confirmed or nearest.last
        misses = ", ".join(
            f"{name} = {_told(found.mean(name))} ({limit})" for name, limit in broken(plan, found).items()
        )
        said.append(f"The nearest: {nearest}, with {misses}.")
    return said


def _told(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
