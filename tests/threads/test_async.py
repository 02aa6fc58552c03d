"""Threads about asynchronous servers that hang, lose count, or average what they should not.

The number in a test's name is that of the public thread; docs/threads.md has the table.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import pstdev
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedasync.aggregation.model import Contribution, Form
from fedasync.core import Concurrency, Constant, Coordinator, Strategy, Tumbling
from fedasync.simulation import Constant as Always
from fedasync.simulation import Exponential, Intervals, NothingAcceptedError, OnOff, Pareto, Population, Values
from fedasync.simulation.simulate import simulate
from fedasync.strategies import STRATEGIES, fedasync, fedavg, fedbuff, fedfa
from fedasync.studies.errors import StudyError
from fedasync.studies.execute import jobs
from fedasync.studies.study import load
from fedasync.workloads import Quadratic, Task

from ..simulation.worlds import Mapped, column, constant_times, play, rows, series, watch
from ..studies.running import TIMING, apart, changed
from .noise import noise, plain

PLAIN = Constant()
TABLE = {
    "fedavg": fedavg(cohort=4),
    "fedasync": fedasync(concurrency=4, staleness=PLAIN, proximal_mu=0.0),
    "fedbuff": fedbuff(concurrency=4, buffer_size=2, staleness=PLAIN),
    "fedfa": fedfa(concurrency=4, window=2),
}


def test_flower_469_an_asynchronous_strategy_makes_a_version_of_every_arrival() -> None:
    """A framework without an asynchronous strategy: the request is open since 2020."""
    run = simulate(fedasync(concurrency=3), constant_times(1.0, 1.7, 2.3), Quadratic(3), time_s=20.0)
    arrivals = len(rows(run, "delivered", "lease"))
    assert run.summary["versions"] == arrivals == run.summary["consumed"] > 30


@given(size=st.integers(1, 8), ready=st.integers(8, 30))
def test_flower_7503_exactly_k_updates_make_a_step_and_the_rest_wait(size: int, ready: int) -> None:
    """All that was ready at the poll was averaged, so that K was a lower bound only."""
    coordinator = Coordinator(Strategy("by hand", Concurrency(ready), Tumbling(size), None))
    leases = [coordinator.request(worker, 0.0) for worker in range(ready)]
    for lease in leases:
        assert lease is not None
        coordinator.deliver(lease.id, 1.0)  # the server is at work on the first step meanwhile
    taken = []
    while coordinator.step is not None:
        taken.append([arrival.lease.id for arrival in coordinator.step.entering])
        coordinator.commit(2.0)
    assert [len(step) for step in taken] == [size] * (ready // size)
    assert [lease for step in taken for lease in step] == list(range(ready // size * size))
    assert coordinator.waiting == coordinator.ledger.buffered == ready % size


def test_flower_7503_eight_ready_replies_and_k_of_7_keep_one() -> None:
    """The same in a whole run, whose slow server lets replies pile up."""
    once = Population(8, Values((1.0,) * 8 + (1000.0,) * 8, by="lease"))
    run = simulate(fedbuff(concurrency=8, buffer_size=7), once, time_s=500.0, server_step_s=2.0)
    assert (run.summary["consumed"], run.summary["ledger"]["buffered"]) == (7, 1)
    busy = simulate(
        fedbuff(concurrency=8, buffer_size=7), Population(8, Exponential(1.0)), versions=30, server_step_s=4
    )
    per_step = np.unique([version for (version,) in rows(busy, "consumed", "version")], return_counts=True)[1]
    assert per_step.tolist() == [7] * 30


@pytest.mark.parametrize("arrivals", [1, 7, 8, 30])
def test_flower_2856_the_mean_of_what_arrived_so_far_needs_no_total(arrivals: int) -> None:
    """Servers wait for all results before they average: a running mean would not have to."""
    window = 8
    brings = torch.randn(arrivals, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    strategy = fedfa(concurrency=arrivals, window=window, warm_up="average_what_is_there")
    population = Population(arrivals, Values(tuple(1.0 + client for client in range(arrivals))))
    workload = Mapped(arrivals, lambda client, w: w * 0 + brings[client])
    watched, run = watch(strategy, population, workload, versions=arrivals, selection="same_client")
    order = [worker for (worker,) in rows(run, "consumed", "worker")]
    batch = [float(brings[order[max(0, k - window) : k]].mean()) for k in range(1, arrivals + 1)]
    assert [float(w) for w in watched.versions[1:]] == pytest.approx(batch, rel=1e-12)


NAN_FROM_THREE = Mapped(6, lambda client, w: w * (float("nan") if client == 3 else 1.0))
LOSSY = Population(6, Exponential(1.0), dropout_probability=0.3)
SILENT = Population(6, Exponential(1.0), crash_probability=0.3)
AWAY = Population(6, Exponential(1.0), availability=OnOff(Exponential(4.0), Exponential(2.0)))
ENDS: dict[str, tuple[Strategy, Population, Mapped | None]] = {
    "consumed": (fedbuff(concurrency=6, buffer_size=3), Population(6, Exponential(1.0)), None),
    "rejected: not finite": (fedasync(concurrency=6), Population(6, Exponential(1.0)), NAN_FROM_THREE),
    "rejected: stale": (fedasync(concurrency=6, max_staleness=4), Population(6, Exponential(1.0)), None),
    "failed: dropout": (fedbuff(concurrency=6), LOSSY, None),
    "failed: offline": (fedasync(concurrency=6), AWAY, None),
    "failed: timeout": (fedavg(cohort=6, lease_timeout_s=3.0), SILENT, None),
    "cancelled: over-selected": (fedavg(cohort=6, keep=2), Population(6, Exponential(4.0)), None),
}


@pytest.mark.parametrize("end", ENDS)
def test_flower_async_2_every_client_is_idle_again_after_every_kind_of_end(end: str) -> None:
    """The client asked for the first parameters was never marked free, and sampling starved."""
    strategy, population, workload = ENDS[end]
    run = simulate(strategy, population, workload, seed=2, time_s=100.0)
    kind, _, reason = end.partition(": ")
    ended = [worker for worker, why in rows(run, kind, "worker", "reason") if not reason or why == reason]
    assert len(ended) > 10
    late = {worker for time_s, worker in rows(run, "admitted", "time_s", "worker") if time_s > 75.0}
    assert late == set(range(6)), "somebody never worked again"


@pytest.mark.parametrize(
    "strategy", [fedasync(concurrency=9), fedbuff(concurrency=9, buffer_size=4), fedfa(concurrency=9), fedavg(cohort=9)]
)
def test_fedlab_benchmarks_31_staleness_lies_between_0_and_the_servers_version(strategy: Strategy) -> None:
    """It was ±1.14e13 where the time of a model travelled through uninitialised memory."""
    run = simulate(strategy, Population(9, Pareto(0.1, 1.2)), seed=3, time_s=60.0)
    for kind in ("delivered", "consumed"):
        found = rows(run, kind, "staleness", "version", "base_version")
        assert len(found) > 100
        for tau, version, base in found:
            assert type(tau) is int
            assert 0 <= tau == version - base <= version


def test_fedlab_benchmarks_31_a_client_cannot_tell_the_server_how_stale_it_is() -> None:
    """Staleness comes from the server's own books, and a message of a lease that was never given out is an error."""
    coordinator = Coordinator(Strategy("by hand", Concurrency(2), Tumbling(1), None))
    coordinator.request(0, 0.0)
    for unknown in (-1, 1, 10**13):
        with pytest.raises(ValueError, match=f"lease {unknown} was never given out"):
            coordinator.deliver(unknown, 1.0)
    assert coordinator.ledger.imbalance == 0
    for weight in (Constant(), *(STRATEGIES[name](concurrency=2).update.staleness for name in ("fedasync", "fedbuff"))):
        with pytest.raises(ValueError, match="staleness is an integer ≥ 0, got -1"):
            weight(-1)


def test_easyfl_37_instants_without_an_arrival_are_no_error() -> None:
    """FedAsync crashed with an index error on a tick of the clock at which no package arrived."""
    plan = Intervals((((0.0, 2.5), (1e6, 1e6 + 2.5)),))
    population = Population(1, Always(1.0), availability=plan)
    strategy = fedasync(concurrency=1, alpha=1.0, staleness=PLAIN, proximal_mu=0.0)
    workload = Mapped(1, lambda _, w: w + 1)
    run = simulate(strategy, population, workload, time_s=2e6, evaluate_every_s=1e5)
    assert [t for (t,) in rows(run, "committed", "time_s")] == [1.0, 2.0, 1e6 + 1, 1e6 + 2]
    assert series(run) == {0.0: 0.0} | {k * 1e5: 2.0 for k in range(1, 11)} | {k * 1e5: 4.0 for k in range(11, 21)}


UNREACHABLE = {
    'name = "fedavg"\ncohort = 501': "a cohort of 501 can never be filled by 500 clients; cohort ≤ 500 would do",
    'name = "fedbuff"\nconcurrency = 501': "a concurrency of 501 can never be reached by 500 clients",
    'name = "fedavg"\ncohort = 50\nkeep = 51': "keep = 51: the round could never end",
    'name = "fedbuff"\nconcurrency = 50\nbuffer_size = 60': "60 contributions, which a run of updates = 40 can never",
}


def of_500(strategy: str) -> str:
    more = changed(TIMING, ("clients = 8", "clients = 500"))
    return changed(more, ('name = "fedbuff"\nconcurrency = 4\nbuffer_size = 2', strategy))


@pytest.mark.parametrize("strategy", UNREACHABLE)
def test_plato_195_what_can_never_be_reached_is_refused_in_one_line(tmp_path: Path, strategy: str) -> None:
    """Asynchronous mode waited for ever in its first round (500 clients, 50 a round)."""
    (tmp_path / "s.toml").write_text(of_500(strategy))
    with pytest.raises(StudyError) as refused:
        jobs(load(tmp_path / "s.toml"), tmp_path / "results")
    assert "s.toml" in str(refused.value)
    assert UNREACHABLE[strategy] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_plato_195_the_command_ends_at_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(of_500('name = "fedavg"\ncohort = 501'))
    end = apart("sim", "s.toml", "--jobs", "1", cwd=tmp_path, timeout_s=400)
    assert (end.status, end.out) == (2, "")
    assert "cohort ≤ 500 would do" in end.complaint
    assert [path.name for path in tmp_path.iterdir()] == ["s.toml"]


@pytest.mark.parametrize("redispatch", ["after_step", "before_step"])
@pytest.mark.parametrize("selection", ["random_idle", "same_client"])
def test_fedscale_162_a_buffer_larger_than_what_is_in_flight_fills_all_the_same(
    selection: Any, redispatch: Any
) -> None:
    """A goal of 40 and a cap of 20: would the step ever come? A slot is given out again as soon as its result is in."""
    strategy = fedbuff(concurrency=20, buffer_size=40, redispatch=redispatch)
    run = simulate(strategy, Population(500, Exponential(1.0)), versions=5, selection=selection)
    assert (run.summary["versions"], run.summary["consumed"]) == (5, 200)


def test_plato_195_a_server_for_which_nobody_works_any_more_says_who_waits_for_whom() -> None:
    """Clients that never come back make no error at the start, and no silence at the end either."""
    plan = Intervals(tuple(((0.0, 1.5),) for _ in range(4)))
    population = Population(4, Always(1.0), availability=plan)
    run = simulate(fedbuff(concurrency=4, buffer_size=6), population, versions=1)
    assert run.summary["versions"] == 0
    assert run.summary["ended"].startswith("nothing can happen any more: version 0; the next step lacks 2 ")


@pytest.mark.parametrize("name", TABLE)
def test_fedscale_148_when_check_ins_are_rarer_than_a_buffer_needs_the_clock_goes_on_to_the_next(name: str) -> None:
    """The server froze when simulated check-ins were too rare; the advice was to tune the numbers."""
    gap_s = 1000.0
    turns = [tuple((gap_s * (7 * turn + c), gap_s * (7 * turn + c) + 1.5) for turn in range(40)) for c in range(7)]
    population = Population(7, Always(1.0), availability=Intervals(tuple(turns)))
    run = simulate(TABLE[name], population, versions=10, selection="same_client")  # one client at a time, never four
    arrivals = [t for (t,) in rows(run, "delivered", "time_s")]
    assert run.summary["ended"] == "versions"
    assert all(t % gap_s == 1.0 for t in arrivals)
    assert {later - sooner for sooner, later in pairwise(arrivals)} == {gap_s}


def test_fedscale_158_events_happen_in_the_order_of_their_times() -> None:
    """The simulated events of clients came out of order."""
    population = Population(30, Pareto(0.1, 1.1), availability=OnOff(Exponential(5.0), Exponential(5.0)))
    run = simulate(fedbuff(concurrency=20, buffer_size=3), population, seed=1, time_s=60.0)
    assert np.diff(run.events["time_s"].to_numpy()).min() >= 0
    started = dict(rows(run, "admitted", "lease", "time_s"))
    assert all(started[lease] <= t for lease, t in rows(run, "delivered", "lease", "time_s"))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("simultaneous", ["one_by_one", "together"])
def test_fedscale_158_arrivals_of_one_instant_are_mixed_in_the_order_of_dispatch(
    simultaneous: Any, order: tuple[int, int]
) -> None:
    """w = 0, α = 1/2, models 1 then 2: 1.25; the other order gives 1, and averaging both would give 0.75."""
    brings = {order[0]: 1.0, order[1]: 2.0}
    workload = Mapped(2, lambda client, w: w * 0 + brings[client])
    strategy = fedasync(concurrency=2, alpha=0.5, staleness=PLAIN, proximal_mu=0.0, simultaneous=simultaneous)
    run = simulate(strategy, constant_times(1.0, 1.0), workload, time_s=1.0, selection="same_client")
    assert series(run)[1.0] == (1.25 if order == (0, 1) else 1.0)


def test_fedscale_158_at_a_tie_the_older_lease_comes_first_although_the_other_was_shorter() -> None:
    """Client 0 takes 4 s; client 1 works 1 s at a time and meets it at 4."""
    run = simulate(fedasync(concurrency=2), constant_times(4.0, 1.0), time_s=4.0, selection="same_client")
    assert [worker for t, worker in rows(run, "delivered", "time_s", "worker") if t == 4.0] == [0, 1]


def test_fedscale_162_the_mean_of_a_buffer_divides_by_k() -> None:
    """By K or by Σs? The same buffer gives 1.35, 1.4667, 1.5, 1.2, 1.1333 or 1.10 in public frameworks.

    Server at version 3, w = 1, K = 2, s = (1 + τ)^(−1/2). A returns 1.4 from version 3; B started at version 0, from
    w = 0, and returns 0.6: w + (½·0.6 + 0.4)/2 = 1.35.
    """
    steps = {0.0: 0.25, 0.25: 0.5, 0.5: 1.0, 1.0: 1.4}
    workload = Mapped(3, lambda client, w: w * 0 + (0.6 if client == 0 else steps[float(w)]))
    strategy = fedbuff(concurrency=3, buffer_size=2, simultaneous="together")
    watched, run = watch(strategy, constant_times(3.5, 1.0, 1.0), workload, versions=4, selection="same_client")
    assert [float(w) for w in watched.versions[:4]] == [0.0, 0.25, 0.5, 1.0]
    assert rows(run, "consumed", "worker", "staleness")[-2:] == [(0, 3), (1, 0)]
    assert float(watched.versions[4]) == pytest.approx(1.35, abs=1e-12)


def test_fedscale_173_starts_at_1_3_5_and_durations_of_3_5_1_come_back_0_0_and_2_versions_late() -> None:
    """Factors of 2, then 5, hid idle bubbles; a heap was the remedy (#174). S0@1, S1@3, E0@4, S2@5, E2@6, E1@8."""
    once = Intervals((((1.0, 4.0),), ((3.0, 8.0),), ((5.0, 6.0),)))
    population = Population(3, Values((3.0, 5.0, 1.0)), availability=once)
    run = simulate(fedasync(concurrency=3), population, time_s=20.0)
    story = [(t, kind[0], c) for t, kind, c in run.events.select("time_s", "kind", "worker").rows() if kind in STORY]
    assert story == [(1, "a", 0), (3, "a", 1), (4, "d", 0), (5, "a", 2), (6, "d", 2), (8, "d", 1)]
    staleness = [tau for (tau,) in rows(run, "delivered", "staleness")]
    assert staleness == [0, 0, 2]
    assert run.summary["staleness"]["mean"] == pytest.approx(2 / 3)
    assert pstdev(staleness) == pytest.approx(0.942809, abs=5e-7)


STORY = ("admitted", "delivered")


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedasync", "fedbuff", "fedfa"])
def test_fedscale_132_one_word_switches_between_synchronous_and_asynchronous(name: str) -> None:
    """A single configuration key was asked for, in the place of two programs."""
    size = {"cohort": 4} if name in ("fedavg", "fedprox") else {"concurrency": 4}
    run = simulate(STRATEGIES[name](**size), Population(duration_s=Exponential(1.0)), Quadratic(6), time_s=30.0)
    assert run.summary["strategy"] == name
    assert run.summary["versions"] > 3


def test_nvflare_5239_the_degenerate_setting_equals_fedavg() -> None:
    """Buffer = concurrency = clients and equal times: the curve of FedAvg."""
    buff = fedbuff(concurrency=5, buffer_size=5, staleness=PLAIN, simultaneous="together")
    curves = [
        series(simulate(s, constant_times(*[2.0] * 5), Quadratic(5, start=3.0), time_s=20.0, evaluate_every_s=1.0))
        for s in (buff, fedavg(cohort=5))
    ]
    assert curves[0].keys() == curves[1].keys()
    assert list(curves[0].values()) == pytest.approx(list(curves[1].values()), abs=1e-12)


def test_nvflare_5239_the_degenerate_setting_equals_fedavg_on_a_model_that_trains() -> None:
    """The same with stochastic gradients: same clients, same batches, the same weights up to rounding."""
    buff = fedbuff(concurrency=4, buffer_size=4, staleness=PLAIN, simultaneous="together")
    workload = noise(plain, clients=4)
    assert set(workload.client_samples()) == {80}
    one, other = (
        simulate(s, constant_times(*[2.0] * 4), workload, versions=3, selection="same_client").model
        for s in (buff, fedavg(cohort=4))
    )
    assert one is not None
    assert other is not None
    start = workload.initial_model(0).values
    assert float((one.values - start).abs().max()) > 0.05, "it learnt nothing"
    torch.testing.assert_close(one.values, other.values, rtol=0, atol=1e-6)


class Sends(Mapped):
    """Clients that go half of the way to 8, and say so in one form or another."""

    def __init__(self, form: Form) -> None:
        super().__init__(5, lambda client, w: (8 - w) / 2 if form == "delta" else (w + 8) / 2, form=form)


@pytest.mark.parametrize("name", TABLE)
def test_appfl_439_a_delta_sent_to_a_rule_that_averages_models_is_no_model(name: str) -> None:
    """`send_gradient` with a model-averaging server replaced the model by a mean delta: accuracy stayed at chance."""
    curves = [
        series(simulate(TABLE[name], Population(5, Exponential(1.0)), Sends(form), time_s=20.0, evaluate_every_s=1.0))
        for form in ("parameters", "delta")
    ]
    assert list(curves[0].values()) == pytest.approx(list(curves[1].values()), rel=1e-9)
    assert curves[0][20.0] == pytest.approx(8.0, abs=0.5)


@pytest.mark.parametrize("name", TABLE)
def test_appfl_439_what_a_contribution_is_must_be_declared(name: str) -> None:
    """A third form is refused by name, whoever sends it, and does not reach the model."""

    class Undeclared(Mapped):
        def train(self, task: Task) -> Contribution:
            return replace(super().train(task), form="gradient")  # type: ignore[arg-type]

    with pytest.raises(NothingAcceptedError, match="unknown form"):
        simulate(TABLE[name], Population(5, Exponential(1.0)), Undeclared(5, lambda _, w: w + 1), versions=1)
    run = simulate(TABLE[name], Population(5, Exponential(1.0)), Undeclared(5, lambda _, w: w + 1), time_s=5.0)
    assert run.summary["unfit"][0]["detail"] == "form 'gradient'; 'parameters' or 'delta' would do"
    assert run.model is not None
    assert run.model.values.tolist() == [0.0]


@pytest.mark.parametrize("name", TABLE)
def test_easyfl_37_arrivals_of_one_instant_stay_apart(name: str) -> None:
    """Its clock has whole ticks, and merges what comes in one: here each is booked, in the order of dispatch."""
    simulation = play(TABLE[name], Population(4, Always(1.0)), time_s=50.0)
    delivered = column(simulation.log, "lease", "delivered")
    assert len(delivered) == 200
    assert np.array_equal(delivered, np.sort(delivered))


@pytest.mark.parametrize("times", [(1.0, 1.0, 3.5, 3.5), (2.0, 5.0, 1.0, 2.5)])
def test_fedmodule_7_a_tiers_first_update_moves_the_model(times: tuple[float, ...]) -> None:
    """Weights mirrored from tiers that have not stepped: the first updates of a run were multiplied by 0.

    Clients return 1, 2, 3, 4, whatever they are given, so a version says how much of each round is in it.
    """
    strategy = STRATEGIES["fedat"](tiers=2, cohort=2, proximal_mu=0.0)
    returns = Mapped(4, lambda client, w: torch.full_like(w, client + 1.0), start=(100.0,))
    watched, run = watch(strategy, constant_times(*times), returns, versions=8, seed=3)
    steps = [
        (inputs.entering[0].group, np.mean([float(x.values) for x in inputs.entering])) for inputs in watched.given
    ]
    values = [float(version) for version in watched.versions]
    assert {tier for tier, _ in steps} == {0, 1}
    assert values[0] == 100.0
    assert values[1] == steps[0][1], "nobody else has stepped: the round's mean, and nothing of version 0"
    first = [tier for tier, _ in steps].index(1 - steps[0][0])
    counts = {0: 0, 1: 0}
    for tier, _ in steps[: first + 1]:
        counts[tier] += 1
    mine, before = steps[first][0], steps[first - 1][1]
    weight = counts[1 - mine] / (first + 1)
    assert weight > 0
    assert values[first + 1] == pytest.approx(weight * steps[first][1] + (1 - weight) * before, rel=1e-12)
    assert values[first + 1] != values[first]
    assert run.summary["versions"] == 8
