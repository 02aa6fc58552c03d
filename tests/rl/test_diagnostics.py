"""Estimators on worked numbers, and stats that come together."""

from __future__ import annotations

from math import isnan, log
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedasync.rl.diagnostics import combined, divergences, effective_share, ratio_stats, staleness

from .loss_cases import logs, tensor


def near(values: Any) -> Any:
    return pytest.approx(values, abs=1e-6)


def stats(ratios: list[float]) -> dict[str, float]:
    drift = tensor(logs(ratios))
    every = torch.ones_like(drift, dtype=torch.bool)
    return ratio_stats(drift, every, every)


def test_estimators_of_the_divergence() -> None:
    k1, k2, k3 = divergences(tensor(logs([2, 0.5])))
    assert k1[0].tolist() == near([-0.693147, 0.693147])
    assert k2[0].tolist() == near([0.240227, 0.240227])
    assert k3[0].tolist() == near([0.306853, 0.193147])


def test_effective_share_of_weights() -> None:
    assert float(effective_share(torch.tensor([1.0, 1, 1, 5]))) == near(64 / 28 / 4)
    assert float(effective_share(torch.full((9,), 0.3))) == near(1)
    assert stats([1, 1, 1, 5])["ess"] == near(0.571429)


def test_raw_ratios() -> None:
    told = stats([0.4, 1.5, 6])
    assert (told["ratio_min"], told["ratio_mean"], told["ratio_max"]) == near((0.4, 7.9 / 3, 6))
    assert (told["tokens"], told["missing_tokens"]) == (3, 0)
    drift = tensor([[0.05, -0.1, 0.6, 0.2, -0.02]])
    every = torch.ones_like(drift, dtype=torch.bool)
    assert ratio_stats(drift, every, every)["m2"] == near(0.08258)
    assert ratio_stats(drift, ~every, every) == {"tokens": 5, "missing_tokens": 5}


def test_the_ratio_of_a_truncated_distribution_is_the_mass_that_is_kept() -> None:
    """(0.5, 0.3, 0.2), of which the two likeliest are drawn from."""
    engine = log(0.5 / 0.8)
    assert engine == near(-0.470004)
    drift = tensor([[log(0.5) - engine, log(0.3) - log(0.3 / 0.8)]])
    every = torch.ones_like(drift, dtype=torch.bool)
    told = ratio_stats(drift, every, every)
    assert (told["ratio_min"], told["ratio_mean"], told["ratio_max"]) == near((0.8, 0.8, 0.8))


def test_staleness_of_an_answer_that_spans_versions() -> None:
    """Tokens of versions 3 and 4, trained at 5; and nothing at all."""
    versions = torch.tensor([[3, 4, -1], [-1, -1, -1]])
    found = staleness(versions, versions >= 0, 5)
    assert [float(each[0]) for each in found] == [2, 1, 1.5, 2]
    assert all(isnan(float(each[1])) for each in found)


@given(st.lists(st.lists(st.floats(0.01, 50), min_size=1, max_size=5), min_size=1, max_size=4))
def test_stats_of_parts_make_those_of_the_whole(parts: list[list[float]]) -> None:
    whole = stats([each for part in parts for each in part])
    assert combined([stats(part) for part in parts]) == pytest.approx(whole, rel=1e-9)


def test_parts_of_which_nothing_is_known_count_only_as_missing() -> None:
    unknown = {"tokens": 4, "missing_tokens": 4, "rejected_share": 0.5}
    known = stats([2.0, 2.0]) | {"rejected_share": 0.0, "token_staleness_max": 3.0}
    together = combined([unknown, known])
    assert (together["tokens"], together["missing_tokens"]) == (6, 4)
    assert together["ratio_mean"] == near(2)
    assert together["rejected_share"] == near(2 / 6)
    assert together["token_staleness_max"] == 3
    assert combined([]) == {}
