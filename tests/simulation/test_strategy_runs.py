"""Every row of the strategy table in whole runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from fedasync.core import Constant, Strategy
from fedasync.runs.run import Run
from fedasync.simulation import laws
from fedasync.simulation.availability import OnOff
from fedasync.simulation.population import Population
from fedasync.simulation.simulate import simulate
from fedasync.strategies import FEDERATED, STRATEGIES, fedavg, fedprox, scaffold
from fedasync.workloads import Digits, LocalTraining, Quadratic
from fedasync.workloads.protocol import Task

from .rows import CLIENTS, KNOBS, row
from .worlds import Mapped, constant_times, play, rows, watch

NAMES = [row.__name__ for row in FEDERATED]
every_row = pytest.mark.parametrize("name", NAMES)
UNEVEN = Population(CLIENTS, laws.Lognormal(1.0, 0.6), slowness=laws.Uniform(0.5, 2.0))


def quadratic(**arguments: Any) -> Quadratic:
    return Quadratic(CLIENTS, **{"dimensions": 3, "contraction": 0.8, "start": 5.0, "seed": 2, **arguments})


@cache
def digits() -> Digits:
    return Digits(clients=CLIENTS, hidden=8, local=LocalTraining(steps=3, batch_size=16, learning_rate=0.05))


def weights(run: Run) -> bytes:
    assert run.model is not None
    return bytes(run.model.values.numpy().tobytes())


def balanced(run: Run) -> bool:
    """Every lease that was given out is somewhere, once; by the log, not by the coordinator's own account."""
    kinds = run.events["kind"].value_counts()
    count = dict(zip(kinds["kind"].to_list(), kinds["count"].to_list(), strict=True))
    ended = run.events.filter(run.events["kind"].is_in(["consumed", "rejected", "failed", "cancelled"]))["lease"]
    return bool(ended.is_unique().all()) and len(ended) <= count["admitted"]


def test_the_table_of_knobs_is_complete() -> None:
    assert list(KNOBS) == NAMES
    assert all(row(name).name == name for name in NAMES)


@every_row
def test_a_row_brings_the_quadratic_nearer_and_repeats_itself(name: str) -> None:
    """Every one moves towards the centres' mean from far away; twice the same, and one by one as in batches."""
    run, again, one = (
        simulate(row(name), UNEVEN, quadratic(start=50.0), updates=150, training=training, seed=3, evaluate_every_s=5.0)
        for training in ("batched", "batched", "one_by_one")
    )
    assert weights(run) == weights(again) == weights(one)
    assert run.events.equals(again.events)
    assert run.events.equals(one.events)
    assert balanced(run)
    assert run.summary["ledger"]["consumed"] >= 150
    distance = run.metrics.filter(run.metrics["name"] == "distance")["value"].to_list()
    assert distance[-1] < distance[0]
    assert np.isfinite(distance).all()


@every_row
def test_a_row_trains_the_digits_and_repeats_itself(name: str) -> None:
    run, again, one = (
        simulate(row(name), UNEVEN, digits(), updates=12, training=training, seed=1)
        for training in ("batched", "batched", "one_by_one")
    )
    assert run.summary["not_batched"] is None
    assert weights(run) == weights(again)
    assert run.events.equals(again.events)
    assert run.events.equals(one.events)
    assert balanced(run)
    assert one.model is not None
    assert run.model is not None
    torch.testing.assert_close(run.model.values, one.model.values, rtol=1e-3, atol=1e-3)
    started = digits().initial_model(1).values
    assert not torch.equal(run.model.values, started)


@every_row
def test_the_times_of_a_row_are_those_of_its_timing_only_run(name: str) -> None:
    learnt, timed = (simulate(row(name), UNEVEN, workload, time_s=12.0, seed=5) for workload in (quadratic(), None))
    assert learnt.events.equals(timed.events)


TIMING_ONLY = """
import sys
from fedasync.simulation import Exponential, Population, simulate
from rows import KNOBS, row

for name in KNOBS:
    run = simulate(row(name), Population(8, Exponential(1.0)), time_s=10.0)
    assert run.model is None and run.summary["versions"] > 0, name
print(len(KNOBS), sorted({"torch", "sklearn", "flwr", "transformers"} & set(sys.modules)))
"""


def test_every_row_runs_timing_only_and_loads_no_learning_library() -> None:
    folder = __file__.rpartition("/")[0]
    done = subprocess.run(
        [sys.executable, "-c", TIMING_ONLY], capture_output=True, text=True, check=False, env={"PYTHONPATH": folder}
    )
    assert done.stderr == ""
    assert done.stdout.strip() == f"{len(NAMES)} []"


IN_ROUNDS = ("fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "scaffold", "fednova")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("rennala", "fedcompass")])
def test_versions_and_updates_of_equal_clients_of_constant_time(name: str) -> None:
    """Eight clients of 1 s, for 12.5 s: what each row's rule makes of 12 waves, by arithmetic alone.

    In a wave of n = 4 (8 for SAFA) one arrival comes after the other, each starting again at once. Rennala's waves have
    no short period, and FedCompass's steps are not all alike: they are not here.
    """
    simulation = play(row(name), Population(CLIENTS, laws.Constant(1.0)), time_s=12.5)
    versions, consumed = simulation.coordinator.version, simulation.coordinator.ledger.consumed
    arrived = 12 * 4
    match name:
        case _ if name in IN_ROUNDS:
            expected = (12, arrived)
        case "fedasync" | "delta_step" | "dc_asgd":
            expected = (arrived, arrived)
        case "fedfa" | "sliding_delta":
            expected = (arrived - 2, arrived)  # K = 3: the first step takes three
        case "fedbuff" | "fadas" | "fedstaleweight" | "ca2fl" | "mifa":
            expected = (arrived // 3, arrived)
        case "area":
            expected = (arrived // 2, arrived)
        case "ringmaster":
            # τ ≤ 2 of R = 3: the first wave has τ = 0, 1, 2, 3. The one that was ignored starts again from the version
            # of its wave; so in every wave the last of the four is ignored.
            expected = (12 * 3, 12 * 3)
        case "fedat":
            expected = (2 * 12, arrived)  # two tiers, each a version a second
        case "safa":
            expected = (2 * 12, 6 * 12)  # of the eight two threes; the two left over wait for the next wave
        case "fedfix":
            expected = (12, arrived)  # all four arrive at the very instants of the steps
    assert (versions, consumed) == expected
    assert simulation.coordinator.ledger.imbalance == 0


def test_rennala_uses_what_was_computed_at_the_present_version_and_drops_all_else() -> None:
    run = simulate(row("rennala"), UNEVEN, time_s=40.0)
    consumed = rows(run, "consumed", "staleness", "version")
    assert {tau for tau, _ in consumed} == {0}
    versions = [version for _, version in consumed]
    assert all(versions.count(version) == 2 for version in versions)
    dropped = rows(run, "rejected", "reason", "staleness")
    assert {reason for reason, _ in dropped} == {"stale"}
    assert min(tau for _, tau in dropped) >= 1
    assert not rows(run, "cancelled", "lease"), "work is done to its end"


def test_ringmaster_ignores_what_is_r_versions_old_and_with_a_large_r_is_asynchronous_sgd() -> None:
    def versions(strategy: Strategy) -> tuple[list[torch.Tensor], Run]:
        watched, run = watch(strategy, UNEVEN, quadratic(), updates=60, seed=4)
        return watched.versions, run

    plain, plain_run = versions(row("fedbuff", buffer_size=1, server_learning_rate=0.3, staleness=Constant()))
    unbounded, unbounded_run = versions(row("ringmaster", delay_threshold=10**9))
    assert all(torch.equal(x, y) for x, y in zip(plain, unbounded, strict=True))
    assert plain_run.events.equals(unbounded_run.events)
    _, bounded = versions(row("ringmaster", delay_threshold=3))
    assert max(tau for (tau,) in rows(bounded, "consumed", "staleness")) == 2
    assert min(tau for (tau,) in rows(bounded, "rejected", "staleness")) >= 3


def test_ringmaster_with_r_1_is_rennala_with_b_1() -> None:
    ringmaster, first = watch(row("ringmaster", delay_threshold=1), UNEVEN, quadratic(), updates=40, seed=4)
    one = row("rennala", buffer_size=1, server_learning_rate=0.3)
    rennala, second = watch(one, UNEVEN, quadratic(), updates=40, seed=4)
    assert all(torch.equal(x, y) for x, y in zip(ringmaster.versions, rennala.versions, strict=True))
    assert first.events.equals(second.events)


def test_stopping_stale_work_changes_no_value_that_is_consumed_where_it_only_saves_time() -> None:
    """A client of 10 s beside one of 1 s, R = 3: its work can only be ignored, stopped or not."""
    times = constant_times(1.0, 10.0)
    done, stopped = (
        watch(row("ringmaster", concurrency=2, stop_stale=stop), times, Quadratic(2, dimensions=3), versions=40)
        for stop in (False, True)
    )
    assert all(torch.equal(x, y) for x, y in zip(done[0].versions, stopped[0].versions, strict=True))
    assert rows(done[1], "consumed", "worker", "staleness") == rows(stopped[1], "consumed", "worker", "staleness")
    assert {reason for (reason,) in rows(done[1], "rejected", "reason")} == {"stale"}
    assert not rows(stopped[1], "rejected", "lease")
    at = [time_s for (time_s,) in rows(stopped[1], "cancelled", "time_s")]
    assert at == [3.0 * k for k in range(1, 14)], "of 40 versions, one a second, every third stops it"


def test_stopped_clients_are_sooner_at_work_that_counts() -> None:
    """A lease of 10 s, stale after 2, is stopped then, and its client makes one of 1 s: 8 s sooner than undisturbed.

    Two clients, whose leases take 10 s one in five; the other one makes a version a second meanwhile.
    """
    times = Population(2, laws.Values((1.0, 10.0, 1.0, 1.0, 1.0), by="lease"))
    done, stopped = (
        simulate(row("ringmaster", concurrency=2, delay_threshold=2, stop_stale=stop), times, versions=60)
        for stop in (False, True)
    )
    assert stopped.summary["time_s"] < 0.5 * done.summary["time_s"]
    (first, *_) = rows(stopped, "cancelled", "lease", "time_s", "reason")
    assert first == (1, 2.0, "stale")
    assert not rows(done, "cancelled", "lease")
    assert all(tau < 2 for run in (done, stopped) for (tau,) in rows(run, "consumed", "staleness"))


def test_fedfix_steps_at_multiples_of_the_interval_and_at_no_other_time() -> None:
    """Times of 0.4, 1, 2.5 and 9 s, steps every 1 s; what arrives at the very instant is part of it."""
    run = simulate(row("fedfix"), constant_times(0.4, 1.0, 2.5, 9.0), time_s=20.5)
    committed = [time_s for (time_s,) in rows(run, "committed", "time_s")]
    assert committed == [float(k) for k in range(1, 21)]
    consumed = rows(run, "consumed", "worker", "time_s")
    assert [t for w, t in consumed if w == 1] == [float(k) for k in range(1, 21)]
    assert [t for w, t in consumed if w == 2] == [3.0, 6.0, 9.0, 12.0, 15.0, 18.0]
    assert [t for w, t in consumed if w == 3] == [9.0, 18.0]
    lonely = simulate(row("fedfix", concurrency=1), constant_times(2.5), time_s=20.5)
    assert [time_s for (time_s,) in rows(lonely, "committed", "time_s")] == [3.0 * k for k in range(1, 7)]
    fine = simulate(row("fedfix", concurrency=1, interval_s=0.1), constant_times(0.25), time_s=30.0)
    ticks = [time_s for (time_s,) in rows(fine, "committed", "time_s")]
    assert ticks == [3 * k * 0.1 for k in range(1, len(ticks) + 1)]
    assert len(ticks) == 100


def test_fedfix_counts_slow_clients_as_much_as_fast_ones() -> None:
    """Constant drift 1 and N = 4: over 18 steps each client moves the model by 18/4."""
    drift = Mapped(4, lambda _, w: w + 1.0)
    watched, run = watch(row("fedfix"), constant_times(0.4, 1.0, 2.5, 9.0), drift, time_s=18.0)
    assert run.summary["versions"] == 18
    assert float(watched.versions[-1]) == pytest.approx(18.0, rel=1e-12)


def test_safa_by_hand() -> None:
    """Three clients of 1, 1.5 and 4 s, quota 1, lag 2: who, when, and what is stopped.

    1.0  client 0 is drafted: version 1, from which it starts again.
    1.5  client 1, not drafted last: version 2.
    2.0  client 0, not drafted last: version 3. Client 2, of version 0, lags by 3 > 2: stopped, it starts again.
    3.0  client 1, whose lease began first, and after it client 0: versions 4 and 5.
    4.0  client 0 was drafted last, and others are at work: it waits behind.
    4.5  client 1: version 6, and client 0 is left over. Client 2, of version 3, is stopped again.
    """
    run = simulate(row("safa", concurrency=3, quota=1, lag=2), constant_times(1.0, 1.5, 4.0), versions=6)
    assert rows(run, "consumed", "time_s", "worker", "base_version", "staleness") == [
        (1.0, 0, 0, 0),
        (1.5, 1, 0, 1),
        (2.0, 0, 1, 1),
        (3.0, 1, 2, 1),
        (3.0, 0, 3, 1),
        (4.5, 1, 4, 1),
        (4.5, 0, 5, 0),
    ]
    assert rows(run, "cancelled", "time_s", "worker", "base_version", "reason") == [
        (2.0, 2, 0, "stale"),
        (4.5, 2, 3, "stale"),
    ]


def test_a_failed_client_of_safa_does_not_send_those_that_wait_to_work() -> None:
    """Who delivered starts again from the next version, however often others fail."""
    population = Population(CLIENTS, laws.Exponential(1.0), dropout_probability=0.3)
    run = simulate(row("safa"), population, time_s=60.0, seed=2)
    delivered: dict[int, int] = {}
    for kind, worker, version, base in run.events.select("kind", "worker", "version", "base_version").rows():
        if kind == "delivered":
            delivered[worker] = version
        elif kind == "admitted" and worker in delivered:
            assert base > delivered.pop(worker), "it started again before the step that it waited for"
    assert rows(run, "failed", "lease")


def test_fedats_one_tier_is_fedavg_event_for_event_and_update_for_update() -> None:
    for failing in (0.0, 0.2):
        population = Population(CLIENTS, laws.Lognormal(1.0, 0.6), dropout_probability=failing)
        tiers, one = watch(
            row("fedat", tiers=1, cohort=4, proximal_mu=0.0), population, quadratic(), time_s=40.0, seed=6
        )
        average, rounds = watch(fedavg(cohort=4), population, quadratic(), time_s=40.0, seed=6)
        assert one.events.equals(rounds.events)
        assert len(tiers.versions) == len(average.versions) > 20
        for x, y in zip(tiers.versions, average.versions, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)


def test_fedats_tiers_follow_the_clients_speeds_and_step_as_often_as_they_can() -> None:
    """Clients of 1 and of 3 s: the fast tier's rounds take 1 s, the slow one's 3 s."""
    times = (3.0, 1.0, 3.0, 1.0)
    watched, run = watch(row("fedat"), constant_times(*times), quadratic_of_4(), time_s=12.5)
    groups = [inputs.entering[0].group for inputs in watched.given]
    assert groups.count(0) == 12
    assert groups.count(1) == 4
    assert all(
        times[worker] == 1.0 + 2.0 * inputs.entering[0].group
        for inputs in watched.given
        for worker in (x.worker for x in inputs.entering)
    )
    assert all(len({x.group for x in inputs.entering}) == 1 and len(inputs.entering) == 2 for inputs in watched.given)
    assert not torch.equal(watched.versions[1], watched.versions[0]), "the first update moves the model"
    assert balanced(run)


def quadratic_of_4() -> Quadratic:
    return Quadratic(4, dimensions=3, start=5.0, seed=2)


def test_fedcompass_tells_its_clients_how_many_steps_to_make() -> None:
    asked: dict[int, int | None] = {}

    class Asked(Quadratic):
        def train(self, task: Any) -> Any:
            asked[len(asked)] = task.steps
            return super().train(task)

    simulate(row("fedcompass"), UNEVEN, Asked(CLIENTS), updates=40)
    assert set(asked.values()) <= set(range(2, 7))
    assert asked[0] == 2  # measured with the fewest
    simulate(fedavg(cohort=4), UNEVEN, Asked(CLIENTS), updates=4)
    assert asked[len(asked) - 1] is None


def test_scaffold_tells_its_clients_their_control_variates_and_fedavg_none() -> None:
    told = []

    class Asked(Quadratic):
        def train(self, task: Any) -> Any:
            told.append(task.control)
            return super().train(task)

    simulate(scaffold(cohort=2), constant_times(1.0, 2.0), Asked(2), versions=3)
    assert [None if c is None else c.abs().sum().item() > 0 for c in told] == [False] * 2 + [True] * 4
    told.clear()
    simulate(fedprox(cohort=2), constant_times(1.0, 2.0), Asked(2), versions=2)
    assert told == [None] * 4


# -- the local steps that a lease assigns -------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_quadratic_client_contracts_by_rho_for_each_step(steps: int) -> None:
    """x = c + ρ^q·(w − c), one by one and in a batch, and the flow is q times as long."""
    workload = quadratic(contraction=0.5)
    model = workload.initial_model(0)
    tasks = [Task(client, model, 0, steps=steps) for client in range(CLIENTS)] + [Task(0, model, 0)]
    batch = workload.train_batch([(workload, task) for task in tasks], 1 << 20)
    for task, found in zip(tasks, batch, strict=True):
        q = 1 if task.steps is None else steps
        centre = torch.from_numpy(workload.centres)[task.client]
        torch.testing.assert_close(found.values, centre + 0.5**q * (model.values - centre), rtol=1e-14, atol=1e-14)
        assert found.step_size_sum == pytest.approx(q * np.log(2.0))
        assert torch.equal(workload.train(task).values, found.values)


def test_assigned_steps_are_those_of_local_training_with_that_many() -> None:
    """One by one to the bit; and leases of different steps in one batch, each as it would be by itself."""

    def world(steps: int | None) -> Digits:
        return Digits(clients=4, hidden=6, local=LocalTraining(epochs=2, batch_size=32, steps=steps, momentum=0.9))

    usual = world(None)
    model = usual.initial_model(0)
    asked = [(0, 1), (1, 4), (2, 3), (3, None)]
    tasks = [Task(client, model, 11 + i, steps=steps) for i, (client, steps) in enumerate(asked)]
    batch = usual.train_batch([(usual, task) for task in tasks], 1 << 28)
    for task, found in zip(tasks, batch, strict=True):
        plain = Task(task.client, model, task.seed)
        expected = world(task.steps).train(plain)
        one = usual.train(task)
        assert torch.equal(one.values, expected.values)
        assert found.step_size_sum == pytest.approx(expected.step_size_sum)
        torch.testing.assert_close(found.values, expected.values, rtol=1e-4, atol=1e-5)
        (alone,) = usual.train_batch([(usual, task)], 1 << 28)
        assert torch.equal(alone.values, found.values), "not its company's"


def test_fedcompass_makes_clients_of_different_speed_arrive_together() -> None:
    """Clients that need 0.1, 0.15, 0.2 and 0.4 s a step: once measured, they deliver within a step of the slowest."""
    strategy = STRATEGIES["fedcompass"](concurrency=4, least_steps=20, most_steps=100)
    workload = Quadratic(4, contraction=0.99)
    run = simulate(strategy, constant_times(10.0, 15.0, 20.0, 40.0), workload, time_s=200.0)
    delivered = dict(rows(run, "delivered", "lease", "time_s"))
    groups: dict[int, list[float]] = {}
    for lease, version in rows(run, "consumed", "lease", "version"):
        groups.setdefault(version, []).append(delivered[lease])
    shared = [times for times in groups.values() if len(times) > 1]
    assert sum(map(len, shared)) > 0.7 * len(delivered)
    assert all(max(times) - min(times) <= 0.4 + 1e-9 for times in shared)
    alone = simulate(
        STRATEGIES["fedbuff"](concurrency=4), constant_times(10.0, 15.0, 20.0, 40.0), workload, time_s=200.0
    )
    assert alone.summary["consumed"] < run.summary["consumed"], "leases of fewer steps end sooner"


def test_a_lease_of_some_of_the_steps_takes_its_share_of_the_time_and_all_of_the_transfers() -> None:
    """2 of 10 steps of a client that computes 10 s and transfers 1,000 bytes at 500 bytes a second, down and up."""
    strategy = STRATEGIES["fedcompass"](concurrency=1, least_steps=2, most_steps=10)
    population = Population(
        1,
        laws.Constant(10.0),
        downlink_bytes_per_second=laws.Constant(500.0),
        uplink_bytes_per_second=laws.Constant(500.0),
        model_bytes=1000,
    )
    for shared in ({}, {"server_downlink_bytes_per_second": 1e6, "server_uplink_bytes_per_second": 1e6}):
        run = simulate(strategy, replace(population, **shared), versions=1)
        assert [t for (t,) in rows(run, "delivered", "time_s")] == [pytest.approx(2 + 0.2 * 10 + 2)]


def test_steps_at_fixed_times_miss_nobody_by_rounding() -> None:
    """Work of 0.1 s and a step every 0.1 s: 0.1 + 0.1 + … is not k·0.1, and yet every step has its contribution."""
    strategy = STRATEGIES["fedfix"](concurrency=1, interval_s=0.1)
    run = simulate(strategy, constant_times(0.1), Quadratic(1), versions=200)
    assert run.summary["time_s"] == pytest.approx(20.0)
    assert run.summary["consumed"] == 200


@pytest.mark.parametrize("name", ["fedavg", "fedat"])
def test_a_round_takes_each_client_once(name: str) -> None:
    """Four clients that come and go, a cohort of four: who is there waits for the others, and does not stand in."""
    knobs = {"cohort": 4} if name == "fedavg" else {"cohort": 4, "tiers": 1}
    away = OnOff(laws.Exponential(5.0), laws.Exponential(5.0))
    population = Population(4, laws.Exponential(1.0), availability=away, when_offline="pause")
    run = simulate(STRATEGIES[name](**knobs), population, seed=3, time_s=400.0)
    rounds: dict[int, list[int]] = {}
    for worker, version in rows(run, "consumed", "worker", "version"):
        rounds.setdefault(version, []).append(worker)
    assert len(rounds) > 10
    assert all(sorted(workers) == [0, 1, 2, 3] for workers in rounds.values())


def test_a_rule_of_models_that_leaves_them_ends_as_diverged_and_blames_nobody() -> None:
    """APPFL's differences from the current version, with a rate that overshoots."""
    strategy = STRATEGIES["fedbuff"](concurrency=8, buffer_size=4, server_learning_rate=50.0, convention="appfl")
    run = simulate(
        strategy, Population(8, laws.Exponential(1.0)), Quadratic(8, start=1e30, dtype="float32"), time_s=500.0
    )
    assert run.summary["ended"].startswith("diverged")
    assert run.summary["unfit_total"] == 0
