"""``fedasync world`` of a cluster tells, before any run, how much is in flight and how old a group can get."""

from __future__ import annotations

from pathlib import Path

from .running import Command, changed
from .test_cluster_studies import CLUSTER, ETAS

TOLD = "Staleness: areal: at most 16 in flight; what is trained in its turn is at most 1 version old; what was"


def test_world_tells_the_bounds_of_a_strategy(fedasync: Command, study: Path) -> None:
    study.write_text(CLUSTER)
    assert TOLD in fedasync("world", "s.toml").out
    assert "at most 24 in flight" in fedasync("world", "s.toml", "--set", "strategy.eta=2").out


def test_where_axes_vary_the_strategy_there_is_not_one_bound_to_tell(fedasync: Command, study: Path) -> None:
    study.write_text(changed(CLUSTER, ("eta = 1", "")) + ETAS)
    end = fedasync("world", "s.toml")
    assert end.status == 0
    assert "Staleness" not in end.out
