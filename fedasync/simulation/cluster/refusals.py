"""What can never run on a cluster, said before it does."""

from __future__ import annotations

from math import inf

from fedasync.core import (
    Cohort,
    Compass,
    Concurrency,
    Periodic,
    Quota,
    StalenessBudget,
    Strategy,
    Tiers,
    Tumbling,
)
from fedasync.rl.partial_groups import AllowShort
from fedasync.simulation.cluster.cluster import Cluster
from fedasync.simulation.cluster.faults import Faults
from fedasync.simulation.cluster.learning import Learning
from fedasync.simulation.cluster.prompts import Prompts
from fedasync.simulation.cluster.settings import ClusterSettings


def check(
    strategy: Strategy,
    cluster: Cluster,
    prompts: Prompts,
    settings: ClusterSettings,
    faults: Faults,
    learning: Learning | None = None,
) -> None:
    """Raise ValueError, in one line, for parts that do not fit together; ``learning``: a policy is trained."""
    faults.check_servers(cluster.servers)
    name = f"strategy {strategy.name!r}"
    if isinstance(strategy.admission, (Tiers, Compass)) or isinstance(strategy.buffer, (Periodic, Quota)):
        raise ValueError(
            f"{name}: {type(strategy.admission).__name__} with {type(strategy.buffer).__name__} sorts clients by speed "
            "or time, and a cluster has none; a row for a cluster, such as areal, would do"
        )
    least = cluster.partial_groups.least if isinstance(cluster.partial_groups, AllowShort) else 1
    if least > prompts.answers:
        raise ValueError(
            f"cluster: allow_short with least = {least} of groups of {prompts.answers} answers (prompts.answers) never "
            f"delivers a short one; 1 to {prompts.answers} would do"
        )
    if isinstance(strategy.buffer, Tumbling) and settings.updates is not None:
        versions = -(-settings.updates // strategy.buffer.size)
        if settings.warm_up_versions >= versions:
            raise ValueError(
                f"run: warm_up_versions = {settings.warm_up_versions} leaves nothing to measure of {settings.updates} "
                f"updates, which are {versions} versions of {strategy.buffer.size}; 0 to {versions - 1} would do"
            )
    if prompts.count is not None:
        total = prompts.total
        if (
            isinstance(strategy.admission, Concurrency)
            and strategy.admission.redispatch == "next_version"
            and strategy.admission.limit > prompts.count
        ):
            raise ValueError(
                f"{name}: {strategy.admission.limit} prompts at a time, each waiting for the step that uses it "
                f"(redispatch = 'next_version'), cannot be had from a data set of {prompts.count}; prompts.count ≥ "
                f"{strategy.admission.limit} would do"
            )
        if isinstance(strategy.admission, Cohort) and strategy.admission.size > prompts.count:
            raise ValueError(
                f"{name}: a round of {strategy.admission.size} prompts, each once, cannot be had from a data set of "
                f"{prompts.count}; prompts.count ≥ {strategy.admission.size} would do"
            )
        if total is not None and strategy.first_step_needs > total:
            raise ValueError(
                f"{name}: the first step needs {strategy.first_step_needs} groups, and the data set gives "
                f"{prompts.count} prompts × {prompts.epochs} epochs = {total}; more, or a smaller batch, would do"
            )
    admission = strategy.admission
    if (
        isinstance(admission, StalenessBudget)
        and admission.limit_samples is not None
        and admission.samples != prompts.answers
    ):
        raise ValueError(
            f"{name}: limit_samples counts groups of {admission.samples} answers, and prompts.answers = "
            f"{prompts.answers}; answers = {prompts.answers} in the strategy would do"
        )
    if learning is None:
        _check_timing_only(strategy, cluster, prompts, settings)
    else:
        _check_learning(prompts, settings, learning)
    longest, capacity = prompts.longest, cluster.server_cost.capacity_tokens
    if capacity < longest < inf:
        raise ValueError(
            f"cluster: an answer may need {longest:,.0f} resident tokens, and the KV cache of a server holds "
            f"{capacity:,.0f}; more GPUs a server (tensor_parallel), or shorter answers, would do"
        )


def _check_timing_only(strategy: Strategy, cluster: Cluster, prompts: Prompts, settings: ClusterSettings) -> None:
    """Nothing is learnt, so lengths and measures have to be told."""
    name, wanted = f"strategy {strategy.name!r}", strategy.publication.measures
    if prompts.answer_tokens is None and prompts.turns is None:
        raise ValueError("prompts: give answer_tokens, or turns (whose segments have lengths), got neither")
    if settings.evaluate_every is not None and not cluster.trainer.evaluate_s:
        raise ValueError(
            f"run: evaluate_every = {settings.evaluate_every}, and nothing is learnt; a [task], or no evaluate_every, "
            "would do (or trainer.evaluate_s, which says how long evaluations take)"
        )
    if wanted and settings.divergence is None:
        raise ValueError(
            f"{name}: its publication measures {', '.join(sorted(wanted))}, and nothing says how policies move apart; "
            "run.divergence would do"
        )
    if settings.divergence is not None and (refusal := settings.divergence.refusal(wanted)) is not None:
        raise ValueError(f"{name}: {refusal}")


def _check_learning(prompts: Prompts, settings: ClusterSettings, learning: Learning) -> None:
    """A policy decides how long its answers are, what is right, and how far its versions are apart."""
    told = {
        "answer_tokens": prompts.answer_tokens is not None,
        "turns": prompts.turns is not None,
        "most_tokens": prompts.most_tokens is not None,
        "filtered_share": prompts.filtered_share > 0,
    }
    if given := [name for name, there in told.items() if there]:
        raise ValueError(f"prompts: {given[0]} is what the policy decides, where one is trained; leave it out")
    if settings.divergence is not None:
        raise ValueError("run: divergence models what is measured where a policy is trained; leave it out")
    if prompts.answers != learning.answers:
        raise ValueError(f"prompts: answers = {prompts.answers}, and {learning.answers} are generated to each prompt")
