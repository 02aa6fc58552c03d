"""What a minibatch's loss is divided by, and that cutting it into micro-batches changes nothing."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.rl.denominators import token_weights
from fedasync.rl.diagnostics import combined
from fedasync.rl.objective import Objective
from fedasync.rl.terms import Terms

from .loss_cases import logs, tensor, terms


def total(objective: Objective, of: Terms) -> float:
    how = objective.aggregation
    weights = token_weights(of.mask, how, objective.constant_tokens, dtype=torch.float64)
    return float((weights * objective.token_losses(of).losses.detach()).sum())


def test_three_ways_to_divide() -> None:
    """On-policy, answers of 2 and 4 tokens with advantages 1 and −1."""
    pi = [[-1.0] * 2, [-1.0] * 4]
    of = terms(pi, pi, [[1] * 2, [-1] * 4], pi)
    assert total(Objective(aggregate="sequence"), of) == pytest.approx(0)
    assert total(Objective(aggregate="token"), of) == pytest.approx(1 / 3)
    assert total(Objective(aggregate="constant", constant_tokens=4), of) == pytest.approx(0.25)


def test_a_mean_of_micro_batches_means_is_not_the_batchs_mean() -> None:
    """Micro-batches of 2 and 6 tokens with loss sums 1 and 9: 10/8, not (1/2 + 9/6) / 2."""
    losses = torch.tensor([[0.5, 0.5, 0, 0, 0, 0], [1.5] * 6])
    counted = torch.tensor([[True] * 2 + [False] * 4, [True] * 6])
    weights = token_weights(counted, "token")
    assert sum(float((weights[row] * losses[row]).sum()) for row in (0, 1)) == 1.25
    alone = [float((token_weights(counted[[row]], "token") * losses[[row]]).sum()) for row in (0, 1)]
    assert sum(alone) / 2 == 1.0


def test_rows_without_a_token_are_no_sequences() -> None:
    counted = torch.tensor([[True, True], [False, False], [True, False]])
    assert token_weights(counted, "sequence").tolist() == [[0.25, 0.25], [0, 0], [0.5, 0]]
    assert token_weights(counted, "constant", 5).tolist() == pytest.approx(torch.tensor([[0.1] * 2, [0, 0], [0.1, 0]]))
    for how in ("token", "sequence"):
        assert not token_weights(torch.zeros(2, 3, dtype=torch.bool), how).any()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.sampled_from(["token", "sequence"]))
def test_weights_add_up_to_1(lengths: list[int], how: Any) -> None:
    counted = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    weights = token_weights(counted, how, dtype=torch.float64)
    assert float(weights.sum()) == pytest.approx(1)
    assert not weights[~counted].any()
    if how == "sequence":
        assert weights.sum(1).tolist() == pytest.approx([1 / len(lengths)] * len(lengths))


def test_an_unknown_way_is_refused() -> None:
    counted = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="how must be 'token' or 'sequence' or 'constant', got 'mean'"):
        token_weights(counted, "mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="constant_tokens must be an integer ≥ 1, got None"):
        token_weights(counted, "constant")


MANY = [
    Objective("ppo"),
    Objective("coupled", aggregate="sequence"),
    Objective("decoupled", weight_cap=2.0, aggregate="constant", constant_tokens=7),
    Objective("decoupled", proximal="loglinear"),
    Objective("tis_sequence"),
    Objective("icepop"),
    Objective("sequence_mask", mask_low=0.5, mask_high=2.0),
    Objective("cispo"),
    Objective("gspo", clip_low=0.2, clip_high=0.2),
    Objective("topr"),
    Objective("m2po"),
    Objective("reinforce"),
    Objective("dppo"),
    Objective("ppo", opsm_delta=0.1, max_token_staleness=1, entropy_bonus=0.1, missing="mask"),
]

row = st.lists(st.tuples(*[st.floats(0.05, 0.95)] * 3, st.floats(-2, 2), st.booleans()), min_size=1, max_size=5)


@given(
    st.lists(row, min_size=1, max_size=6),
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
    st.sampled_from(MANY),
)
@settings(max_examples=120)
def test_accumulated_micro_batches_are_the_whole_batch(
    rows: list[list[tuple[float, float, float, float, bool]]], places: list[int], objective: Objective
) -> None:
    """However the rows are cut: losses, gradients and what is told of the ratios."""
    pi, mu, proximal = (logs(*[[token[at] for token in each] for each in rows]) for at in range(3))
    mu = [
        [nan if t[4] and t[3] > 1 else m for m, t in zip(some, each, strict=True)]
        for some, each in zip(mu, rows, strict=True)
    ]
    versions = torch.tensor([[(i + at) % 4 for at in range(max(map(len, rows)))] for i in range(len(rows))])
    of = terms(pi, mu, [[t[3] for t in each] for each in rows], proximal, token_versions=versions, version=3)
    of = of._replace(entropy=of.log_probs.square())
    assert of.proximal is not None
    weights = token_weights(of.mask, objective.aggregation, objective.constant_tokens, dtype=torch.float64)
    of = of._replace(selected=objective.selected(of.behaviour, of.proximal, of.mask))

    def sums(indices: list[list[int]]) -> tuple[float, list[float], dict[str, float]]:
        of.log_probs.grad = None
        loss, stats = 0.0, []
        for some in indices:
            part = of._replace(
                **{name: value[some] for name, value in of._asdict().items() if isinstance(value, torch.Tensor)}
            )
            found = objective.token_losses(part)
            one = (weights[some] * found.losses).sum()
            one.backward(retain_graph=True)
            loss += one.item()
            stats.append(found.stats)
        assert of.log_probs.grad is not None
        return loss, of.log_probs.grad[of.mask].tolist(), combined(stats)

    cut = [[at for at in range(len(rows)) if places[at] == part] for part in range(3)]
    whole = sums([list(range(len(rows)))])
    parts = sums([each for each in cut if each])
    assert parts[0] == pytest.approx(whole[0], abs=1e-10)
    assert parts[1] == pytest.approx(whole[1], abs=1e-10)
    assert parts[2] == pytest.approx(whole[2], rel=1e-6, abs=1e-9)


def test_what_m2po_keeps_is_told_of_the_whole_minibatch() -> None:
    pi = [[-1.0, -1.0], [-1.0, -1.0]]
    of = terms(pi, [[-1.1, -1.1], [-1.25, -1.25]], [[1, 1], [1, 1]], pi)
    objective = Objective("m2po", m2_bound=0.04)
    assert of.proximal is not None
    kept = objective.selected(of.behaviour, of.proximal, of.mask)
    assert kept is not None
    assert kept.all(), "the mean of 0.1² and 0.25² is 0.03625"
    alone = objective.selected(of.behaviour[1:], of.proximal[1:], of.mask[1:])
    assert alone is not None
    assert not alone.any()
    assert Objective().selected(of.behaviour, of.proximal, of.mask) is None
    assert tensor(pi).equal(of.log_probs.detach())
