"""Tiny inputs whose results tell one framework's arithmetic from another's.

Every result is computed by the coordinator and the server, or by the simulation, that studies run on; the expected
value beside it was derived from the framework's source or from the paper's formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, nan, sqrt
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Literal

from fedasync.aggregation.conventions import FRAMEWORKS
from fedasync.core import Constant as NoDecay
from fedasync.core import Strategy
from fedasync.core.staleness import Hinge, Polynomial
from fedasync.simulation import Constant, Intervals, Population, Settings, Values, simulate
from fedasync.strategies import fedadam, fedasync, fedavg, fedbuff
from fedasync.studies import scenario
from fedasync.studies.by_hand import ByHand, model_of, scalar
from fedasync.studies.scenario import Client, Scenario, shortest

if TYPE_CHECKING:
    from fedasync.runs.run import Run

Result = float | str
Evidence = Literal["executed", "source", "paper", "ours"]
"""The expected value was met by executing the released package, follows from its source or a paper, or is our rule."""

TINY = 1e-15
"""A τ of Adam that adds nothing."""


@dataclass(frozen=True)
class Vector:
    """One input and what must come of it.

    ``case`` says which knobs or which part of the section's input; ``convention`` is the knob's value, empty where
    there is none; ``whose`` names the framework and the version in which it was read.
    """

    case: str
    convention: str
    whose: str
    evidence: Evidence
    expected: Result
    compute: Callable[[], Result]


@dataclass(frozen=True)
class Section:
    """Vectors that share an input, told in one or two lines."""

    title: str
    given: str
    vectors: tuple[Vector, ...]


# -- FedBuff ---------------------------------------------------------------------------------------------------


def _fedbuff_step(**knobs: Any) -> float:
    """B starts from version 0, w = 0; A makes versions 1 to 3 alone, and w = 1 of them; then A and B fill a buffer."""
    run = ByHand(fedbuff(concurrency=2, buffer_size=2, **knobs), scalar(0.0))
    a, b = 0, 1
    late = run.start(b)

    def makes_a_version(change: float) -> None:
        for _ in range(2):
            run.bring(run.start(a), run.w + change)

    makes_a_version(1.0)
    gain = run.w  # how far the rule goes when all of a buffer says + 1
    makes_a_version((1.0 - gain) / gain)
    makes_a_version(0.0)
    run.bring(run.start(a), 1.4)
    run.bring(late, 0.6)
    return run.w


def _fedbuff(convention: str, evidence: Evidence, expected: float, *, whose: str = "", **knobs: Any) -> Vector:
    case = ", ".join(_knob(name, value) for name, value in knobs.items()) or "one step"
    compute = lambda: _fedbuff_step(convention=convention, **knobs)  # noqa: E731
    return Vector(case, convention, whose or FRAMEWORKS[convention], evidence, expected, compute)


def _knob(name: str, value: object) -> str:
    if isinstance(value, Polynomial):
        return f"s(τ) = (1 + τ)^(−{shortest(value.a)})"
    return "s(τ) = 1" if isinstance(value, NoDecay) else f"{name} = {shortest(value)}"


FEDBUFF = Section(
    "FedBuff",
    "Version 3 is w = 1. K = 2, η = 1, s(τ) = (1 + τ)^(−1/2), equal samples, 2 clients. A started from version 3 and "
    "returns 1.4 (Δ = 0.4, τ = 0, s = 1); B started from version 0, w = 0, and returns 0.6 (Δ = 0.6, τ = 3, s = 1/2).",
    (
        _fedbuff("paper", "paper", 1.35),
        _fedbuff("flgo", "executed", 1.35),
        _fedbuff("asyncflsim", "source", 1.35),
        _fedbuff("asyncflsim", "source", 1.035, server_learning_rate=0.1),
        _fedbuff("federatedscope", "source", 1.35),
        _fedbuff("federatedscope", "source", 1.275, staleness=Polynomial(1.0)),
        _fedbuff("normalised", "ours", 22 / 15),
        _fedbuff("flsim", "source", 1 + 0.7 * sqrt(2)),
        _fedbuff("plato", "source", 1.5),
        _fedbuff("nvflare", "executed", 1.2),
        _fedbuff("paper", "source", 1.5, whose=f"{FRAMEWORKS['nvflare']}, by default", staleness=NoDecay()),
        _fedbuff("fedscale", "source", 17 / 15),
        _fedbuff("appfl", "executed", 1.1),
        _fedbuff("appfl", "executed", 1.09, server_learning_rate=0.9),
    ),
)


# -- FedAsync --------------------------------------------------------------------------------------------------


def _fedasync_steps(tau: int, arrivals: int, **knobs: Any) -> float:
    """Late clients start from versions 0, 1, …; A returns the model as it was until they are ``tau`` versions late."""
    run = ByHand(fedasync(concurrency=1 + arrivals, **knobs), scalar(1.0))
    late = []
    for version in range(tau):
        if version < arrivals:
            late.append(run.start(1 + version))
        run.bring(run.start(0), run.w)
    for lease_id in late:
        run.bring(lease_id, 0.6)
    return run.w


def _fedasync(case: str, convention: str, expected: float, *, tau: int = 3, arrivals: int = 1, **knobs: Any) -> Vector:
    evidence: Evidence = "paper" if convention == "paper" else "source"
    compute = lambda: _fedasync_steps(tau, arrivals, convention=convention, **knobs)  # noqa: E731
    return Vector(case, convention, FRAMEWORKS[convention], evidence, expected, compute)


_HINGE = Hinge(a=10.0, b=2.0)

FEDASYNC = Section(
    "FedAsync",
    "w = 1, α = 0.6; a client returns 0.6 with τ = 3, and in the rows of a second arrival another one does the same. "
    "Polynomial: a = 0.5; hinge: a = 10, b = 2.",
    (
        _fedasync("polynomial", "paper", 0.88),
        _fedasync("polynomial, second arrival", "paper", 0.796, arrivals=2),
        _fedasync("polynomial", "plato", 0.88),
        _fedasync("polynomial, second arrival", "plato", 0.838, arrivals=2),
        _fedasync("hinge", "paper", 1 - 0.24 / 11, staleness=_HINGE),
        _fedasync("hinge", "flgo", 0.976, staleness=_HINGE),
        _fedasync("hinge, τ = 2", "paper", 0.76, tau=2, staleness=_HINGE),
        _fedasync("hinge, τ = 2", "flgo", 0.76, tau=2, staleness=_HINGE),
        _fedasync("constant", "paper", 0.76, staleness=NoDecay()),
    ),
)


# -- order -----------------------------------------------------------------------------------------------------


def _at_one_instant(*models: float) -> scenario.Played:
    """Clients A, B, … that start together and return these models together at t = 5, mixed by α = 1/2."""
    strategy = fedasync(concurrency=len(models), alpha=0.5, staleness=NoDecay(), proximal_mu=0.0)
    clients = tuple(Client(name, 5.0, scenario.Constant(x)) for name, x in zip("AB", models, strict=True))
    settings = Settings(versions=len(models), selection="same_client")
    return scenario.play(Scenario(strategy, clients, settings))


def _order_of_consumption() -> str:
    return ", ".join(
        f"{e.client}@{shortest(e.time_s)}" for e in _at_one_instant(1.0, 2.0).events if e.kind == "consumed"
    )


def _three_starts() -> Run:
    """Clients that come online at 1, 3 and 5 s and leave when their one lease, of 3, 5 and 1 s, is done."""
    online = Intervals((((1.0, 4.0),), ((3.0, 8.0),), ((5.0, 6.0),)))
    population = Population(3, Values((3.0, 5.0, 1.0)), availability=online)
    return simulate(fedasync(concurrency=3), population, updates=3, selection="same_client")


def _starts_and_ends() -> Iterator[tuple[str, float, int, int | None]]:
    """Kind (S, E), time, client, staleness, in the order of the log."""
    letters = {"admitted": "S", "delivered": "E"}
    for kind, time_s, worker, tau in _three_starts().events.select("kind", "time_s", "worker", "staleness").rows():
        if kind in letters:
            yield letters[kind], time_s, worker, tau


def _event_order() -> str:
    return " ".join(f"{letter}{client}@{shortest(time_s)}" for letter, time_s, client, _ in _starts_and_ends())


def _staleness() -> list[int]:
    return [tau or 0 for letter, _, _, tau in _starts_and_ends() if letter == "E"]


def _mean_in_flight() -> float:
    """Leases in flight just before an end, on average."""
    counts, now = [], 0
    for letter, *_ in _starts_and_ends():
        if letter == "E":
            counts.append(now)
        now += 1 if letter == "S" else -1
    return fmean(counts)


def _rule(case: str, expected: Result, compute: Callable[[], Result], whose: str = "ours") -> Vector:
    return Vector(case, "", whose, "ours", expected, compute)


ORDER = Section(
    "order and staleness",
    "Clients 0, 1, 2 start at 1, 3, 5 s and take 3, 5, 1 s; a server step an arrival. At one instant: w = 0, α = 1/2, "
    "s = 1; A and B start together, take 5 s and return 1 and 2: arrivals are looked at in the order of dispatch.",
    (
        _rule("starts and ends", "S0@1 S1@3 E0@4 S2@5 E2@6 E1@8", _event_order),
        _rule("staleness by arrival", "0, 0, 2", lambda: ", ".join(map(str, _staleness()))),
        _rule("mean staleness", 2 / 3, lambda: fmean(_staleness())),
        _rule("standard deviation of staleness", sqrt(24 / 27), lambda: pstdev(_staleness())),
        _rule("mean in flight before an end", 5 / 3, _mean_in_flight),
        _rule("at one instant: order", "A@5, B@5", _order_of_consumption),
        _rule("at one instant: w", 1.25, lambda: _at_one_instant(1.0, 2.0).model),
        _rule("at one instant: w, B first", 1.0, lambda: _at_one_instant(2.0, 1.0).model),
    ),
)


# -- rounds ----------------------------------------------------------------------------------------------------


def _weighted_mean() -> str:
    """Two models, [1, 2] of 1 sample and [3, 4] of 3, with counters 3 and 5."""
    import torch

    from fedasync.aggregation.model import Model

    tensors = {"w": torch.zeros(2, dtype=torch.float64), "num_batches_tracked": torch.tensor([0])}
    run = ByHand(fedavg(cohort=2), Model.from_tensors(tensors))
    leases = [run.start(client) for client in range(2)]
    run.bring(leases[0], model_of(1.0, 2.0, samples=1, integers=[3]))
    run.bring(leases[1], model_of(3.0, 4.0, samples=3, integers=[5]))
    mean, counter = (tensor.tolist() for tensor in run.server.model.tensors().values())
    return f"{', '.join(map(shortest, mean))}; counter {shortest(counter[0])}"


def _refused(x: float, samples: int = 1) -> str:
    """A round of one client that brings something unfit to a model that is 1."""
    run = ByHand(fedavg(cohort=1), scalar(1.0), clients=1)
    reason = run.bring(run.start(0), model_of(x, samples=samples))
    return f"rejected: {reason}; w = {shortest(run.w)}"


def _adam(convention: str, tau: float) -> Callable[[], float]:
    def step() -> float:
        strategy = fedadam(cohort=1, server_learning_rate=1.0, tau=tau, convention=convention)  # type: ignore[arg-type]
        run = ByHand(strategy, scalar(0.0), clients=1)
        run.bring(run.start(0), 1.0)
        return run.w

    return step


def _fedadam(case: str, convention: str, tau: float, expected: float) -> Vector:
    evidence: Evidence = "source" if convention == "flower" else "paper"
    return Vector(case, convention, FRAMEWORKS[convention], evidence, expected, _adam(convention, tau))


_FLOWERS = sqrt(1 - 0.99**2) / (1 - 0.9**2)

ROUNDS = Section(
    "rounds",
    "FedAvg: models [1, 2] of 1 sample and [3, 4] of 3, which carry the counters 3 and 5. FedAdam: Δ = 1, η = 1, "
    "β = 0.9 and 0.99, a τ that adds nothing where no other is given; w is the step.",
    (
        Vector("FedAvg", "", "paper (counters: ours)", "paper", "2.5, 3.5; counter 5", _weighted_mean),
        _rule("FedAvg, 0 samples", "rejected: no samples; w = 1", lambda: _refused(2.0, samples=0)),
        _rule("FedAvg, a model is NaN", "rejected: not finite; w = 1", lambda: _refused(nan)),
        _rule("FedAvg, a model is infinite", "rejected: not finite; w = 1", lambda: _refused(inf)),
        _fedadam("FedAdam, τ = 0.001", "paper", 1e-3, 0.1 / (sqrt(0.01 + 0.99e-6) + 1e-3)),
        _fedadam("FedAdam", "paper", TINY, 1.0),
        _fedadam("FedAdam", "flower", TINY, _FLOWERS),
        _fedadam("FedAdam", "textbook", TINY, 1.0),
    ),
)


# -- time ------------------------------------------------------------------------------------------------------

_MEGABITS_PER_SECOND = 1e6 / 8
"""Bytes a second."""


def _transfer_s(*, there: bool) -> float:
    """Seconds until a client that computes in no time has sent a model of 10^6 bytes at 300 Mbit/s, and fetched it."""
    link = Constant(300 * _MEGABITS_PER_SECOND)
    population = Population(
        1,
        Constant(0.0),
        uplink_bytes_per_second=link,
        downlink_bytes_per_second=link if there else None,
        model_bytes=1_000_000,
    )
    return float(simulate(fedasync(concurrency=1), population, updates=1).summary["time_s"])


_THREE = Population(3, Values((1.0, 2.0, 10.0)))


def _first_version(strategy: Strategy) -> str:
    """When version 1 of three clients that take 1, 2 and 10 s exists, and from how many of them."""
    summary = simulate(strategy, _THREE, versions=1, selection="same_client").summary
    return f"{shortest(summary['time_s'])} s, {summary['consumed']} clients"


def _impossible() -> str:
    try:
        simulate(fedavg(cohort=4), _THREE, versions=1)
    except ValueError:
        return "refused"
    return "runs"


TIME = Section(
    "time",
    "10^6 bytes at 300 Mbit/s, of 10^6 bits. Three clients that take 1, 2 and 10 s; the first version, and how many "
    "clients are in it.",
    (
        _rule("one way (s)", 2 / 75, lambda: _transfer_s(there=False)),
        _rule("round trip (s)", 4 / 75, lambda: _transfer_s(there=True)),
        _rule(
            "a round of 3, deadline 5 s", "5 s, 2 clients", lambda: _first_version(fedavg(cohort=3, lease_timeout_s=5))
        ),
        _rule("FedBuff, K = 2", "2 s, 2 clients", lambda: _first_version(fedbuff(concurrency=3, buffer_size=2))),
        _rule("a round of 4", "refused", _impossible),
    ),
)

SECTIONS = (FEDBUFF, FEDASYNC, ORDER, ROUNDS, TIME)
