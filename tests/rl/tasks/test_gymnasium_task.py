from __future__ import annotations

import numpy as np
import pytest

from fedasync.rl.environment import ControlEpisode
from fedasync.rl.tasks.gymnasium_task import CartPole, Gymnasium

pytest.importorskip("gymnasium")


def played(episode: ControlEpisode, actions: list[int]) -> list[object]:
    told: list[object] = [episode.reset().tolist()]
    for action in actions:
        observation, reward, terminated, truncated = episode.step(action)
        told.append((observation.tolist(), reward, terminated, truncated))
        if terminated or truncated:
            break
    return told


def test_the_number_fixes_the_episode() -> None:
    task, again = CartPole(), CartPole()
    actions = [0, 1] * 20
    assert played(task.start(3), actions) == played(again.start(3), actions)
    starts = {tuple(each.reset()) for n in range(20) for each in (task.start(n), task.start(n % 16, held_out=True))}
    assert len(starts) == 20 + 16
    assert played(CartPole(seed=1).start(3), actions) != played(task.start(3), actions)


def test_cart_pole_falls_without_care_and_each_step_before_earns_1() -> None:
    told = played(CartPole().start(0), [1] * 500)
    assert [each[1:] for each in told[1:-1]] == [(1.0, False, False)] * (len(told) - 2)  # type: ignore[index]
    assert told[-1][1:] == (1.0, True, False)  # type: ignore[index]
    assert len(told) < 20


@pytest.mark.parametrize(("keys", "limit"), [({"steps": 7}, 7), ({"id": "MountainCar-v0"}, 200)])
def test_an_episode_is_cut_at_its_limit(keys: dict[str, object], limit: int) -> None:
    told = played(Gymnasium(**keys).start(0), [0, 1] * 500)  # type: ignore[arg-type]
    assert len(told) - 1 == limit
    assert told[-1][2:] == (False, True)  # type: ignore[index]


def test_sizes_are_the_environments_and_observations_float32() -> None:
    task = Gymnasium("Acrobot-v1")
    assert (task.observation_size, task.actions) == (6, 3)
    seen = task.start(0).reset()
    assert (seen.dtype, seen.shape) == (np.float32, (6,))


def test_what_a_policy_of_discrete_actions_cannot_play_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Pendulum-v1 has actions Box.*Discrete actions and a Box"):
        Gymnasium("Pendulum-v1")
    with pytest.raises(ValueError, match=r"no 'CartPol-v1' here.*Did you mean: `CartPole`"):
        Gymnasium("CartPol-v1")
