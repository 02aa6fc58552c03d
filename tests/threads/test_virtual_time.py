"""Threads about durations that are silently zero, deadlines, stragglers, and clients that go and come back."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from pathlib import Path

import pytest

from fedasync.core import AdaptiveTimeout
from fedasync.runs.measures import lease_table
from fedasync.simulation import Constant, Exponential, Population, Values
from fedasync.simulation.population import Clients
from fedasync.simulation.simulate import simulate
from fedasync.strategies import fedasync, fedavg, fedbuff
from fedasync.studies.errors import StudyError
from fedasync.studies.execute import jobs
from fedasync.studies.study import load

from ..simulation.worlds import Mapped, constant_times, rows
from ..studies.running import TIMING, changed

LAW = 'duration_s = { kind = "exponential", mean = 10.0 }'
NETWORK = "downlink_bytes_per_second = { kind = 'constant', value = 1e6 }\nmodel_bytes = 1_000_000"
NO_DURATIONS = {
    "none at all": ("", "population: clients take no time: give duration_s, seconds_per_sample, or both"),
    "communication only": (NETWORK, "clients take no time: give duration_s, seconds_per_sample, or both"),
    "of some clients": ("duration_s = { kind = 'values', values = [1.0, 2.0] }", "2 values for 8 clients"),
    "of no number": ("duration_s = { kind = 'constant', value = nan }", "duration_s.value: got nan; a finite number"),
    "before its start": ("duration_s = { kind = 'constant', value = -1.0 }", "got -1.0"),
    "misspelt": ("duration = { kind = 'constant', value = 1.0 }", "population.duration: unknown key"),
}


@pytest.mark.parametrize("case", NO_DURATIONS)
def test_appfl_439_a_missing_duration_is_refused_and_never_taken_for_0_s(tmp_path: Path, case: str) -> None:
    """A trainer that reported no step time made computing free: all times were communication alone."""
    keys, said = NO_DURATIONS[case]
    (tmp_path / "s.toml").write_text(changed(TIMING, (LAW, keys)))
    with pytest.raises(StudyError) as refused:
        jobs(load(tmp_path / "s.toml"), tmp_path / "results")
    assert "s.toml" in str(refused.value)
    assert said in str(refused.value)


def test_appfl_439_seconds_per_sample_need_samples_which_the_workload_brings() -> None:
    """The time of a lease is computing plus communication, whoever counts the samples."""
    population = Population(
        seconds_per_sample=Constant(0.5), uplink_bytes_per_second=Constant(16.0), slowness=Values((1.0, 3.0))
    )
    workload = Mapped(2, lambda _, w: w, start=(0.0, 0.0, 0.0, 0.0), samples=(10, 20))  # 32 bytes
    run = simulate(fedasync(concurrency=2), population, workload, time_s=32.0)
    first = {worker: t for t, worker in reversed(rows(run, "delivered", "time_s", "worker"))}
    assert first == {0: 10 * 0.5 + 2.0, 1: 3 * 20 * 0.5 + 2.0}


def test_flower_846_a_client_that_crashed_comes_back() -> None:
    """The example of client dropout that people ask for: a crashed client returns and is used again."""
    population = Population(5, Exponential(1.0), crash_probability=0.25)
    run = simulate(fedbuff(concurrency=5, buffer_size=3, lease_timeout_s=6.0), population, seed=3, time_s=150.0)
    leases = lease_table(run.events, 150.0).sort("start_s")
    for client in range(5):
        own = leases.filter(leases["worker"] == client)["outcome"].to_list()
        crashes = [place for place, outcome in enumerate(own) if outcome == "failed"]
        assert len(crashes) > 3
        assert all("consumed" in own[place + 1 :] for place in crashes[:3]), "gone for ever"


def test_flower_1172_a_round_with_a_deadline_of_5_s_takes_5_s_and_has_two_of_three() -> None:
    """Asked for: to ignore clients that take more than X seconds. Clients of 1, 2 and 10 s."""
    run = simulate(fedavg(cohort=3, lease_timeout_s=5.0), constant_times(1.0, 2.0, 10.0), versions=1)
    assert run.summary["time_s"] == 5.0
    assert rows(run, "consumed", "time_s", "worker") == [(5.0, 0), (5.0, 1)]
    assert rows(run, "failed", "time_s", "worker", "reason") == [(5.0, 2, "timeout")]


def test_flower_1172_a_buffer_of_two_needs_no_deadline_and_steps_after_2_s() -> None:
    """The same three clients under FedBuff."""
    strategy = fedbuff(concurrency=3, buffer_size=2)
    run = simulate(strategy, constant_times(1.0, 2.0, 10.0), versions=1, selection="same_client")
    assert run.summary["time_s"] == 2.0
    assert rows(run, "consumed", "worker") == [(0,), (1,)], "of two ends at 2 s the older lease's comes first"


def test_flower_1172_no_round_outlasts_its_deadline_and_a_straggler_is_tried_again() -> None:
    """The deadline holds in every round, as long as there are others to ask; who is late is ignored, not banned."""
    population = constant_times(1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 1.0, 2.0, 3.0, 30.0)
    run = simulate(fedavg(cohort=4, lease_timeout_s=5.0), population, seed=1, versions=60)
    ends = [0.0, *(t for (t,) in rows(run, "committed", "time_s"))]
    assert max(later - sooner for sooner, later in pairwise(ends)) == 5.0
    late = [worker for worker, reason in rows(run, "failed", "worker", "reason") if reason == "timeout"]
    assert min(late.count(worker) for worker in (5, 9)) > 2
    assert set(late) == {5, 9}
    assert not {5, 9} & {worker for (worker,) in rows(run, "consumed", "worker")}


def test_hivemind_676_a_deadline_follows_what_has_arrived() -> None:
    """A constant deadline is wrong when all slow down: the median of recent work and its deviation are not."""
    recent = [10.0, 11.0, 9.0, 10.0, 12.0, 10.0, 9.0, 11.0, 10.0, 10.0]
    rule = AdaptiveTimeout(first_s=60.0, factor=3.0, memory=10, at_least=10, margin=1.0)
    assert rule.seconds(deque(recent)) == 10.0 + 3 * 0.5
    assert rule.seconds(deque(3 * t for t in recent)) == 3 * (10.0 + 3 * 0.5), "all slow down alike"
    assert rule.seconds(deque(recent[:-1])) == 60.0, "too little was seen"
    # Nine clients of about 1 s and one of 20 s: once that is known, a round does not wait for it.
    times = constant_times(*(1.0 + 0.01 * i for i in range(9)), 20.0)
    timeout = AdaptiveTimeout(first_s=60.0, at_least=10)
    run = simulate(fedavg(cohort=8, lease_timeout_s=timeout), times, seed=2, versions=30)
    ends = [0.0, *(t for (t,) in rows(run, "committed", "time_s"))]
    lasted = [later - sooner for sooner, later in pairwise(ends)]
    assert max(lasted[5:]) < 2.0
    fixed = simulate(fedavg(cohort=8), times, seed=2, versions=30)
    assert fixed.summary["time_s"] > 5 * run.summary["time_s"]


def test_openfl_441_a_cut_off_time_keeps_those_who_made_it() -> None:
    """Straggler policies, the first: a round ends at a time. Clients of 1, 2, …, 10 s and a cut-off at 7 s."""
    run = simulate(fedavg(cohort=10, lease_timeout_s=7.0), constant_times(*range(1, 11)), versions=1)
    assert run.summary["time_s"] == 7.0
    assert sorted(worker for (worker,) in rows(run, "consumed", "worker")) == list(range(7))
    assert run.summary["ledger"]["failed"] == {"timeout": 3}


@pytest.mark.parametrize("keep", [1, 8, 10])
def test_openfl_996_a_percentage_keeps_the_first(keep: int) -> None:
    """Straggler policies, the second: a round ends with a share of its clients, here 10, 80 and 100 per cent."""
    run = simulate(fedavg(cohort=10, keep=keep), constant_times(*range(1, 11)), versions=1)
    assert run.summary["time_s"] == keep
    assert sorted(worker for (worker,) in rows(run, "consumed", "worker")) == list(range(keep))
    assert sum(run.summary["ledger"]["cancelled"].values()) == 10 - keep


def test_appfl_437_a_megabyte_at_300_megabit_takes_26_7_ms_each_way() -> None:
    """Bandwidth per client was asked for; 2^20 bytes for a megabyte would make every transfer 4.6 % too short."""
    rate = Constant(300e6 / 8)
    down = Population(1, Constant(0.0), downlink_bytes_per_second=rate, model_bytes=1_000_000)
    both = Population(
        1, Constant(0.0), downlink_bytes_per_second=rate, uplink_bytes_per_second=rate, model_bytes=1_000_000
    )
    assert Clients(down, 0).work_s(0, 0, 0) == pytest.approx(0.0266667, abs=5e-8)
    assert simulate(fedasync(concurrency=1), both, updates=3).summary["time_s"] == pytest.approx(0.16, abs=1e-12)
