"""Workloads that raise or send nonsense: named at once, never silence, never NaN in the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedasync.aggregation.model import Contribution
from fedasync.core import Constant
from fedasync.federated.arrays import WorkloadError
from fedasync.federated.driver import NothingAcceptedError
from fedasync.runs.run import Run
from fedasync.simulation.laws import Exponential
from fedasync.simulation.population import Population
from fedasync.simulation.simulate import simulate
from fedasync.strategies import fedasync, fedavg, fedbuff, fedfa
from fedasync.workloads.protocol import Task

from .worlds import Mapped, constant_times, rows

NAN = float("nan")
STRATEGIES = {
    "fedavg": fedavg(cohort=4),
    "fedasync": fedasync(concurrency=4),
    "fedbuff": fedbuff(concurrency=4, buffer_size=2),
    "fedfa": fedfa(concurrency=4, window=2),
}
PLAIN = fedasync(concurrency=1, alpha=1.0, staleness=Constant(), proximal_mu=0.0)


class Faulty(Mapped):
    """Clients that move by +1, but one of which does something else."""

    def __init__(self, fault: Callable[[Task, Contribution], Any], client: int = 2, clients: int = 6) -> None:
        super().__init__(clients, lambda _, w: w + 1, start=(0.0, 0.0))
        self.fault, self.faulty = fault, client

    def train(self, task: Task) -> Any:
        good = super().train(task)
        return self.fault(task, good) if task.client == self.faulty else good


def out_of_memory(task: Task, good: Contribution) -> Contribution:
    raise MemoryError(f"no room for batch {task.client * 10}")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_flower_4476_a_client_that_raises_ends_the_run_with_its_name_and_the_cause(strategy: str) -> None:
    with pytest.raises(WorkloadError) as raised:
        simulate(STRATEGIES[strategy], Population(duration_s=Exponential(1.0)), Faulty(out_of_memory), time_s=100.0)
    text = str(raised.value)
    assert text.startswith("client 2, lease ")
    assert ", version " in text
    assert "train raised MemoryError: no room for batch 20" in text
    assert isinstance(raised.value.__cause__, MemoryError)


def test_the_error_names_lease_and_version_of_the_work_that_failed() -> None:
    calls = []

    def third(task: Task, good: Contribution) -> Contribution:
        calls.append(task)
        if len(calls) == 3:
            raise KeyError("label")
        return good

    with pytest.raises(WorkloadError, match="client 0, lease 2, version 2: train raised KeyError: 'label'"):
        simulate(PLAIN, constant_times(1.0), Faulty(third, client=0, clients=1), updates=9)


def test_an_evaluation_that_raises_names_its_version() -> None:
    class Blind(Mapped):
        def evaluate(self, model: Any) -> dict[str, float]:
            if float(model.values[0]) > 1:
                raise ZeroDivisionError("no test data")
            return super().evaluate(model)

    blind = Blind(1, lambda _, w: w + 1)
    with pytest.raises(WorkloadError, match="version 2: evaluate raised ZeroDivisionError: no test data") as raised:
        simulate(PLAIN, constant_times(1.0), blind, time_s=5.0, evaluate_every_s=1.0)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("network", [False, True], ids=["alone", "with_a_network"])
@pytest.mark.parametrize("part", ["initial_model", "client_samples"])
def test_a_workload_that_raises_before_the_start_is_a_workload_error_too(part: str, network: bool) -> None:
    def broken(*_: Any) -> Any:
        raise FileNotFoundError("data/train.bin")

    workload = Mapped(1, lambda _, w: w + 1)
    setattr(workload, part, broken)
    rate = Exponential(1e6) if network else None
    population = Population(duration_s=Exponential(1.0), uplink_bytes_per_second=rate)
    with pytest.raises(WorkloadError, match=r"FileNotFoundError: data/train\.bin") as raised:
        simulate(PLAIN, population, workload, updates=1)
    assert isinstance(raised.value.__cause__, FileNotFoundError)


def test_an_evaluation_that_returns_no_metrics_is_a_workload_error() -> None:
    class Mute(Mapped):
        def evaluate(self, model: Any) -> Any:
            return None

    with pytest.raises(WorkloadError, match="evaluate"):
        simulate(PLAIN, constant_times(1.0), Mute(1, lambda _, w: w + 1), updates=2)


def as_nan(task: Task, good: Contribution) -> Contribution:
    good.values[1] = NAN
    return good


def too_long(task: Task, good: Contribution) -> Contribution:
    return Contribution(torch.zeros(3, dtype=torch.float64), "parameters", 1)


def single(task: Task, good: Contribution) -> Contribution:
    return Contribution(good.values.float(), "parameters", 1)


def without_samples(task: Task, good: Contribution) -> Contribution:
    return Contribution(good.values, "parameters", 0)


FAULTS = {
    "not finite": (as_nan, "1 of 2 values are NaN or infinite"),
    "wrong shape": (too_long, "shape [3], the model has [2]"),
    "wrong dtype": (single, "dtype torch.float32, the model has torch.float64"),
    "no samples": (without_samples, "samples = 0; an integer ≥ 1 would do"),
}


def verdicts_hold(run: Run) -> bool:
    return all(verdict["holds"] for verdict in run.summary["verdicts"])


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_unfit_contribution_is_rejected_by_name_and_the_run_goes_on(strategy: str, fault: str) -> None:
    make, detail = FAULTS[fault]
    run = simulate(STRATEGIES[strategy], Population(duration_s=Exponential(1.0)), Faulty(make), seed=1, time_s=30.0)
    unfit = run.summary["unfit"]
    assert unfit
    assert {entry["client"] for entry in unfit} == {2}
    assert {entry["reason"] for entry in unfit} == {fault}
    assert all(detail in entry["detail"] for entry in unfit)
    rejected = rows(run, "rejected", "time_s", "lease", "worker", "reason")
    assert [(e["time_s"], e["lease"], e["client"], e["reason"]) for e in unfit] == rejected[:100]
    assert run.summary["ledger"]["rejected"] == {fault: run.summary["unfit_total"]}
    assert run.model is not None
    assert bool(run.model.values.isfinite().all())
    assert run.summary["versions"] > 5
    assert 2 not in {worker for (worker,) in rows(run, "consumed", "worker")}
    assert verdicts_hold(run)


def test_only_the_first_hundred_unfit_contributions_are_listed_and_all_are_counted() -> None:
    run = simulate(fedasync(concurrency=6), Population(duration_s=Exponential(1.0)), Faulty(as_nan), time_s=200.0)
    assert len(run.summary["unfit"]) == 100
    assert run.summary["unfit_total"] == run.summary["ledger"]["rejected"]["not finite"] > 100


@pytest.mark.parametrize("nothing", [None, "done", {"w": 1.0}], ids=lambda x: type(x).__name__)
def test_a_client_that_returns_no_contribution_is_named(nothing: Any) -> None:
    """Rejected by name, or an error that names the client: anything but an anonymous AttributeError."""
    workload = Faulty(lambda *_: nothing)
    said = ""
    try:
        run = simulate(fedasync(concurrency=4), Population(duration_s=Exponential(1.0)), workload, time_s=20.0)
        said = "".join(f"client {entry['client']}" for entry in run.summary["unfit"])
    except WorkloadError as error:
        said = str(error)
    assert "client 2" in said


def all_nan() -> Mapped:
    return Mapped(5, lambda _, w: w * NAN)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_workload_that_returns_only_nan_ends_with_an_error_that_says_so(strategy: str) -> None:
    with pytest.raises(NothingAcceptedError) as given_up:
        simulate(STRATEGIES[strategy], Population(duration_s=Exponential(1.0)), all_nan(), versions=1)
    assert "not finite" in str(given_up.value)
    assert "version 0" in str(given_up.value)


def test_a_short_run_of_nan_alone_ends_at_its_time_with_version_0() -> None:
    run = simulate(fedasync(concurrency=4), Population(duration_s=Exponential(1.0)), all_nan(), time_s=20.0)
    assert run.summary["versions"] == 0
    assert run.summary["unfit_total"] > 20
    assert run.model is not None
    assert run.model.values.tolist() == [0.0]


@pytest.mark.parametrize("samples", [[3, 0, 5], [3, -1, 5]])
def test_flower_7645_a_client_without_samples_is_refused_by_name_before_the_run(samples: list[int]) -> None:
    workload = Mapped(3, lambda _, w: w, samples=samples)
    with pytest.raises(ValueError, match=f"client 1 has {samples[1]} training samples; every client needs at least 1"):
        simulate(fedavg(cohort=2), Population(duration_s=Exponential(1.0)), workload, versions=1)


def test_a_result_that_nobody_waits_for_is_never_computed() -> None:
    """Over-selection cancels three of five: their work costs no training."""
    trained = []

    class Counting(Mapped):
        def train(self, task: Task) -> Contribution:
            trained.append(task.client)
            return super().train(task)

    run = simulate(
        fedavg(cohort=5, keep=2), constant_times(1.0, 2.0, 3.0, 4.0, 5.0), Counting(5, lambda _, w: w), versions=4
    )
    assert len(trained) == run.summary["consumed"] == 8
    late = Counting(2, lambda _, w: w)
    trained.clear()
    run = simulate(fedasync(concurrency=1, lease_timeout_s=2.0), constant_times(7.0, 1.0), late, time_s=30.0)
    assert run.summary["ledger"]["ignored"] > 0
    assert 0 not in trained


def test_a_client_that_writes_into_the_shared_base_is_found_out() -> None:
    class Writes(Mapped):
        def train(self, task: Task) -> Contribution:
            task.model.values.add_(1.0)
            return super().train(task)

    with pytest.raises(WorkloadError, match=r"client \d+, lease \d+: train wrote into task.model"):
        simulate(fedasync(concurrency=2), Population(duration_s=Exponential(1.0)), Writes(4, lambda _, w: w), updates=9)
