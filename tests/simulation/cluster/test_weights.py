"""Time of a weight synchronisation."""

from __future__ import annotations

import pytest

from fedasync.simulation.cluster.hardware import GPUS, MODELS
from fedasync.simulation.cluster.weights import Weights
from fedasync.simulation.laws import Constant, Uniform
from fedasync.studies.errors import StudyError, parse

H800 = GPUS["h800"]


@pytest.mark.parametrize(("name", "least_s"), [("1.5b", 0.07), ("7b", 0.30), ("14b", 0.59), ("32b", 1.31)])
def test_the_least_time_is_that_of_the_weights_over_one_link_of_50_gb_a_second(name: str, least_s: float) -> None:
    assert Weights().seconds(H800, MODELS[name], 1) == pytest.approx(least_s, abs=0.005)
    assert Weights().seconds(H800, MODELS[name], 8) == Weights().seconds(H800, MODELS[name], 1)


def test_pause_transfer_and_load_follow_each_other() -> None:
    model = MODELS["7b"]
    weights = Weights(pause_s=5.0, load_s=2.0, bytes_per_second=model.weight_bytes / 3)
    assert weights.seconds(H800, model, 4) == pytest.approx(10.0)


def test_parts_over_links_of_their_own_travel_together() -> None:
    model = MODELS["14b"]
    whole, parts = Weights(), Weights(sharded=True)
    assert parts.seconds(H800, model, 4) == pytest.approx(whole.seconds(H800, model, 4) / 4)


def test_without_transfer_only_pause_and_load_take_time() -> None:
    weights = Weights(pause_s=1.0, load_s=0.5, transfer=False)
    assert weights.seconds(H800, MODELS["32b"], 1) == 1.5


def test_the_poll_delay_is_a_number_or_a_law_in_toml() -> None:
    where = "study.toml: cluster.weights"
    assert parse(Weights, {"poll_s": 2}, where).poll_s == 2
    law = parse(Weights, {"poll_s": {"kind": "uniform", "low": 0, "high": 5}, "order": "one_by_one"}, where)
    assert law == Weights(poll_s=Uniform(0.0, 5.0), order="one_by_one")
    assert parse(Weights, {"poll_s": {"kind": "constant", "value": 1.5}}, where).poll_s == Constant(1.5)
    with pytest.raises(
        StudyError, match=r"cluster.weights.order: got 'x'|order: got \"x\"; 'all_at_once', 'one_by_one' or 'each'"
    ):
        parse(Weights, {"order": "x"}, where)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"pause_s": -1.0}, "weights: pause_s must be a finite number ≥ 0, got -1.0"),
        ({"poll_s": -1.0}, "weights: poll_s must be a finite number ≥ 0, got -1.0"),
        ({"bytes_per_second": 0.0}, "weights: bytes_per_second must be a finite number > 0, got 0.0"),
        ({"bytes_per_second": 1.0, "transfer": False}, "bytes_per_second says nothing where transfer = false"),
        ({"kv": "drop"}, "weights: kv must be 'recompute' or 'keep', got 'drop'"),
        ({"order": "random"}, "weights: order must be 'all_at_once' or 'one_by_one' or 'each', got 'random'"),
    ],
)
def test_what_cannot_be_is_refused(keys: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Weights(**keys)  # type: ignore[arg-type]
