"""What a strategy's knobs imply before any run: how much is under way at most, and how old a group can get."""

from __future__ import annotations

from math import inf

from fedasync.core import StalenessBudget, Strategy, SyncBudget, Tumbling


def most_in_turn(strategy: Strategy) -> float:
    """The largest τ, in versions, of groups that are trained in the order in which they were given out.

    Of B = batch groups a version, group N (from 1) is trained from version ⌊(N − 1)/B⌋. A budget of η lets it start
    at version v only if N ≤ (η + v + 1)·B, and the published version lags by ``most_lag`` at most: τ ≤ η + most_lag.
    A sync budget lets what it holds start on the version published last: τ ≤ ⌈between/B⌉ − 1. Infinite where nothing
    bounds it.
    """
    admission = strategy.admission
    if isinstance(admission, SyncBudget):
        return -(-admission.between // admission.batch) - 1
    if isinstance(admission, StalenessBudget) and admission.eta is not None:
        return admission.eta + strategy.publication.most_lag
    return inf


def told_of_bounds(strategy: Strategy) -> str:
    """In one line: most in flight, the staleness that its budget implies, and what its own bound adds to that."""
    in_turn, bound = most_in_turn(strategy), strategy.max_staleness
    in_order = isinstance(strategy.buffer, Tumbling) and strategy.buffer.order == "dispatch"
    parts = [f"{strategy.name}: at most {strategy.admission.most_in_flight:,} in flight"]
    if in_turn < inf:
        only = "" if in_order else " trained in its turn"
        parts.append(f"what is{only} is at most {in_turn:g} version{'s' * (in_turn != 1)} old")
    else:
        parts.append("nothing that starts is bounded by age")
    if in_order and in_turn < inf:
        parts.append("and a step waits for its turn")
    elif bound is None:
        parts.append("what was overtaken may be older, and is trained")
    else:
        what = "a step waits for what" if strategy.at_bound == "wait" else "dropped is what"
        reach = ", which only what was overtaken reaches" if bound > in_turn else ""
        parts.append(f"{what} would be older than {bound} (max_staleness){reach}")
    return "; ".join(parts)
