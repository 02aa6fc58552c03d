"""What the trainer of a real run says that it did becomes the parts of its steps, which add up to their time."""

from __future__ import annotations

import pytest

from fedasync.core import Coordinator, EventLog
from fedasync.runs.step_times import PARTS
from fedasync.runs.time_shares import time_shares
from fedasync.strategies.rollouts import synchronous_rl
from fedasync.trainer.trainer_time import TrainerTime


def committed(time: TrainerTime, now: float, train_s: float, measure_s: float = 0.0) -> None:
    """One group is asked for, delivered, and trained."""
    coordinator = Coordinator(synchronous_rl(batch=1), EventLog())
    lease = coordinator.request(0, now)
    assert lease is not None
    coordinator.deliver(lease.id, now)
    step = coordinator.step
    assert step is not None
    time.trained(step, train_s, measure_s, 5.0, now)
    coordinator.commit(now)
    time.steps.committed(coordinator, now)


def parts(time: TrainerTime, version: int) -> dict[str, float]:
    table = time.steps.table()
    found = dict(table.filter(table["version"] == version).select("name", "value").iter_rows())
    told = {name: found[name] for name in ("train_s", *PARTS.values())}
    assert sum(told.values()) == pytest.approx(found["step_s"])
    return {name: seconds for name, seconds in told.items() if seconds}


def test_whatever_is_said_is_booked_and_the_rest_is_waiting() -> None:
    time = TrainerTime()
    time.begins(0.0)
    committed(time, 5.0, 2.0, 0.5)
    assert parts(time, 1) == pytest.approx({"wait_s": 2.5, "train_s": 2.0, "measure_s": 0.5})
    time.spent("syncing", 1.0, 6.5)
    time.spent("saving", 0.5, 7.0)
    time.spent("evaluating", 2.0, 9.0)
    committed(time, 12.0, 2.0)
    assert parts(time, 2) == pytest.approx(
        {"wait_s": 0.5 + 1.0, "sync_s": 1.0, "save_s": 0.5, "evaluate_s": 2.0, "train_s": 2.0}
    )
    shares = time_shares(time.steps.table(), {}, 1)["trainer"]
    assert shares["waiting"] == pytest.approx(4.0 / 12.0)
    assert shares["evaluating"] == pytest.approx(2.5 / 12.0)
    assert sum(share or 0.0 for share in shares.values()) == pytest.approx(1.0)


def test_nobody_was_at_it_longer_than_there_was_time() -> None:
    """A message takes a while: what is told counts up to the one before."""
    time = TrainerTime()
    time.begins(0.0)
    time.spent("evaluating", 3.0, 2.0)
    committed(time, 4.0, 9.0, 1.5)
    assert parts(time, 1) == pytest.approx({"evaluate_s": 2.0, "train_s": 0.5, "measure_s": 1.5})


def test_what_came_after_the_checkpoint_is_lost_and_then_nobody_is_there() -> None:
    time = TrainerTime()
    time.begins(0.0)
    committed(time, 4.0, 1.0)
    kept = time.state()
    time.spent("evaluating", 1.0, 6.0)
    again = TrainerTime()
    again.load(kept)
    again.died(7.0, 9.5)
    again.begins(9.5)
    committed(again, 12.0, 1.5)
    assert parts(again, 2) == pytest.approx({"lost_s": 3.0, "down_s": 2.5, "wait_s": 1.0, "train_s": 1.5})
    assert time_shares(again.steps.table(), {}, 1, 1)["trainer"]["training"] == pytest.approx(4.5 / 8.0)
