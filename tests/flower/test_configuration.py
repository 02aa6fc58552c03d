"""A configuration goes through Flower unchanged, or is refused in one line."""

from __future__ import annotations

import json
import tomllib
from typing import Any, get_args

import pytest
import tomli_w
from flwr.app.user_config import UserConfigValue
from flwr.common.config import flatten_dict, parse_config_args
from hypothesis import example, given
from hypothesis import strategies as st

from fedasync.flower.configuration import Value, flatten, unflatten, without_ours

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)
KEYS = st.text(max_size=4) | st.sampled_from(["name", "a.b", "", "json:", "a"])
TEXTS = st.text(max_size=8).map("json:".__add__)
VALUES = st.recursive(
    LEAVES | TEXTS, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3), max_leaves=12
)
CONFIGS = st.dictionaries(st.text(min_size=1, max_size=6).filter(lambda key: "." not in key), VALUES, max_size=4)


def same(one: Any, other: Any) -> bool:
    """Equal in types too: 1, 1.0 and True differ; the order of keys does not count."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@given(CONFIGS)
@example({"strategy": {"name": "fedbuff", "K": 4, "none": {}}, "work_s": [1, 2.0, None], "seed": 2**70})
def test_unflatten_undoes_flatten(config: dict[str, Any]) -> None:
    assert same(unflatten(flatten(config)), config)


@given(CONFIGS)
def test_flower_carries_what_flatten_gives(config: dict[str, Any]) -> None:
    flat = flatten(config)
    assert all(isinstance(value, get_args(UserConfigValue)) for value in flat.values())
    assert all(abs(value) <= 2**63 for value in flat.values() if isinstance(value, int))
    written = tomllib.loads(tomli_w.dumps({"config": flat}))["config"]
    assert same(flatten_dict(written), flat)
    assert same(unflatten(flatten_dict(written)), config)


@given(CONFIGS)
def test_flattening_twice_changes_only_marked_texts(config: dict[str, Any]) -> None:
    flat = flatten(config)
    assert same(unflatten(flat), unflatten(dict(reversed(flat.items()))))


def test_a_key_is_overridden_as_on_the_command_line() -> None:
    config = {"strategy": {"name": "fedbuff", "buffer_size": 4}, "seed": 0}
    changes = parse_config_args(["strategy.buffer_size=8 seed=1"])
    assert unflatten(flatten(config) | changes) == {"strategy": {"name": "fedbuff", "buffer_size": 8}, "seed": 1}


def test_what_is_a_table_of_plain_values_stays_readable() -> None:
    config = {"strategy": {"name": "fedasync"}, "run": {"updates": 20, "stop": True}, "work_s": [1.0, 2.5]}
    flat: dict[str, Value] = {"strategy.name": "fedasync", "run.updates": 20, "run.stop": True}
    assert flatten(config) == flat | {"work_s": "json:[1.0, 2.5]"}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"run": {"out": b"x"}}, "run.out: got bytes"),
        ({"run": {"start": {1, 2}}}, "run.start: got set"),
        ({"run": [1, (2, 3)]}, "run.1: got tuple"),
        ({"run": {"time_s": float("nan")}}, "run.time_s: got nan; a finite number"),
        ({"run": [float("inf")]}, "run.0: got inf"),
        ({"run": {1: 2}}, "run.1: got a key of int"),
        ({"run.updates": 1}, "key 'run.updates'"),
        ({"": 1}, "key ''"),
    ],
)
def test_what_cannot_be_carried_is_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"^configuration: ") as refusal:
        flatten(config)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "run_config",
    [
        {"a": 1, "a.b": 2},
        {"a.b": 2, "a": 1},
        {"a.b.c": 2, "a.b": 1},
        {"a": 'json:{"b": 1}', "a.b": 2},
        {"a.b": 2, "a": "json:{}"},
    ],
)
def test_keys_that_collide_are_both_named(run_config: dict[str, Any]) -> None:
    one, other = run_config
    with pytest.raises(ValueError, match="collide") as refusal:
        unflatten(run_config)
    assert f"{one} and {other} " in str(refusal.value) or f"{other} and {one} " in str(refusal.value)


@pytest.mark.parametrize("text", ["json:", "json:[1", "json:NaN", "json:[Infinity]"])
def test_a_mark_without_json_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"^run configuration: run\.x: after 'json:' stands no JSON"):
        unflatten({"run.x": text})


def test_a_deployments_own_keys_are_no_part_of_the_study() -> None:
    assert without_ours({"seed": 1, "out": "/data/run", "resume": True}) == {"seed": 1}
