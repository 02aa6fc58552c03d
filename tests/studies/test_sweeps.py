"""Axes: every product of points, joint points under several names, tables that replace or merge, and changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedasync.studies.study import RunPlan, load

from .running import TIMING, changed


def plans(study: Path, text: str, *changes: str, seeds: int | None = None) -> list[RunPlan]:
    study.write_text(text)
    return list(load(study, changes, seeds).plans())


def at(plan: RunPlan, key: str) -> Any:
    value: Any = plan.config
    for part in key.split("."):
        value = value[part]
    return value


def test_a_study_without_axes_is_its_base_times_its_seeds(study: Path) -> None:
    (plan,) = plans(study, TIMING)
    assert (plan.labels, plan.seed) == ({}, 0)
    assert plan.config == {
        "run": {"updates": 40},
        "population": {"clients": 8, "duration_s": {"kind": "exponential", "mean": 10.0}},
        "strategy": {"name": "fedbuff", "concurrency": 4, "buffer_size": 2},
        "targets": {},
        "seed": 0,
    }
    assert [plan.seed for plan in plans(study, changed(TIMING, ("seeds = 1", "seeds = 3")))] == [0, 1, 2]
    assert [plan.seed for plan in plans(study, changed(TIMING, ("seeds = 1", "seeds = [7, 3]")))] == [7, 3]
    assert [plan.seed for plan in plans(study, TIMING, seeds=4)] == [0, 1, 2, 3]
    assert len(plans(study, changed(TIMING, ("seeds = 1", "")))) == 3


def test_axes_multiply_in_their_order(study: Path) -> None:
    found = plans(
        study,
        changed(TIMING, ("seeds = 1", "seeds = 2"))
        + """
        [[axis]]
        key = "strategy.buffer_size"
        values = [1, 2, 3]

        [[axis]]
        name = "how slow"
        key = "population.duration_s.mean"
        values = [10, 20.5]
        labels = ["slow", "slower"]
        """,
    )
    assert [(*p.labels.values(), p.seed) for p in found] == [
        (k, slow, seed) for k in ("1", "2", "3") for slow in ("slow", "slower") for seed in (0, 1)
    ]
    assert list(found[0].labels) == ["buffer_size", "how slow"]
    assert [(at(p, "strategy.buffer_size"), at(p, "population.duration_s.mean")) for p in found[::2]] == [
        (k, mean) for k in (1, 2, 3) for mean in (10, 20.5)
    ]
    assert all(at(p, "strategy.concurrency") == 4 for p in found)


def test_a_point_sets_several_keys_under_several_names(study: Path) -> None:
    found = plans(
        study,
        TIMING
        + """
        [[axis]]
        name = ["strategy", "at work"]
        points = [
          { label = ["A", "few"], strategy = { name = "fedavg", cohort = 2 }, run.updates = 10 },
          { label = ["A", "many"], strategy = { name = "fedavg", cohort = 8 }, run = { updates = 80 } },
          { label = ["B", "few"], strategy.buffer_size = 3, population = { clients = 5 } },
        ]
        """,
    )
    assert [p.labels for p in found] == [
        {"strategy": "A", "at work": "few"},
        {"strategy": "A", "at work": "many"},
        {"strategy": "B", "at work": "few"},
    ]
    assert [at(p, "run.updates") for p in found] == [10, 80, 40]
    assert at(found[0], "strategy") == {"name": "fedavg", "cohort": 2}, "a table with a name replaces the base's"
    assert at(found[2], "strategy") == {"name": "fedbuff", "concurrency": 4, "buffer_size": 3}, "others merge"
    assert at(found[2], "population") == {"clients": 5, "duration_s": {"kind": "exponential", "mean": 10.0}}


def test_a_table_with_a_kind_replaces_and_points_do_not_touch_each_other(study: Path) -> None:
    found = plans(
        study,
        TIMING
        + """
        [[axis]]
        name = "law"
        points = [
          { label = "Pareto", population.duration_s = { kind = "pareto", minimum = 6.0, alpha = 2.5 } },
          { label = "base" },
        ]
        """,
    )
    assert at(found[0], "population.duration_s") == {"kind": "pareto", "minimum": 6.0, "alpha": 2.5}
    assert at(found[1], "population.duration_s") == {"kind": "exponential", "mean": 10.0}


def test_a_key_inside_a_table_holds_whichever_axis_comes_first(study: Path) -> None:
    knob = '[[axis]]\nkey = "strategy.concurrency"\nvalues = [2, 3]\n'
    table = '[[axis]]\nname = "s"\npoints = [{ label = "x", strategy = { name = "fedfa", concurrency = 8 } }]\n'
    for text in (knob + table, table + knob):
        found = plans(study, TIMING + text)
        assert [at(p, "strategy") for p in found] == [{"name": "fedfa", "concurrency": n} for n in (2, 3)]


def test_changes_reach_the_base_and_the_points(study: Path) -> None:
    axis = """
    [[axis]]
    name = "strategy"
    points = [
      { label = "base" },
      { label = "own", strategy = { name = "fedfa", concurrency = 3 } },
    ]
    """
    found = plans(
        study,
        TIMING + axis,
        "run.updates=7",
        "strategy.concurrency=5",
        "population.duration_s={kind='constant', value=2}",
    )
    assert [at(p, "strategy.concurrency") for p in found] == [5, 5]
    assert [at(p, "strategy.name") for p in found] == ["fedbuff", "fedfa"]
    assert all(at(p, "run.updates") == 7 for p in found)
    assert all(at(p, "population.duration_s") == {"kind": "constant", "value": 2} for p in found)


def test_a_changed_value_is_toml_or_a_bare_word(study: Path) -> None:
    def value(change: str) -> Any:
        return at(plans(study, TIMING, change)[0], change.partition("=")[0].strip())

    assert value("run.selection=same_client") == "same_client"
    assert value('run.selection="same_client"') == "same_client"
    assert value("run.updates = 1_000") == 1000
    assert value("run.time_s=1e3") == 1000.0
    assert value("run.stop_at_target=true") is True
    assert value("population.x.y=[1, 2]") == [1, 2]
    assert value("run.selection=a=b") == "a=b"
