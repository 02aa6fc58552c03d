"""Scenarios of faults: read from TOML, and refused where they contradict themselves."""

from __future__ import annotations

import pytest

from fedasync.simulation.cluster.faults import (
    Faults,
    RewardStuck,
    ServerDown,
    SlowServer,
    SlowSync,
    SyncFails,
    TrainerCrash,
)
from fedasync.studies.errors import StudyError, parse

WHERE = "study.toml: faults"


def test_by_default_nothing_goes_wrong() -> None:
    assert parse(Faults, {}, WHERE) == Faults()


def test_every_fault_is_read_from_toml() -> None:
    table = {
        "servers_down": [{"server": 0, "at_s": 10, "for_s": 5}, {"server": 0, "at_s": 15}],
        "slow_servers": [{"server": 1, "at_s": 0, "times": 3}],
        "answer_failure_probability": 0.01,
        "lost_reply_probability": 0.02,
        "answer_timeout_s": 60,
        "sync_fails": {"probability": 0.5, "timeout_s": 30, "retry_s": 1, "most_retries": 2},
        "slow_syncs": [{"from_version": 3, "to_version": 4, "times": 10}],
        "reward_stuck": [{"at_s": 100, "for_s": 50}],
        "trainer_crashes": [{"at_s": 200, "restart_s": 60, "keeps_rollouts": True}],
        "stalled_after_s": 3600,
    }
    assert parse(Faults, table, WHERE) == Faults(
        servers_down=(ServerDown(0, 10.0, 5.0), ServerDown(0, 15.0)),
        slow_servers=(SlowServer(1, 0.0, times=3.0),),
        answer_failure_probability=0.01,
        lost_reply_probability=0.02,
        answer_timeout_s=60.0,
        sync_fails=SyncFails(0.5, timeout_s=30.0, retry_s=1.0, most_retries=2),
        slow_syncs=(SlowSync(3, 4, 10.0),),
        reward_stuck=(RewardStuck(100.0, 50.0),),
        trainer_crashes=(TrainerCrash(200.0, 60.0, keeps_rollouts=True),),
        stalled_after_s=3600.0,
    )


def test_a_server_that_the_cluster_does_not_have_is_told() -> None:
    Faults(servers_down=(ServerDown(3, 1.0),)).check_servers(4)
    with pytest.raises(ValueError, match="faults: servers_down: the cluster has no server 4; 0 to 3 would do"):
        Faults(servers_down=(ServerDown(4, 1.0),)).check_servers(4)
    with pytest.raises(ValueError, match="faults: slow_servers: the cluster has no server 1; 0 to 0 would do"):
        Faults(slow_servers=(SlowServer(1, 0.0, 2.0),)).check_servers(1)


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"servers_down": [{"server": 0, "at_s": 1}, {"server": 0, "at_s": 9, "for_s": 1}]}, "server 0 is down at 9 s"),
        ({"servers_down": [{"server": 0, "at_s": 5, "for_s": 4}, {"server": 0, "at_s": 3, "for_s": 3}]}, "at 5 s"),
        ({"reward_stuck": [{"at_s": 1}, {"at_s": 2}]}, "reward_stuck: the service is stuck at 2 s"),
        ({"trainer_crashes": [{"at_s": 0, "restart_s": 9}, {"at_s": 8, "restart_s": 1}]}, "it is down at 8 s"),
        ({"servers_down": [{"server": -1, "at_s": 1}]}, "servers_down: server must be an integer ≥ 0, got -1"),
        ({"servers_down": [{"server": 1}]}, "servers_down.0.at_s: this key is missing"),
        ({"servers_down": [{"server": 1, "at_s": 1, "for_s": 0}]}, "for_s must be a finite number > 0, got 0"),
        ({"slow_servers": [{"server": 1, "at_s": 1, "times": 0}]}, "slow_servers: times must be a finite number > 0"),
        ({"slow_syncs": [{"from_version": 3, "to_version": 2, "times": 2}]}, "to_version must be an integer ≥ 3"),
        ({"sync_fails": {"probability": 1.1, "timeout_s": 1}}, "sync_fails: probability must be .* ≤ 1, got 1.1"),
        ({"answer_failure_probability": -0.1}, "answer_failure_probability must be .*, got -0.1"),
        ({"stalled_after_s": 0}, "stalled_after_s must be a finite number > 0, got 0"),
        ({"servr_down": []}, "unknown key; did you mean 'servers_down'"),
    ],
)
def test_a_scenario_that_contradicts_itself_is_refused(table: dict[str, object], told: str) -> None:
    with pytest.raises(StudyError, match=f"^study.toml: faults.*{told}"):
        parse(Faults, table, WHERE)


def test_faults_of_different_servers_and_one_after_the_other_go_together() -> None:
    Faults(servers_down=(ServerDown(0, 1.0, 2.0), ServerDown(1, 2.0, 5.0), ServerDown(0, 3.0, 1.0)))
