"""What the server does when clients fail, are late, come back, join late, or when it is itself ended in the middle."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from flwr.app import Error, Message, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedasync.core import Strategy
from fedasync.federated.arrays import Arrays
from fedasync.federated.limits import Limits
from fedasync.federated.recorded import Recorded
from fedasync.federated.replay import replay
from fedasync.flower.failures import ClientFailure
from fedasync.flower.inbox import ClientFailedError
from fedasync.flower.messages import error_record
from fedasync.flower.serving import Deployment, StalledError, serve
from fedasync.flower.settings import DeploymentSettings, with_deadline
from fedasync.runs.run import Run
from fedasync.strategies import fedasync as fedasync_row
from fedasync.strategies import fedavg, fedbuff, fedfa, fednova
from fedasync.workloads import Quadratic

from .fake_grid import FIRST_NODE, Ends, FakeGrid, VirtualClock

CLIENTS = 4
WORKLOAD = Quadratic(clients=CLIENTS, seed=1)


def deployed(
    ends: Ends,
    strategy: Strategy | None = None,
    *,
    grid: type[FakeGrid] = FakeGrid,
    out: Path | None = None,
    resume: bool = False,
    limits: Limits | None = None,
    **options: Any,
) -> tuple[Run, FakeGrid]:
    clock = VirtualClock()
    made = grid(WORKLOAD, clock, ends)
    deployment = Deployment(
        strategy or fedbuff(concurrency=4, buffer_size=2),
        WORKLOAD,
        limits or Limits(updates=20),
        DeploymentSettings(**{"task_timeout_s": 100.0, **options}),
        out=out,
        resume=resume,
    )
    return serve(made, deployment, clock), made


def speeds(client: int, turn: int, lease: int, steps: int | None) -> float:
    return (1.0, 1.5, 2.5, 6.0)[client] + 0.01 * turn


def exchanged(run: Run) -> pl.DataFrame:
    """The table of exchanges."""
    assert run.exchanges is not None
    return run.exchanges


def reasons(run: Run, kind: str) -> list[str]:
    events = run.events
    return sorted(set(events.filter(events["kind"] == kind)["reason"].to_list()))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (2, "client error"),
        (3, "no reply in time"),
        (5, "node unavailable"),
        (8, "client crashed"),
        (77, "unknown error"),
    ],
)
def test_an_error_reply_frees_the_slot_and_the_others_go_on(code: int, reason: str) -> None:
    run, _ = deployed(lambda *task: (0.5, code) if task[0] == 0 else speeds(*task))
    assert reasons(run, "failed") == [reason]
    failed = exchanged(run).filter(exchanged(run)["outcome"] == reason)
    assert failed.height == sum(run.summary["ledger"]["failed"].values())
    replied = code == 2  # all other codes are Flower's own findings about a client that is silent
    assert failed["returned_s"].null_count() == (0 if replied else failed.height)
    assert run.summary["consumed"] == 20
    assert 0 not in run.events.filter(run.events["kind"] == "consumed")["worker"].to_list()


def test_a_client_that_keeps_failing_is_left_alone_for_longer_and_longer() -> None:
    run, grid = deployed(
        lambda *task: (0.5, 2) if task[0] == 0 else speeds(*task), limits=Limits(time_s=200.0), back_off_s=5.0
    )
    starts = run.events.filter((run.events["kind"] == "admitted") & (run.events["worker"] == 0))["time_s"].to_list()
    pauses = [later - earlier for earlier, later in pairwise(starts)]
    assert len(starts) == grid.tasks[0]
    assert all(pause >= 5.0 * 2**i for i, pause in enumerate(pauses))
    assert 4 <= len(starts) <= 6


def test_nobody_is_left_alone_for_longer_than_said() -> None:
    ends = lambda *task: (0.5, 2) if task[0] == 0 else speeds(*task)  # noqa: E731
    run, _ = deployed(ends, limits=Limits(time_s=100.0), back_off_s=5.0, most_back_off_s=10.0)
    starts = run.events.filter((run.events["kind"] == "admitted") & (run.events["worker"] == 0))["time_s"].to_list()
    assert len(starts) >= 8
    assert max(later - earlier for earlier, later in pairwise(starts)) < 11.5


def test_a_task_that_the_superlink_refuses_is_a_failure_and_its_client_is_used_again() -> None:
    class Refuses(FakeGrid):
        refused = 0

        def push_messages(self, messages: Any) -> list[Any]:
            found = list(messages)
            if self.refused or not any(message.metadata.message_type == "train" for message in found):
                return super().push_messages(found)
            self.refused = found[0].metadata.dst_node_id
            return [None, *super().push_messages(found[1:])]

    run, grid = deployed(speeds, grid=Refuses, limits=Limits(updates=40))
    assert isinstance(grid, Refuses)
    assert run.summary["ledger"]["failed"] == {"not taken by the SuperLink": 1}
    client = grid.refused - FIRST_NODE
    starts = run.events.filter((run.events["kind"] == "admitted") & (run.events["worker"] == client))["time_s"]
    assert starts.to_list()[1] - starts.to_list()[0] >= 5.0
    assert client in run.events.filter(run.events["kind"] == "consumed")["worker"].to_list()


def test_a_client_that_succeeds_is_forgiven() -> None:
    ends = lambda *task: (0.5, 2) if task[0] == 0 and task[1] < 2 else speeds(*task)  # noqa: E731
    run, _ = deployed(ends, limits=Limits(updates=60))
    assert 0 in run.events.filter(run.events["kind"] == "consumed")["worker"].to_list()


def test_a_reply_that_never_comes_is_given_up_after_the_tasks_own_deadline() -> None:
    run, _ = deployed(lambda *task: inf if task[0] == 0 else speeds(*task), task_timeout_s=8.0)
    failed = run.events.filter(run.events["kind"] == "failed")
    assert failed["reason"].to_list() == ["timeout"]
    assert failed["time_s"].to_list() == [8.0]


def test_a_late_reply_is_ignored_and_its_client_is_used_again() -> None:
    run, _ = deployed(lambda *task: 9.0 if task[:2] == (0, 0) else speeds(*task), task_timeout_s=8.0)
    assert run.summary["ledger"]["ignored"] == 1
    assert run.summary["ledger"]["failed"] == {"timeout": 1}
    assert 0 in run.events.filter(run.events["kind"] == "consumed")["worker"].to_list()
    late = run.exchanges
    assert late is not None
    assert late.filter(late["outcome"] == "timeout")["returned_s"].to_list() == [9.0]


def test_a_duplicate_reply_counts_once() -> None:
    class Twice(FakeGrid):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.duplicate = True

    once, _ = deployed(speeds)
    twice, _ = deployed(speeds, grid=Twice)
    assert twice.events.equals(once.events)


def test_a_node_that_comes_back_under_a_new_id_is_the_same_client() -> None:
    class Returns(FakeGrid):
        def get_node_ids(self) -> list[int]:
            if self.clock.time_s >= 2.0 and FIRST_NODE in self.online:  # killed, and started again at once
                del self.online[FIRST_NODE]
                self.online[77] = 0
            return super().get_node_ids()

    run, grid = deployed(lambda *task: inf if task[:2] == (0, 1) else speeds(*task), grid=Returns)
    assert reasons(run, "failed") == ["node replaced"]
    sent_to = [m.metadata.dst_node_id for m in grid.pushed if m.metadata.message_type == "train"]
    assert 77 in sent_to
    assert 0 in run.events.filter(run.events["kind"] == "consumed")["worker"].to_list()[4:]


def test_a_node_that_joins_late_is_used() -> None:
    class Late(FakeGrid):
        def get_node_ids(self) -> list[int]:
            return [node for node in super().get_node_ids() if node != FIRST_NODE or self.clock.time_s >= 5.0]

    run, _ = deployed(speeds, grid=Late, least_clients=3)
    starts = run.events.filter((run.events["kind"] == "admitted") & (run.events["worker"] == 0))["time_s"].to_list()
    assert 5.0 <= starts[0] <= 6.2


def test_a_silent_client_is_told_apart_from_a_slow_one() -> None:
    """Flower's own word that no reply will come is none, and its time is no duration."""
    run, _ = deployed(
        lambda *task: inf if task[0] == 0 else speeds(*task), task_timeout_s=8.0, limits=Limits(time_s=60.0)
    )
    table = run.exchanges
    assert table is not None
    silent = table.filter(table["worker"] == 0)
    assert "timeout" in silent["outcome"].to_list()
    assert set(silent["outcome"].to_list()) <= {"timeout", "cancelled"}
    assert silent["returned_s"].null_count() == len(silent)


def test_every_lease_that_was_sent_has_its_row_and_only_what_was_accepted_is_delivered() -> None:
    strategy = fedasync_row(concurrency=4, max_staleness=1)
    run, _ = deployed(speeds, strategy, limits=Limits(updates=30))
    table, events = run.exchanges, run.events
    assert table is not None
    unsent = events["time_s"] == run.summary["time_s"]  # the run was over before
    admitted = events.filter((events["kind"] == "admitted") & ~unsent)["lease"].to_list()
    assert sorted(table["lease"].to_list()) == sorted(admitted)
    accepted = events.filter(events["kind"] == "delivered")["lease"].to_list()
    assert sorted(table.filter(table["outcome"] == "delivered")["lease"].to_list()) == sorted(accepted)
    assert "stale" in run.summary["ledger"]["rejected"]


def test_a_question_that_the_superlink_refuses_is_asked_again() -> None:
    class Refuses(FakeGrid):
        refused = False

        def push_messages(self, messages: Any) -> list[str]:
            if not self.refused:
                self.refused = True
                return []
            return super().push_messages(messages)

    run, _ = deployed(speeds, grid=Refuses)
    assert run.summary["consumed"] == 20


def test_a_node_that_cannot_say_who_it_is_is_asked_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeGrid):
        def _answer(self, message: Message, number: int, client: int) -> None:
            if client == 0 and message.metadata.message_type == "query":
                self._reply(0.2, number, Message(Error(1, "no\nmodule"), reply_to=message))
            else:
                super()._answer(message, number, client)

    deployed(speeds, grid=Broken, least_clients=3, limits=Limits(time_s=200.0))
    asked = [record.message for record in caplog.records if "did not say who it is" in record.message]
    assert 3 <= len(asked) <= 7
    assert "client app not loadable (no module)" in asked[0]
    with pytest.raises(ClientFailedError, match="client app not loadable"):
        deployed(speeds, grid=Broken, least_clients=3, on_client_error="stop")


def test_a_reply_whose_bytes_are_none_ends_nothing() -> None:
    class Garbage(FakeGrid):
        left = 1

        def pull_messages(self, message_ids: Any) -> list[Message]:
            found = super().pull_messages(message_ids)
            if self.left and any(m.metadata.message_type == "train" for m in found):
                self.left -= 1
                raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
            return found

    run, _ = deployed(speeds, grid=Garbage, task_timeout_s=8.0)
    assert run.summary["consumed"] == 20
    assert run.summary["ledger"]["failed"] == {"timeout": 1}


def test_a_contribution_without_what_the_rule_needs_is_rejected_by_name() -> None:
    class Adaptive(FakeGrid):
        def _reply(self, after_s: float, number: int, message: Message) -> None:
            if message.has_content() and "result" in message.content and message.content["result"]["client"] == 0:
                message.content["result"].pop("step_size_sum", None)
            super()._reply(after_s, number, message)

    run, _ = deployed(speeds, fednova(cohort=3), grid=Adaptive, limits=Limits(versions=5))
    assert run.summary["ledger"]["rejected"].keys() == {"no step sizes"}


class Raises(FakeGrid):
    """Client 0's own code raises."""

    def _answer(self, message: Message, number: int, client: int) -> None:
        if client == 0 and message.metadata.message_type == "train":
            failure = error_record(0, ValueError("no such column"))
            self._reply(0.5, number, Message(RecordDict(dict(failure)), reply_to=message))
        else:
            super()._answer(message, number, client)


def test_a_clients_exception_is_told_with_its_file_and_line(caplog: pytest.LogCaptureFixture) -> None:
    run, _ = deployed(speeds, grid=Raises)
    assert reasons(run, "failed") == ["client error"]
    told = str(ClientFailure.of(0, ValueError("no such column")))
    assert any(record.message == told for record in caplog.records)


def test_a_deployment_may_stop_at_a_clients_exception(tmp_path: Path) -> None:
    with pytest.raises(ClientFailedError, match="client 0: ValueError: no such column"):
        deployed(speeds, grid=Raises, on_client_error="stop", out=tmp_path)
    assert Recorded(tmp_path).size > 0


class Lies(FakeGrid):
    """Client 0 claims a million samples."""

    def _reply(self, after_s: float, number: int, message: Message) -> None:
        if message.has_content() and "result" in message.content and message.content["result"]["client"] == 0:
            message.content["result"]["samples"] = 10**6
        super()._reply(after_s, number, message)


def test_an_unfit_reply_is_rejected_by_name_and_the_model_does_not_change() -> None:
    run, _ = deployed(speeds, grid=Lies)
    assert reasons(run, "rejected") == ["too many samples"]
    assert run.summary["unfit"][0]["detail"] == "samples = 1000000; client 0 has 1"
    assert 0 not in run.events.filter(run.events["kind"] == "consumed")["worker"].to_list()


def test_who_waits_for_whom_is_said_when_nobody_comes() -> None:
    class Nobody(FakeGrid):
        def get_node_ids(self) -> list[int]:
            return []

    with pytest.raises(StalledError, match=r"no client joined in 60 s: 0 of 4 clients are connected; not: 0, 1, 2, 3"):
        deployed(speeds, grid=Nobody, stall_timeout_s=60.0, task_timeout_s=50.0)


def test_a_run_that_gets_nothing_any_more_fails_loudly() -> None:
    with pytest.raises(StalledError, match=r"nothing was accepted for .* 4 of 4 clients are connected"):
        deployed(lambda *task: inf, stall_timeout_s=300.0)


# -- the server itself is ended ---------------------------------------------------------------------------------


class Killed(BaseException):
    """As ``kill -9`` is: nothing is done after it."""


def killed_after(calls: int) -> type[FakeGrid]:
    class Kills(FakeGrid):
        left = calls

        def _call(self) -> None:
            self.left -= 1
            if self.left < 0:
                raise Killed

        def pull_messages(self, message_ids: Any) -> list[Message]:
            self._call()
            found = super().pull_messages(message_ids)
            self._call()
            return found

        def push_messages(self, messages: Any) -> list[str]:
            self._call()
            return super().push_messages(messages)

    return Kills


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    calls=st.lists(st.integers(3, 60), min_size=1, max_size=3),
    name=st.sampled_from(["fedbuff", "fedfa", "fedavg", "fedasync"]),
    every_s=st.sampled_from([0.0, 4.0, 1e9]),
    record=st.sampled_from(["all", "tail"]),
)
def test_a_run_that_is_killed_anywhere_goes_on_and_loses_no_accepted_update(
    tmp_path_factory: pytest.TempPathFactory, calls: list[int], name: str, every_s: float, record: str
) -> None:
    out = tmp_path_factory.mktemp("run")
    strategy = {
        "fedbuff": fedbuff(concurrency=4, buffer_size=2),
        "fedfa": fedfa(concurrency=4, window=3),
        "fedavg": fedavg(cohort=3),
        "fedasync": fedasync_row(concurrency=3),
    }[name]
    accepted: list[int] = []
    options = {"out": out, "checkpoint_every_s": every_s, "record": record, "limits": Limits(updates=24)}
    for number, count in enumerate(calls):
        try:
            run, _ = deployed(speeds, strategy, grid=killed_after(count), resume=number > 0, **options)
            break
        except Killed:
            events = Recorded(out)
            delivered = [row[2] for row in events.rows() if row[1] == 1]
            assert delivered[: len(accepted)] == accepted
            accepted = delivered
    else:
        run, _ = deployed(speeds, strategy, resume=True, **options)
    delivered = run.events.filter(run.events["kind"] == "delivered")["lease"].to_list()
    assert delivered[: len(accepted)] == accepted
    assert len(set(delivered)) == len(delivered)
    consumed = run.events.filter(run.events["kind"] == "consumed")["lease"].to_list()
    assert len(set(consumed)) == len(consumed)
    assert (
        run.summary["ledger"]["in_flight"]
        + len(consumed)
        + run.summary["ledger"]["buffered"]
        + sum(sum(run.summary["ledger"][kind].values()) for kind in ("failed", "rejected", "cancelled"))
        == run.summary["ledger"]["admitted"]
    )
    if record == "all":
        assert run.model is not None
        arrays = Arrays(strategy, WORKLOAD, 0)
        journal = Recorded(out)
        bounded = with_deadline(strategy, DeploymentSettings(task_timeout_s=100.0))
        again = replay(journal.rows(), journal.reasons, bounded, arrays, journal.contribution, rings=journal.rings())
        assert again.versions == run.summary["versions"]
        assert torch.equal(arrays.server.model.values, run.model.values)


def test_a_synchronous_round_that_was_interrupted_still_waits_for_its_whole_cohort(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        deployed(speeds, fedavg(cohort=4), grid=killed_after(9), out=tmp_path)
    delivered = [row for row in Recorded(tmp_path).rows() if row[1] == 1]
    assert 0 < len(delivered) < 4
    run, _ = deployed(speeds, fedavg(cohort=4), out=tmp_path, resume=True, limits=Limits(versions=3))
    sizes = run.events.filter(run.events["kind"] == "consumed").group_by("version").len()["len"].to_list()
    assert sizes == [4, 4, 4]


def test_a_clients_turns_go_on_after_a_restart(tmp_path: Path) -> None:
    """Its seeds are drawn by turn: none comes twice."""
    seeds: dict[int, list[int]] = {}
    for number, count in enumerate((30, 30, 10**9)):
        grid = killed_after(count)
        made: list[FakeGrid] = []

        class Kept(grid):  # type: ignore[valid-type, misc]
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                made.append(self)  # noqa: B023

        with suppress(Killed):
            deployed(speeds, grid=Kept, out=tmp_path, resume=number > 0, limits=Limits(updates=60))
        for message in made[0].pushed:
            if "task" in message.content:
                seeds.setdefault(message.content["task"]["client"], []).append(message.content["task"]["seed"])
    assert sorted(seeds) == [0, 1, 2, 3]
    for found in seeds.values():
        assert len(set(found)) >= len(found) - 2  # one that was pushed, and not yet in the log, at each kill


def test_a_run_goes_on_only_as_what_it_was(tmp_path: Path) -> None:
    config = {"strategy": {"name": "fedbuff"}, "workload": {"kind": "quadratic"}, "seed": 0, "targets": {}}

    def begun(config: dict[str, Any], grid: type[FakeGrid], resume: bool) -> None:
        clock = VirtualClock()
        strategy = fedbuff(concurrency=4, buffer_size=2)
        deployment = Deployment(strategy, WORKLOAD, Limits(updates=20), out=tmp_path, resume=resume, config=config)
        serve(grid(WORKLOAD, clock, speeds), deployment, clock)

    with pytest.raises(Killed):
        begun(config, killed_after(20), False)
    for key, value in (("seed", 5), ("workload", {"kind": "digits"}), ("strategy", {"name": "fedfa"})):
        with pytest.raises(ValueError, match=f"the run that lies here has {key} = "):
            begun({**config, key: value}, FakeGrid, True)
    begun(config, FakeGrid, True)


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        deployed(speeds, grid=killed_after(20), out=tmp_path)
    with pytest.raises(ValueError, match="a run was begun here; resume = true would go on with it"):
        deployed(speeds, out=tmp_path)
    deployed(speeds, out=tmp_path, resume=True)
    with pytest.raises(ValueError, match="a finished run lies here"):
        deployed(speeds, out=tmp_path, resume=True)


def test_what_clients_raise_is_kept_with_the_run_as_it_comes(tmp_path: Path) -> None:
    deployed(speeds, grid=Raises, out=tmp_path)
    lines = (tmp_path / "failures.log").read_text().splitlines()
    assert lines
    assert set(lines) == {str(ClientFailure.of(0, ValueError("no such column")))}


def test_a_target_that_the_workload_does_not_have_is_told_before_anything_is_sent() -> None:
    clock = VirtualClock()
    grid = FakeGrid(WORKLOAD, clock, speeds)
    limits = Limits(updates=5, evaluate_every_s=1.0)
    with pytest.raises(ValueError, match="target 'acuracy': the workload has no such metric; it has"):
        serve(grid, Deployment(fedavg(cohort=2), WORKLOAD, limits, targets={"acuracy": 0.5}), clock)
    assert not grid.pushed
