"""Threads about results that differ although all seeds were set, and about numbers that become NaN on the way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedasync.aggregation.check import Defect
from fedasync.aggregation.model import Contribution, Model
from fedasync.aggregation.server import Server
from fedasync.core import Constant as Unweighted
from fedasync.core import Coordinator
from fedasync.runs.run import Run
from fedasync.simulation import (
    Constant,
    Exponential,
    Lognormal,
    NothingAcceptedError,
    OnOff,
    Population,
    RunRequest,
    Settings,
)
from fedasync.simulation.simulate import simulate, simulate_together
from fedasync.strategies import STRATEGIES, fedasync, fedavg, fedbuff, fedfa
from fedasync.studies.command import run_study
from fedasync.workloads import Task

from ..simulation.worlds import Mapped, rows, watch
from ..studies.running import contents
from .noise import dropping, noise, normalised, plain
from .study import Made

NAN, INF = float("nan"), float("inf")
TABLE = {
    "fedavg": fedavg(cohort=4),
    "fedasync": fedasync(concurrency=4),
    "fedbuff": fedbuff(concurrency=4, buffer_size=2),
    "fedfa": fedfa(concurrency=4, window=2),
}
BUSY = Population(duration_s=Lognormal(1.0, 0.7), dropout_probability=0.1)


def weights(run: Run) -> bytes:
    assert run.model is not None
    return run.model.to_bytes()


def test_flower_3328_any_number_of_processes_writes_the_same_bytes(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same seeds, another order of clients and another AUC. Here: two fresh processes, and this one."""
    monkeypatch.syspath_prepend(str(made.folder))
    assert run_study(str(made.folder / "s.toml"), [], 1, None, tmp_path) == 1, "the ill runs"
    one, two = contents(tmp_path / "runs"), contents(made.folder / "results/s/runs")
    kept = [name for name in one if name.startswith("sound")]
    assert one.keys() == two.keys()
    assert [name for name in kept if one[name] != two[name]] == []
    assert [name.rpartition("/")[2] for name in kept] == 2 * [
        "config.json",
        "events.parquet",
        "metrics.parquet",
        "model.safetensors",
        "summary.json",
        "trace.json",
    ]


def nothing() -> None:
    pass


def seed_all() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


def advance_all() -> None:
    for _ in range(1000):
        random.random()
    np.random.random(1000)
    torch.rand(1000)


def two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture
def state_kept() -> Iterator[None]:
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.get_num_threads()
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])
    torch.set_num_threads(kept[3])


@pytest.mark.usefixtures("state_kept")
@pytest.mark.parametrize("training", ["batched", "one_by_one"])
def test_flower_1845_the_global_generators_change_nothing_and_are_not_changed(training: Any) -> None:
    """The same seeds, another history."""

    found = []
    for meddle in (nothing, seed_all, advance_all, two_threads):
        meddle()
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state(), torch.get_num_threads()  # type: ignore[index]
        run = simulate(TABLE["fedbuff"], BUSY, noise(dropping), seed=3, updates=20, training=training)
        after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state(), torch.get_num_threads()  # type: ignore[index]
        assert all(
            torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(before, after, strict=True)
        )
        found.append((weights(run), run.events.write_csv()))
    assert found[0][0] != weights(simulate(TABLE["fedbuff"], BUSY, noise(dropping), seed=4, updates=20)), (
        "no luck at all"
    )
    assert all(each == found[0] for each in found)


@pytest.mark.usefixtures("state_kept")
def test_flower_1845_a_client_that_uses_the_global_generators_moves_nobody_elses_luck() -> None:
    """Who works when does not hang on what a user's code draws in between."""

    class Draws(Mapped):
        def train(self, task: Task) -> Contribution:
            advance_all()
            seed_all()
            return super().train(task)

    one, other = (
        simulate(TABLE["fedasync"], BUSY, workload(9, lambda client, w: (w + client) / 2), seed=1, updates=50)
        for workload in (Mapped, Draws)
    )
    assert one.events.equals(other.events)
    assert weights(one) == weights(other)


LUCK: dict[str, Population] = {
    "who works": Population(30, Constant(1.0)),
    "how long": Population(3, Exponential(1.0)),
    "how slow": Population(3, Constant(1.0), slowness=Exponential(1.0)),
    "how much": Population(3, Constant(1.0), seconds_per_sample=Constant(1.0), samples=Exponential(5.0)),
    "how well connected": Population(3, Constant(1.0), uplink_bytes_per_second=Exponential(1.0), model_bytes=1),
    "who is online": Population(3, Constant(1.0), availability=OnOff(Exponential(9.0), Exponential(9.0))),
    "who drops out": Population(3, Constant(1.0), dropout_probability=0.5),
    "who crashes": Population(3, Constant(1.0), crash_probability=0.5),
}


@pytest.mark.parametrize("luck", LUCK)
def test_flsim_49_every_draw_hangs_on_the_seed(luck: str) -> None:
    """The selector kept a generator of its own that nobody seeded."""
    strategy = fedasync(concurrency=3, lease_timeout_s=50.0)
    selection: Any = "random_idle" if luck == "who works" else "same_client"
    first, again, other = (
        simulate(strategy, LUCK[luck], seed=seed, time_s=60.0, selection=selection).events for seed in (1, 1, 2)
    )
    assert first.equals(again)
    assert not first.equals(other)


def test_nvflare_4928_what_a_result_is_computed_with_shows_in_no_bit() -> None:
    """One metric, a pinned seed, and values a factor of two apart, by the order of sums and seeds per process."""
    population = Population(duration_s=Lognormal(1.0, 0.7))
    workload = noise(plain, clients=10)
    alone = {seed: simulate(TABLE["fedbuff"], population, workload, seed=seed, updates=24) for seed in (0, 1)}
    little = simulate(TABLE["fedbuff"], population, workload, seed=1, updates=24, batch_memory_bytes=1)
    assert weights(little) == weights(alone[1])
    settings = Settings(updates=24)
    requests = [RunRequest(TABLE["fedbuff"], population, workload, settings, seed) for seed in (1, 0)]
    for place, run in simulate_together(requests):
        assert isinstance(run, Run)
        assert weights(run) == weights(alone[(1, 0)[place]])
        assert run.events.equals(alone[(1, 0)[place]].events)
    assert weights(alone[0]) != weights(alone[1])


# -- normalisation layers --------------------------------------------------------------------------------------


class Round:
    """Two clients in a round of FedAvg, driven by hand."""

    def __init__(self, model: Model) -> None:
        strategy = fedavg(cohort=2)
        self.coordinator, self.server = Coordinator(strategy), Server(strategy.update, model)
        self.defects: list[Defect] = []
        self.now = 0.0

    def bring(self, *contributions: Contribution) -> Model:
        """What the server holds after the round."""
        self.now += 1.0
        leases = [self.coordinator.request(worker, self.now) for worker in range(2)]
        for lease, contribution in zip(leases, contributions, strict=True):
            assert lease is not None
            self.server.lease(lease.id, lease.worker)
            defect = self.server.receive(lease.id, contribution)
            self.defects += [] if defect is None else [defect]
            self.coordinator.deliver(lease.id, self.now, defect and defect.reason)
        if self.coordinator.step is not None:
            self.server.apply(self.coordinator.step)
            self.coordinator.commit(self.now)
        return self.server.model


def test_pfllib_260_counters_of_3_and_5_batches_become_5_and_stay_integers() -> None:
    """Statistics stayed those of one client; the remedy (#269) averages them, and keeps the largest counter."""
    model = Model.from_tensors(normalised().state_dict())
    after = Round(model).bring(
        *(Contribution(model.values + by, "parameters", 1, torch.tensor([by])) for by in (3, 5)),
    )
    tensors = after.tensors()
    assert tensors["1.num_batches_tracked"].dtype == torch.int64
    assert int(tensors["1.num_batches_tracked"]) == 5
    assert tensors["1.running_var"].tolist() == [5.0] * 8  # 1 + (3 + 5)/2
    assert tensors["1.running_mean"].tolist() == [4.0] * 8


@pytest.mark.parametrize("name", TABLE)
def test_fl_bench_110_running_statistics_are_aggregated(name: str) -> None:
    """BatchNorm's running statistics were not aggregated at all."""
    run = simulate(TABLE[name], BUSY, noise(normalised), updates=24, evaluate_every_s=1.0)
    assert run.model is not None
    after, start = run.model.tensors(), normalised().state_dict()
    assert after["1.num_batches_tracked"].dtype == torch.int64
    assert int(after["1.num_batches_tracked"]) % 5 == 0 < int(after["1.num_batches_tracked"]), "40 samples in eights"
    for statistic in ("1.running_mean", "1.running_var"):
        assert float((after[statistic] - start[statistic]).abs().min()) > 0.01
    assert float(after["1.running_var"].min()) > 0
    assert bool(run.metrics["value"].is_finite().all())


STEPPING = {
    "fedbuff": fedbuff(concurrency=8, buffer_size=2, staleness=Unweighted()),
    "fedadam": STRATEGIES["fedadam"](cohort=4),
}


@pytest.mark.parametrize("name", STEPPING)
def test_flower_1060_no_server_step_makes_a_variance_negative(name: str) -> None:
    """NaN after the second aggregation: the server's step moved BatchNorm's statistics too (NVFlare #1718)."""
    population = Population(duration_s=Exponential(1.0))
    run = simulate(STEPPING[name], population, noise(normalised, scale=0.1), versions=15, evaluate_every_s=0.5)
    assert run.model is not None
    assert float(run.model.tensors()["1.running_var"].min()) >= 0
    assert bool(run.metrics["value"].is_finite().all())


# -- numbers that are none -------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [[0, 0, 0, 0], [5, 0, 5, 5]])
@pytest.mark.parametrize("name", TABLE)
def test_flower_7645_clients_without_samples_are_refused_before_the_run(name: str, samples: list[int]) -> None:
    """The sum of examples was 0: NaN in one interface, a bare ZeroDivisionError in others (#7708, #7693)."""
    workload = Mapped(4, lambda _, w: w + 1, samples=samples)
    with pytest.raises(ValueError, match=r"client [01] has 0 training samples; every client needs at least 1"):
        simulate(TABLE[name], Population(duration_s=Exponential(1.0)), workload, versions=1)


@pytest.mark.parametrize("samples", [0, -1, 2.0, True, None, NAN])
def test_flower_7708_a_round_of_nothing_but_no_samples_leaves_the_model_alone(samples: Any) -> None:
    model = Model.from_tensors({"w": torch.tensor([1.0, 2.0])})
    by_hand = Round(model)
    after = by_hand.bring(*(Contribution(torch.tensor([9.0, 9.0]), "parameters", samples) for _ in range(2)))
    assert after.values.tolist() == [1.0, 2.0]
    assert [defect.reason for defect in by_hand.defects] == ["no samples"] * 2
    assert by_hand.coordinator.version == 0
    fresh = [Contribution(torch.tensor([x, x + 1]), "parameters", n) for x, n in ((1.0, 1), (3.0, 3))]
    assert by_hand.bring(*fresh).values.tolist() == [2.5, 3.5], "the next round is as any other"


@pytest.mark.parametrize("name", TABLE)
def test_flower_7693_a_run_in_which_all_report_no_samples_says_so(name: str) -> None:
    class Idle(Mapped):
        def train(self, task: Task) -> Contribution:
            return replace(super().train(task), samples=0)

    with pytest.raises(NothingAcceptedError, match="no samples"):
        simulate(TABLE[name], Population(5, Exponential(1.0)), Idle(5, lambda _, w: w + 1), versions=1)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("form", ["parameters", "delta"])
@pytest.mark.parametrize("name", TABLE)
def test_flower_7645_one_update_that_is_no_number_is_rejected_by_name(name: str, form: Any, bad: float) -> None:
    """NaN was aggregated without a word: here it is rejected, its sender named, and the model stays finite."""

    def sends(client: int, w: torch.Tensor) -> torch.Tensor:
        moved = w / 2 + 1 if form == "parameters" else 1 - w / 2
        moved[1] = bad if client == 2 else moved[1]
        return moved

    workload = Mapped(5, sends, start=(0.0, 0.0), form=form)
    watched, run = watch(TABLE[name], Population(5, Exponential(1.0)), workload, seed=1, time_s=20.0)
    assert all(bool(version.isfinite().all()) for version in watched.versions)
    assert {entry["client"] for entry in run.summary["unfit"]} == {2}
    assert {entry["reason"] for entry in run.summary["unfit"]} == {"not finite"}
    assert run.summary["versions"] > 5
    assert 2 not in {worker for (worker,) in rows(run, "consumed", "worker")}


def test_flower_7645_a_step_that_overflows_ends_the_run_and_no_client_is_blamed() -> None:
    """Every contribution is finite, and what the step makes of them is not: a run that diverges, in silence."""
    workload = Mapped(4, lambda _, w: 3 * w, start=(1.0,), dtype=torch.float32)
    strategy = fedbuff(concurrency=4, buffer_size=2, server_learning_rate=10.0)
    run = simulate(strategy, Population(4, Exponential(1.0)), workload, time_s=60.0)
    assert run.summary["ended"].startswith(f"diverged: the step to version {run.summary['versions'] + 1} made 1 of 1")
    assert run.summary["unfit_total"] == 0
    assert run.model is not None
    assert bool(run.model.values.isfinite().all()), "the last version that was one"
