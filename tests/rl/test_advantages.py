"""Advantages of groups and of steps against closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedasync.rl.advantages import advantages, gae, group_advantages, normalised
from fedasync.rl.objective import Estimator, Objective

from .loss_cases import group, trajectory

GROUPED: list[Estimator] = ["grpo", "dr_grpo", "rloo", "opo"]


def near(values: object) -> Any:
    return pytest.approx(values, abs=1e-6)


def of(rewards: list[float], estimator: Estimator, **more: Any) -> list[float]:
    return group_advantages(np.array(rewards), estimator, **more).tolist()


# -- groups --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "estimator", "std", "right", "wrong"),
    [
        ([1, 0, 0, 1], "grpo", "population", 0.999998, -0.999998),
        ([1, 0, 0, 1], "grpo", "sample", 0.8660239, -0.8660239),
        ([1, 0, 0, 1], "dr_grpo", "sample", 0.5, -0.5),
        ([1, 0, 0, 0], "grpo", "population", 1.7320468, -0.5773489),
        ([1, 0, 0, 0], "grpo", "sample", 1.499997, -0.499999),
        ([1, 0, 0, 0], "dr_grpo", "sample", 0.75, -0.25),
        ([1, 0, 0, 0], "rloo", "sample", 1.0, -1 / 3),
        ([1, 0, 0], "grpo", "population", 1.4142106, -0.7071053),
        ([1, 0, 0], "dr_grpo", "sample", 2 / 3, -1 / 3),
        ([1, 0, 0], "rloo", "sample", 1.0, -0.5),
    ],
)
def test_advantages_of_a_group(
    rewards: list[float], estimator: Estimator, std: Any, right: float, wrong: float
) -> None:
    assert of(rewards, estimator, std=std) == near([right if each else wrong for each in rewards])


def test_opo_weighs_its_baseline_by_length() -> None:
    assert of([1, 0], "opo", tokens=np.array([10.0, 30.0])) == near([0.75, -0.25])
    found = advantages([group(trajectory(10, 1.0), trajectory(30, 0.0))], Objective(advantages="opo"))
    assert [set(each[2:]) for each in found.values[0]] == [{0.75}, {-0.25}]
    with pytest.raises(ValueError, match="needs the tokens"):
        of([1, 0], "opo")


def test_areal_rewards_of_five_either_way() -> None:
    """Rewards 1, 0, 0, 1 with a bias of −0.5 and a scale of 10."""
    assert of([5, -5, -5, 5], "grpo", epsilon=1e-5) == near([0.866024, -0.866024, -0.866024, 0.866024])
    assert of([5, -5, -5, 5], "rloo") == near([20 / 3, -20 / 3, -20 / 3, 20 / 3])


@given(
    st.lists(st.integers(-80, 80).map(lambda each: each / 8), min_size=2, max_size=8),
    st.sampled_from(GROUPED),
    st.floats(0.1, 10),
    st.floats(-5, 5),
)
@settings(max_examples=80)
def test_a_shift_of_all_rewards_changes_nothing(
    rewards: list[float], estimator: Estimator, scale: float, shift: float
) -> None:
    """And they add up to nothing (opo: weighed by length), and a scale is taken out only by the spread."""
    tokens = np.arange(1.0, len(rewards) + 1)
    plain = np.array(of(rewards, estimator, tokens=tokens, epsilon=0.0))
    shifted = np.array(of([scale * each + shift for each in rewards], estimator, tokens=tokens, epsilon=0.0))
    assert float(plain @ (tokens if estimator == "opo" else np.ones_like(tokens))) == pytest.approx(0, abs=1e-6)
    assert shifted == pytest.approx(plain * (1 if estimator == "grpo" else scale), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("estimator", GROUPED)
@given(reward=st.floats(-1e6, 1e6), answers=st.integers(1, 9))
@settings(max_examples=20)
def test_equal_rewards_give_exactly_nothing(estimator: Estimator, reward: float, answers: int) -> None:
    """0.1 three times has a mean that is not 0.1."""
    tokens = np.arange(1.0, answers + 1)
    assert of([reward] * answers, estimator, tokens=tokens, epsilon=0.0) == [0.0] * answers


@pytest.mark.parametrize("normalise", ["none", "batch"])
@pytest.mark.parametrize("estimator", GROUPED)
def test_a_group_of_one_and_groups_of_equals_give_nothing_and_are_counted(estimator: Estimator, normalise: Any) -> None:
    groups = [group(trajectory(3, 0.7), asked=4), group(trajectory(2, 0.1), trajectory(3, 0.1), trajectory(1, 0.1))]
    found = advantages(groups, Objective(advantages=estimator, normalise=normalise))
    assert all((each == 0).all() for some in found.values for each in some)
    assert found.returns is None
    assert found.stats["groups"] == 2
    assert found.stats["groups_of_one"] == found.stats["groups_equal"] == found.stats["groups_short"] == 1
    assert found.stats["answers_missing"] == 3


@pytest.mark.parametrize(
    ("estimator", "survivors", "full"),
    [
        ("grpo", [1.154699, -0.577349], [1.499997, -0.499999]),
        ("dr_grpo", [2 / 3, -1 / 3], [0.75, -0.25]),
        ("rloo", [1, -1 / 2], [1, -1 / 3]),
        ("opo", [0.5, -0.5], [0.75, -0.25]),
        ("reward", [1, 0], [1, 0]),
    ],
)
def test_a_short_group_is_compared_with_those_that_came(
    estimator: Estimator, survivors: list[float], full: list[float]
) -> None:
    """Four were asked for, and one that earned 0 (and was long) never came: it is not an answer of reward 0."""
    came = [trajectory(4, 1.0), trajectory(2), trajectory(2)]
    objective = Objective(advantages=estimator)
    found = advantages([group(*came, asked=4)], objective)
    assert [found.values[0][at][-1] for at in (0, 1)] == near(survivors)
    assert found.stats["answers_missing"] == 1
    whole = advantages([group(*came, trajectory(8))], objective)
    assert [whole.values[0][at][-1] for at in (0, 1)] == near(full)
    assert whole.stats["answers_missing"] == 0


def test_only_generated_tokens_have_an_advantage() -> None:
    answer = trajectory(0, generated=[False, True, False, True], rewards=[0, 0, 0, 1])
    found = advantages([group(answer, trajectory(2))], Objective(advantages="dr_grpo")).values[0]
    assert found[0].tolist() == [0, 0.5, 0, 0.5]
    assert found[1].tolist() == [0, 0, -0.5, -0.5]
    assert {each.dtype for each in found} == {np.dtype(np.float64)}


@pytest.mark.parametrize("reward", [np.nan, np.inf])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match=r"lease 0, answer 1: the reward is (nan|inf)"):
        advantages([group(trajectory(1), trajectory(1, reward))], Objective())


# -- normalised over a batch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("std", "right", "wrong"), [("population", 1.224742, -0.816495), ("sample", 1.095443, -0.730295)]
)
def test_normalised_over_the_tokens_of_the_batch(std: Any, right: float, wrong: float) -> None:
    """Two answers of 2 and 3 tokens, rewards ±5: mean −1, variance 24 or 30."""
    objective = Objective(advantages="reward", normalise="batch", std=std, std_epsilon=1e-5)
    groups = [group(trajectory(2, 5.0)), group(trajectory(3, -5.0))]
    found = advantages(groups, objective)
    assert found.values[0][0].tolist() == near([0, 0, right, right])
    assert found.values[1][0].tolist() == near([0, 0, wrong, wrong, wrong])
    assert found.stats["advantage_mean"] == near(0)
    as_gae = Objective(advantages="gae", normalise="batch", std=std, std_epsilon=1e-5)
    again = advantages(groups, as_gae).values
    assert [each.tolist() for some in again for each in some] == [e.tolist() for some in found.values for e in some]


def test_a_batch_of_one_token_or_of_equals_is_normalised_to_nothing() -> None:
    assert normalised(np.array([3.0])).tolist() == [0]
    assert normalised(np.array([0.1] * 3)).tolist() == [0, 0, 0]
    assert normalised(np.zeros(0)).tolist() == []
    assert advantages([], Objective(normalise="batch")).values == []


# -- generalised advantage estimates ----------------------------------------------------------------------------------


def by_definition(rewards: NDArray[Any], values: NDArray[Any], gamma: float, lambda_: float) -> list[float]:
    deltas = rewards + gamma * values[1:] - values[:-1]
    steps = len(deltas)
    return [sum((gamma * lambda_) ** (k - t) * deltas[k] for k in range(t, steps)) for t in range(steps)]


@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=12),
    st.floats(-2, 2),
    st.floats(0, 1),
    st.floats(0, 1),
    st.booleans(),
)
@settings(max_examples=80)
def test_gae_is_the_sum_of_its_definition(
    steps: list[tuple[float, float]], end: float, gamma: float, lambda_: float, truncated: bool
) -> None:
    rewards, values = np.array(steps).T
    found = gae(rewards, np.append(values, end), gamma, lambda_, truncated=truncated)
    expected = by_definition(rewards, np.append(values, end if truncated else 0.0), gamma, lambda_)
    assert found == pytest.approx(expected, abs=1e-9)


def test_gae_with_lambda_0_looks_one_step_ahead_and_with_1_to_the_end() -> None:
    rewards, values = np.array([1.0, 2.0, 4.0]), np.array([0.5, 0.25, 1.0, 8.0])
    assert gae(rewards, values, 0.5, 0.0).tolist() == [1 + 0.125 - 0.5, 2 + 0.5 - 0.25, 4 - 1.0]
    assert gae(rewards, values, 0.5, 1.0).tolist() == [1 + 1 + 1 - 0.5, 2 + 2 - 0.25, 4 - 1.0]
    assert gae(rewards, values, 0.5, 1.0, truncated=True)[-1] == 4 + 4 - 1.0
    with pytest.raises(ValueError, match="needs 4 values, got 3"):
        gae(rewards, values[:3])


@pytest.mark.parametrize(("finish", "end"), [("stop", 0.0), ("done", 0.0), ("length", 3.0), ("context", 3.0)])
def test_what_was_cut_short_is_worth_what_the_critic_says_of_its_end(finish: Any, end: float) -> None:
    episode = trajectory(2, prompt_tokens=0, rewards=[1.0, 1.0], finish=finish)
    objective = Objective(advantages="gae", gamma=0.5, gae_lambda=1.0)
    found = advantages([group(episode)], objective, [[np.array([0.5, 0.25, 3.0])]])
    assert found.returns is not None
    assert found.returns[0][0].tolist() == near([1.5 + 0.25 * end, 1 + 0.5 * end])
    assert found.values[0][0].tolist() == near([1 + 0.25 * end, 0.75 + 0.5 * end])


def test_steps_are_generated_tokens_and_rewards_in_between_are_of_the_token_before() -> None:
    answer = trajectory(0, generated=[False, True, False, True], rewards=[0.0, 1.0, 2.0, 4.0])
    objective = Objective(advantages="gae", gamma=0.5)
    found = advantages([group(answer)], objective, [[np.zeros(5)]])
    assert found.values[0][0].tolist() == [0, 3 + 0.5 * 4, 0, 4]
    assert found.returns is not None
    assert found.returns[0][0].tolist() == found.values[0][0].tolist()
    with pytest.raises(ValueError, match=r"values of 4 tokens are \[4\]; \[5\] would do"):
        advantages([group(answer)], objective, [[np.zeros(4)]])


def test_without_discount_or_critic_every_token_has_the_answers_reward() -> None:
    found = advantages([group(trajectory(3, 2.5))], Objective(advantages="gae"))
    assert found.values[0][0].tolist() == [0, 0, 2.5, 2.5, 2.5]
    assert found.returns is None
