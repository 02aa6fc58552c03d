"""Rows for reinforcement learning of language models: rollout servers generate, a trainer learns, neither need wait.

A lease is a prompt with its answers, a *group*; batches and limits count groups unless they say otherwise. A version is
a step of the trainer over one batch, a publication what the servers get to see. These rows say when things happen, not
what is learnt: they run on a simulated cluster.

Where a system's own unit is another one, the row says how it becomes versions and groups. Defaults are the systems'
own where they are known to us; "ours" where they are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack

from typing_extensions import TypedDict

from fedasync.core import EveryN, EveryVersion, Publication, StalenessBudget, Strategy, SyncBudget, Tumbling
from fedasync.core.bounds import check_choice, check_integer
from fedasync.core.buffering import Order
from fedasync.core.publication import InFlight
from fedasync.core.strategy import AtBound
from fedasync.core.timeouts import AdaptiveTimeout
from fedasync.strategies.knobs import known

Sampler = Literal["windowed", "windowed_freshest", "ready_first", "weight_fifo", "in_order"]


@dataclass(frozen=True, slots=True)
class PolicyStep:
    """The trainer's step on a batch of groups, by the name of its ``objective``: "ppo", "decoupled_ppo", ….

    Under the virtual clock it only takes time: nothing is computed, and the objective is a note.
    """

    objective: str

    def __post_init__(self) -> None:
        if not isinstance(self.objective, str) or not self.objective:
            raise ValueError(f"objective must be a name such as 'ppo', got {self.objective!r}")


class Rollouts(TypedDict, total=False):
    """Knobs of every row here."""

    objective: str
    """What the trainer optimises, by name."""
    lease_timeout_s: float | AdaptiveTimeout | None
    """Give up a group after this time, or after one that follows recent durations (default: never)."""


class Publishing(Rollouts, total=False):
    """Knobs of rows whose versions may be published by any rule."""

    publication: Publication
    """When servers get a version (default: every version). What they generate then goes the way of the row, unless the
    rule says other than "continue"."""


class Bounded(Publishing, total=False):
    """Knobs of rows that have no bound of their own on a group's age."""

    max_staleness: int | None
    """Drop a group that would be trained with a larger τ (default: none is dropped)."""
    stop_stale: bool
    """Cancel a group at once when it can only be dropped (default false: it is generated to its end)."""
    at_bound: AtBound
    """Whether the trainer drops a group beyond max_staleness (default) or waits so that none gets there."""


def synchronous_rl(*, batch: int, limit: int | None = None, **knobs: Unpack[Publishing]) -> Strategy:
    """Generate a batch, train on it, publish, and so on: nothing overlaps, nothing is stale.

    A group that fails is replaced by another prompt. ``limit`` groups are generated at a time (default: the batch).
    """
    known("synchronous_rl", knobs, Publishing)
    return _strategy("synchronous_rl", StalenessBudget(0, batch, limit), Tumbling(batch), knobs)


def one_step_overlap(*, batch: int, limit: int | None = None, **knobs: Unpack[Publishing]) -> Strategy:
    """A batch is generated while the one before it trains, and no more: verl's one-step-off, and others'.

    A batch starts when the one before has been generated whole and the last but one has been trained: all of it from
    one version, and trained one version later.
    """
    known("one_step_overlap", knobs, Publishing)
    return _strategy("one_step_overlap", StalenessBudget(1, batch, limit, in_batches=True), Tumbling(batch), knobs)


def areal(
    *,
    batch: int,
    eta: int | Literal["unbounded"] | None = 4,
    limit: int | None = None,
    limit_samples: int | None = None,
    answers: int = 1,
    interrupt: bool = True,
    **knobs: Unpack[Bounded],
) -> Strategy:
    """AReaL (Fu et al. 2025): accepted + in flight ≤ (η + v + 1)·B, oldest first, updates interrupt generation.

    η is in versions, as here; the paper's experiments have 4 for code (the default here) and 8 for mathematics; the
    code's own default is 0. None, or "unbounded", is no gate, and needs a ``limit`` of groups in flight.
    ``limit_samples`` bounds answers being generated instead, of groups of ``answers``. Without ``interrupt`` servers
    finish what they generate before they load. The gate bounds the mean: a group that was overtaken may be older;
    ``max_staleness`` drops such, or with ``at_bound = "wait"`` the trainer waits for them.
    """
    known("areal", knobs, Bounded)
    admission = StalenessBudget(None if eta == "unbounded" else eta, batch, limit, limit_samples, answers)
    return _strategy("areal", admission, Tumbling(batch, "oldest_first"), knobs, _way(interrupt), "decoupled_ppo")


def streaming(
    *, batch: int, trigger_parameter_sync_step: int = 4, limit: int | None = None, **knobs: Unpack[Rollouts]
) -> Strategy:
    """verl's stream mode: between two publications exactly what is trained is generated, and trained as it arrives.

    ``verl`` with no extra samples: the k = ``trigger_parameter_sync_step`` batches of one published version become k
    versions, so τ is at most k − 1; the trainer need not wait for the slowest group before its last step, and
    generation waits for the publication. k = 4 is verl's.
    """
    known("streaming", knobs, Rollouts)
    k = trigger_parameter_sync_step
    return _strategy("streaming", SyncBudget(0, batch, k, limit), Tumbling(batch), knobs, every=k)


def verl(
    *,
    mini_batch: int,
    require_batches: int = 1,
    trigger_parameter_sync_step: int = 4,
    staleness_threshold: float = 0.1,
    partial_rollout: bool = True,
    limit: int | None = None,
    **knobs: Unpack[Rollouts],
) -> Strategy:
    """verl's fully asynchronous policy: between publications (1 + s)·k·m·b groups may start, less what is left over.

    k = ``trigger_parameter_sync_step``, m = ``require_batches``, b = ``mini_batch`` (groups; verl's sample is a prompt
    with its answers), s = ``staleness_threshold``: the share generated beyond what is trained, 0.1 in verl's
    configuration and 0.5 in most of its recipes. m·b groups make a version here, and k versions a publication. No
    group is dropped. With ``partial_rollout`` a publication interrupts; without, servers finish first.
    """
    known("verl", knobs, Rollouts)
    check_integer("verl: mini_batch", mini_batch, 1)
    check_integer("verl: require_batches", require_batches, 1)
    batch, k = require_batches * mini_batch, trigger_parameter_sync_step
    admission = SyncBudget(staleness_threshold, batch, k, limit)
    return _strategy("verl", admission, Tumbling(batch), knobs, _way(partial_rollout), every=k)


def verl_bounded(
    *,
    batch: int,
    eta: int = 1,
    max_off_policy_threshold: int = 8,
    max_off_policy_strategy: AtBound = "drop",
    limit: int | None = None,
    **knobs: Unpack[Publishing],
) -> Strategy:
    """verl's V1 trainer: a bound on versions from a group's first token to its training; beyond it, drop or wait.

    Threshold 8 and ``drop`` are verl's defaults. With ``wait`` the trainer waits for groups in flight that would exceed
    it. A train batch is a version here, whatever its mini-batches. ``eta``, how many batches generation may be ahead,
    is ours: verl refills to a constant number of groups, which is not known to us.
    """
    known("verl_bounded", knobs, Publishing)
    return _strategy(
        "verl_bounded",
        StalenessBudget(eta, batch, limit),
        Tumbling(batch, "oldest_first"),
        {**knobs, "max_staleness": max_off_policy_threshold, "at_bound": max_off_policy_strategy},
        "interrupt",
    )


def prime_rl(
    *,
    batch: int,
    target_lag: int = 1,
    max_off_policy_steps: int = 8,
    limit: int | None = None,
    **knobs: Unpack[Publishing],
) -> Strategy:
    """prime-rl: a group older than ``max_off_policy_steps`` is dropped from the queue, and cancelled in flight.

    Its age is the version that a batch trains on less the oldest that produced any part of it, time in the queue
    included: τ here. 8 is its default. Dispatch pauses when batches are more than a constant TARGET_LAG = 1 ahead of
    the trainer, so that only stragglers come near 8; here what is in flight counts as ahead too (ours).
    """
    known("prime_rl", knobs, Publishing)
    bounds = {"max_staleness": max_off_policy_steps, "stop_stale": True}
    admission = StalenessBudget(target_lag, batch, limit)
    return _strategy("prime_rl", admission, Tumbling(batch), {**knobs, **bounds}, "interrupt", "dppo")


def nemo_rl(
    *,
    batch: int,
    max_trajectory_age_steps: int = 1,
    sampler: Sampler = "windowed",
    interrupt: bool = False,
    limit: int | None = None,
    **knobs: Unpack[Publishing],
) -> Strategy:
    """NeMo-RL: groups are made at most ``max_trajectory_age_steps`` (1) versions ahead; a sampler picks a step's.

    ``windowed`` generates up to twice that far ahead (its buffer holds prompts·age·2) and drops what is older;
    ``windowed_freshest`` prefers the newest of them. ``ready_first`` takes whatever is ready and drops nothing,
    ``weight_fifo`` the oldest version first. ``in_order`` trains prompts exactly in the order of their dispatch, and
    waits for the slowest. In-flight updates are an option there; off here (ours). How far each sampler lets generation
    run ahead is ours, apart from the buffer's size.
    """
    known("nemo_rl", knobs, Publishing)
    check_choice("nemo_rl: sampler", sampler, Sampler)
    check_integer("nemo_rl: max_trajectory_age_steps", max_trajectory_age_steps, 0)
    orders: dict[Sampler, Order] = {
        "windowed": "arrival",
        "windowed_freshest": "freshest_first",
        "ready_first": "arrival",
        "weight_fifo": "oldest_first",
        "in_order": "dispatch",
    }
    window = sampler in ("windowed", "windowed_freshest")
    bounds = {"max_staleness": max_trajectory_age_steps} if window else {}
    admission = StalenessBudget(max_trajectory_age_steps * (2 if window else 1), batch, limit)
    return _strategy("nemo_rl", admission, Tumbling(batch, orders[sampler]), {**knobs, **bounds}, _way(interrupt))


def trl(
    *,
    batch: int,
    max_staleness: int = 4,
    weight_sync_steps: int = 1,
    queue: int = 128,
    interrupt: bool = True,
    **knobs: Unpack[Rollouts],
) -> Strategy:
    """TRL's asynchronous GRPO: (bound + 1)·batch groups in flight, a bounded queue, and too old a group is dropped.

    ``max_staleness`` (4) counts publications, of which there is one every ``weight_sync_steps`` = n (1) versions: in
    versions that is n·bound + n − 1, exactly. TRL has bound·batch in flight, none at all for bound 0, where this row is
    synchronous but for what it drops. ``queue`` is in groups: its 1024 answers in groups of 8; a full queue stops
    generation, here up to the end of a batch sooner or later (ours). Interruption is as recalled.
    """
    known("trl", knobs, Rollouts)
    check_integer("trl: batch", batch, 1)
    check_integer("trl: max_staleness", max_staleness, 0)
    check_integer("trl: weight_sync_steps", weight_sync_steps, 1)
    check_integer("trl: queue", queue, 1)
    limit, n = (max_staleness + 1) * batch, weight_sync_steps
    eta = max(n - 1, -(-(queue + limit) // batch))  # beside the batch that trains: the queue, and what is in flight
    bounds = {"max_staleness": n * max_staleness + n - 1}
    admission = StalenessBudget(eta, batch, limit)
    return _strategy("trl", admission, Tumbling(batch), {**knobs, **bounds}, _way(interrupt), every=n)


def skyrl(
    *, batch: int, max_staleness_steps: int = 4, limit: int | None = None, **knobs: Unpack[Publishing]
) -> Strategy:
    """SkyRL: accepted + running ≤ (S + step)·B, where step is the one worked on: v + 1. First come, first trained.

    So S is AReaL's η. Nothing is dropped: too old a group trains with a warning, and the bound is documented as not
    strict. S was 4 until June 2026 (the default here) and is 0, synchronous, since. Its inference client stops and
    resumes generation around an update.
    """
    known("skyrl", knobs, Publishing)
    return _strategy("skyrl", StalenessBudget(max_staleness_steps, batch, limit), Tumbling(batch), knobs, "interrupt")


def pipeline_rl(
    *, batch: int, answers: int, max_lag: int | None = None, limit: int | None = None, **knobs: Unpack[Publishing]
) -> Strategy:
    """PipelineRL: weights change between two decoding steps after every version; ``max_lag`` counts answers.

    The actor may start ⌈max_lag/``answers``⌉ groups beyond those that each version consumes: accepted + in flight ≤
    (v + 1)·B + that. Its default, None, is no gate, and needs a ``limit`` of groups in flight. Nothing is dropped. KV
    caches are kept there, which is the cluster's to say.
    """
    known("pipeline_rl", knobs, Publishing)
    check_integer("pipeline_rl: batch", batch, 1)
    check_integer("pipeline_rl: answers", answers, 1)
    if max_lag is None:
        ungated = StalenessBudget(None, batch, limit)
        return _strategy("pipeline_rl", ungated, Tumbling(batch), knobs, "interrupt", "reinforce")
    check_integer("pipeline_rl: max_lag", max_lag, 0)
    admission = SyncBudget(-(-max_lag // answers) / batch, batch, 1, limit)
    return _strategy("pipeline_rl", admission, Tumbling(batch), knobs, "interrupt", "reinforce")


def _way(interrupt: bool) -> InFlight:
    return "interrupt" if interrupt else "continue"


def _strategy(
    name: str,
    admission: StalenessBudget | SyncBudget,
    buffer: Tumbling,
    knobs: Mapping[str, Any],
    in_flight: InFlight = "continue",
    objective: str = "ppo",
    *,
    every: int = 1,
) -> Strategy:
    """A row put together; ``every`` is in versions a publication."""
    publication: Publication = EveryVersion(in_flight) if every == 1 else EveryN(every, in_flight)
    if (own := knobs.get("publication")) is not None:  # when, that is; what becomes of work in flight is the row's
        publication = replace(own, in_flight=in_flight) if own.in_flight == "continue" else own
    return Strategy(
        name,
        admission,
        buffer,
        PolicyStep(knobs.get("objective", objective)),
        publication,
        knobs.get("max_staleness"),
        knobs.get("stop_stale", False),
        knobs.get("lease_timeout_s"),
        at_bound=knobs.get("at_bound", "drop"),
    )
