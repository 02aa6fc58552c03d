"""One client misbehaves through whole runs: per rule and misbehaviour, what becomes of it under three strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedasync.aggregation.aggregators import Krum, Median, TrimmedMean
from fedasync.aggregation.model import Contribution
from fedasync.aggregation.norms import Norms
from fedasync.aggregation.privacy import Privacy
from fedasync.aggregation.server import Server
from fedasync.aggregation.update import Input
from fedasync.core import Coordinator, Rejected, StepReady, Strategy
from fedasync.runs.privacy import MissingAccountantError
from fedasync.simulation import laws
from fedasync.simulation.population import Population
from fedasync.simulation.settings import Settings
from fedasync.simulation.simulate import RunRequest, simulate, simulate_together
from fedasync.strategies import fedavg, fedbuff, fedfa
from fedasync.studies import show
from fedasync.workloads import Quadratic
from fedasync.workloads.protocol import Task

from .worlds import Mapped, Watched, constant_times, rows, watch

CLIENTS, WRONG, BOUND = 7, 0, 2.0
"""Every buffer holds each client once; right ones move by less than 1, so that the bound leaves them alone."""

ROWS: dict[str, Callable[..., Strategy]] = {
    "fedbuff": lambda **knobs: fedbuff(concurrency=CLIENTS, buffer_size=CLIENTS, **knobs),
    "fedavg": lambda **knobs: fedavg(cohort=CLIENTS, **knobs),
    "fedfa": lambda **knobs: fedfa(concurrency=CLIENTS, window=CLIENTS, **knobs),
}
RULES: dict[str, dict[str, Any]] = {
    "clip_norm": {"clip_norm": BOUND},
    "max_norm": {"max_norm": BOUND},
    "median": {"aggregator": Median()},
    "trimmed_mean": {"aggregator": TrimmedMean(0.2)},
    "krum": {"aggregator": Krum(1)},
}
WHAT_HAPPENS = {
    ("clip_norm", "nan"): "rejected: not finite",
    ("clip_norm", "exploding"): "bounded",
    ("clip_norm", "sign-flipped"): "bounded",
    ("clip_norm", "duplicated"): "bounded",
    ("max_norm", "nan"): "rejected: not finite",
    ("max_norm", "exploding"): "rejected: norm too large",
    ("max_norm", "sign-flipped"): "bounded",
    ("max_norm", "duplicated"): "bounded",
    **{(rule, "nan"): "rejected: not finite" for rule in ("median", "trimmed_mean", "krum")},
    **{
        (rule, wrong): "withstood"
        for rule in ("median", "trimmed_mean", "krum")
        for wrong in ("exploding", "sign-flipped", "duplicated")
    },
}
"""``bounded``: it counts, no farther from its base than the bound; the result leaves the range of the right ones."""


def target(client: int) -> Tensor:
    return torch.tensor([1.0, -1.0], dtype=torch.float64) * (1 + 0.01 * client)


@dataclass
class OneMisbehaves:
    """Clients that go half of the way to their targets; the result of one is turned into something else."""

    misbehaviour: str
    inner: Mapped = field(
        default_factory=lambda: Mapped(CLIENTS, lambda client, w: w + 0.5 * (target(client) - w), start=(0.0, 0.0))
    )

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def train(self, task: Task) -> Contribution:
        right = self.inner.train(task)
        if task.client != WRONG:
            return right
        base = task.model.values
        change = {
            "nan": lambda: torch.full_like(base, float("nan")),
            "exploding": lambda: 1e6 * (right.values - base),
            "sign-flipped": lambda: base - right.values,
            "duplicated": lambda: 0.5 * target(WRONG),  # what its first lease brought, again and again
        }[self.misbehaviour]()
        return replace(right, values=base + change)


def steps(watched: Watched) -> list[tuple[Tensor, list[tuple[int, Tensor]]]]:
    """For every step its result, and what it was made of by client: models, or changes and the change of the model."""
    found = []
    for before, after, given in zip(watched.versions[:-1], watched.versions[1:], watched.given, strict=True):
        delta = watched.rule.wants == "delta"
        weight = getattr(watched.rule, "staleness", lambda _: 1.0)
        parts: list[Input] = list(given.window or given.entering)
        made = [(x.worker, x.values * weight(x.staleness) if delta else x.values) for x in parts]
        found.append((after - before if delta else after, made))
    return found


def in_range(result: Tensor, right: list[Tensor]) -> bool:
    low, high = torch.stack(right).amin(dim=0), torch.stack(right).amax(dim=0)
    return bool(((low - 1e-12 <= result) & (result <= high + 1e-12)).all())


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("rule", "wrong"), WHAT_HAPPENS)
def test_what_becomes_of_a_misbehaving_client(rule: str, wrong: str, row: str) -> None:
    """Of its first contribution too, so of a duplicated one from the second on."""
    strategy = ROWS[row](**RULES[rule])
    watched, run = watch(strategy, constant_times(*[1.0] * CLIENTS), OneMisbehaves(wrong), time_s=12.5)
    assert all(bool(version.isfinite().all()) for version in watched.versions)
    assert run.summary["versions"] >= 10
    delivered = len([worker for (worker,) in rows(run, "admitted", "worker") if worker == WRONG]) - 1
    used = [worker for (worker,) in rows(run, "consumed", "worker")].count(WRONG)
    kept_in_range = [
        in_range(result, [part for worker, part in made if worker != WRONG]) for result, made in steps(watched)
    ]
    told = WHAT_HAPPENS[rule, wrong]
    if told.startswith("rejected: "):
        reason = told.removeprefix("rejected: ")
        assert used == 0
        assert run.summary["ledger"]["rejected"] == {reason: delivered}
        assert {(one["client"], one["reason"]) for one in run.summary["unfit"]} == {(WRONG, reason)}
        assert all(worker != WRONG for _, made in steps(watched) for worker, _ in made)
        assert all(kept_in_range)
        torch.testing.assert_close(watched.versions[-1], target(3), rtol=0, atol=0.05)
        return
    assert run.summary["ledger"]["rejected"] == {}
    assert used >= 10, "each under a lease of its own: counted as another"
    if told == "withstood":
        assert all([worker for worker, _ in made].count(WRONG) == 1 for _, made in steps(watched))
        assert all(kept_in_range)
        torch.testing.assert_close(watched.versions[-1], target(3), rtol=0, atol=0.05)
        return
    assert not all(kept_in_range), "the mean withstands nothing"
    far = torch.linalg.vector_norm(watched.versions[-1] - target(3))
    assert float(far) < BOUND  # (K − 1)/K of a pull by half balance 1/K of a bound
    if watched.rule.wants == "delta":
        mine = [part for _, made in steps(watched) for worker, part in made if worker == WRONG]
        assert max(float(part.norm()) for part in mine) <= BOUND * (1 + 1e-9)


@pytest.mark.parametrize("row", ROWS)
def test_without_any_rule_one_exploding_client_is_enough(row: str) -> None:
    watched, _ = watch(ROWS[row](), constant_times(*[1.0] * CLIENTS), OneMisbehaves("exploding"), time_s=5.5)
    assert float(watched.versions[-1].abs().max()) > 1e4


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("rule", RULES)
def test_the_same_lease_delivered_twice_counts_once(rule: str, row: str) -> None:
    """The ledger ignores the second message, whatever it holds, and the model is the same bit for bit."""

    def end(twice: bool) -> tuple[bytes, int]:
        strategy = ROWS[row](**RULES[rule])
        coordinator = Coordinator(strategy)
        inner = OneMisbehaves("exploding").inner
        server = Server(strategy.update, inner.initial_model(0), norms=Norms(strategy.clip_norm, strategy.max_norm))
        leases = [coordinator.request(client, 0.0) for client in range(CLIENTS)]
        for lease in leases:
            assert lease is not None
            server.lease(lease.id, lease.worker)
        for lease in leases:
            assert lease is not None
            for _ in range(2 if twice else 1):
                defect = None
                if coordinator.is_in_flight(lease.id):
                    task = Task(lease.worker, server.base(lease.id), 0)
                    defect = server.receive(lease.id, inner.train(task))
                for event in coordinator.deliver(lease.id, 1.0, None if defect is None else defect.reason):
                    assert not isinstance(event, Rejected) or event.ignored
                    if isinstance(event, StepReady):
                        server.apply(event.step)
                        coordinator.commit(1.0)
        assert coordinator.version == 1
        assert coordinator.ledger.consumed == CLIENTS
        return server.model.values.numpy().tobytes(), coordinator.ledger.ignored

    once, again = end(False), end(True)
    assert again[0] == once[0]
    assert (once[1], again[1]) == (0, CLIENTS)


def test_krum_is_drawn_to_more_copies_than_it_was_told_of() -> None:
    """Two clients that collude beside byzantine = 1 and K = 5 are withstood; three are their own neighbours."""
    near = [torch.tensor([0.01 * i]) for i in range(4)]
    assert Krum(1).chosen([*near, *[torch.tensor([9.0])] * 2])[0] < 4
    assert Krum(1).chosen([*near[:2], *[torch.tensor([9.0])] * 3])[0] >= 2


# -- privacy ---------------------------------------------------------------------------------------------------

HEAVY, SIXTY = Population(12, laws.Lognormal(1.0, 1.0)), Settings(updates=60)


def quadratic() -> Quadratic:
    return Quadratic(12, dimensions=5, contraction=0.5, start=5.0, seed=2)


def private(row: str, z: float = 1.0, clip: float | None = 0.5) -> Strategy:
    knobs: dict[str, Any] = {"clip_norm": clip, "privacy": Privacy(z)}
    if row == "fedfa":
        return fedfa(concurrency=6, window=3, **knobs)
    return fedbuff(concurrency=6, buffer_size=3, **knobs)


@pytest.mark.parametrize("row", ["fedbuff", "fedfa"])
def test_the_summary_says_who_took_part_in_how_much(row: str) -> None:
    watched, run = watch(private(row), HEAVY, quadratic(), seed=3, updates=120)
    squares: dict[int, int] = {}
    for given in watched.given:
        workers = [x.worker for x in (given.window or given.entering)]
        for worker in set(workers):
            squares[worker] = squares.get(worker, 0) + workers.count(worker) ** 2
    found = run.summary["privacy"]
    assert {key: found[key] for key in ("noise_multiplier", "clip_norm", "delta", "releases", "clients")} == {
        "noise_multiplier": 1.0,
        "clip_norm": 0.5,
        "delta": 1e-5,
        "releases": len(watched.given),
        "clients": len(squares),
    }
    ranked = sorted(squares.values())
    assert found["worst"]["squares"] == squares[found["worst"]["client"]] == ranked[-1]
    assert found["median"]["squares"] == squares[found["median"]["client"]] == ranked[len(ranked) // 2]
    used = [worker for (worker,) in rows(run, "consumed", "worker")]
    assert found["worst"]["contributions"] == used.count(found["worst"]["client"])


def test_times_alone_say_what_would_be_spent() -> None:
    learnt = simulate(private("fedbuff"), HEAVY, quadratic(), seed=3, updates=120)
    timed = simulate(private("fedbuff"), HEAVY, seed=3, updates=120)
    assert timed.summary["privacy"] == learnt.summary["privacy"]


@pytest.mark.parametrize("row", ["fedbuff", "fedfa"])
def test_noise_is_the_same_bytes_in_any_company_and_another_with_another_seed(row: str) -> None:
    requests = [RunRequest(private(row), HEAVY, quadratic(), SIXTY, seed=seed) for seed in (3, 4)]
    together = {place: run for place, run in simulate_together(requests) if not isinstance(run, BaseException)}
    alone = simulate(private(row), HEAVY, quadratic(), SIXTY, seed=3)
    assert _weights(together[0]) == _weights(alone)
    assert _weights(together[1]) != _weights(alone)
    assert _weights(simulate(private(row, z=1.0001), HEAVY, quadratic(), SIXTY, seed=3)) != _weights(alone)


@pytest.mark.parametrize("row", ["fedbuff", "fedfa"])
def test_noise_0_without_a_bound_is_the_plain_run(row: str) -> None:
    plain = fedfa(concurrency=6, window=3) if row == "fedfa" else fedbuff(concurrency=6, buffer_size=3)
    ours = simulate(private(row, z=0.0, clip=None), HEAVY, quadratic(), SIXTY, seed=3)
    theirs = simulate(plain, HEAVY, quadratic(), SIXTY, seed=3)
    assert _weights(ours) == _weights(theirs)
    assert ours.events.equals(theirs.events)
    assert "privacy" not in ours.summary


def test_show_prints_what_was_spent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = simulate(private("fedbuff"), HEAVY, quadratic(), SIXTY, seed=3)
    run.save(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(show, "epsilon", lambda squares, z, delta: squares / z + delta)
    show.show_run(tmp_path)
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    spent = run.summary["privacy"]
    assert "privacy spent" in out
    assert "ε at δ = 1e-05" in out
    for who in ("worst", "median"):
        one = spent[who]
        assert f"{who}: {one['client']} {one['contributions']} {one['squares']} {one['squares']}" in out
    assert f"1 0.5 {spent['releases']} {spent['clients']}" in out

    def missing(*_: Any) -> float:
        raise MissingAccountantError("ε needs opacus: pip install 'fedasync[privacy]' would do")

    monkeypatch.setattr(show, "epsilon", missing)
    show.show_run(tmp_path)
    assert "ε needs opacus: pip install 'fedasync[privacy]' would do" in capsys.readouterr().out


def _weights(run: Any) -> bytes:
    found: bytes = run.model.values.numpy().tobytes()
    return found
