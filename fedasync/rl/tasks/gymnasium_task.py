"""Control tasks of Gymnasium with discrete actions, CartPole first of all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedasync.core.bounds import check_integer, check_type
from fedasync.rl.tasks.prompts import check_counts, check_prompt
from fedasync.streams import Stream


@dataclass
class Gymnasium:
    """``kind = "gymnasium"``: an environment by its ``id``; the number of an episode fixes what is random in it.

    The environment must have Discrete actions and a Box of observations, which is laid flat. ``steps`` cuts an episode
    after so many; by default the environment's own limit does (500 for CartPole-v1).
    """

    id: str = "CartPole-v1"
    steps: int | None = None
    prompts: int | None = None
    held_out: int = 16
    seed: int = 0
    observation_size: int = field(init=False)
    actions: int = field(init=False)

    def __post_init__(self) -> None:
        check_type("task: id", self.id, str, "the id of a Gymnasium environment")
        if self.steps is not None:
            check_integer("task: steps", self.steps, 1)
        check_counts(self.prompts, self.held_out, self.seed)
        environment = _environment(self.id, self.steps)
        from gymnasium.spaces import Box, Discrete

        actions, observations = environment.action_space, environment.observation_space
        environment.close()
        if not isinstance(actions, Discrete) or not isinstance(observations, Box):
            raise ValueError(
                f"task: {self.id} has actions {actions} and observations {observations}; "
                "Discrete actions and a Box of observations would do"
            )
        self.actions = int(actions.n)
        self.observation_size = int(np.prod(observations.shape))

    def start(self, prompt: int, *, held_out: bool = False) -> GymnasiumEpisode:
        """The episode of a number. Raises ValueError for one that there is not."""
        check_prompt(self.id, prompt, self.prompts, self.held_out, of_held_out=held_out)
        stream = Stream(self.seed, "gymnasium held out" if held_out else "gymnasium")
        return GymnasiumEpisode(_environment(self.id, self.steps), stream.seed(prompt) >> 32)


class CartPole(Gymnasium):
    """``kind = "cartpole"``: CartPole-v1, +1 for each step that the pole stands, 500 at most."""


class GymnasiumEpisode:
    """One episode of an environment of its own."""

    def __init__(self, environment: Any, seed: int) -> None:
        self._environment, self._seed = environment, seed
        self._first_action = int(environment.action_space.start)

    def reset(self) -> NDArray[np.float32]:
        observation, _ = self._environment.reset(seed=self._seed)
        return _flat(observation)

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool]:
        observation, reward, terminated, truncated, _ = self._environment.step(self._first_action + action)
        return _flat(observation), float(reward), bool(terminated), bool(truncated)


def _flat(observation: Any) -> NDArray[np.float32]:
    return np.array(observation, np.float32).reshape(-1)


def _environment(name: str, steps: int | None) -> Any:
    """Raises ImportError where Gymnasium is missing, ValueError for a name that it does not have."""
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError(f"task: {name} needs gymnasium ({error}): pip install 'fedasync[tasks]'") from error
    try:
        return gymnasium.make(name, max_episode_steps=steps, disable_env_checker=True)
    except gymnasium.error.Error as error:
        line = str(error).strip().partition("\n")[0]
        raise ValueError(f"task: gymnasium has no {name!r} here: {line}") from None
