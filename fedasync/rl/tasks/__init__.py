"""What is learnt: tasks by the ``kind`` of the ``[task]`` table. One file each."""

from __future__ import annotations

from collections.abc import Callable

from fedasync.rl.environment import ControlEnvironment, Environment
from fedasync.rl.tasks.gsm8k import Gsm8k
from fedasync.rl.tasks.guess import Guess
from fedasync.rl.tasks.gymnasium_task import CartPole, Gymnasium
from fedasync.rl.tasks.own_reward import OwnReward
from fedasync.rl.tasks.reasoning_gym_task import ReasoningGym
from fedasync.rl.tasks.reverse import Reverse

TASKS: dict[str, Callable[..., Environment | ControlEnvironment]] = {
    "reverse": Reverse,
    "guess": Guess,
    "reasoning_gym": ReasoningGym,
    "gsm8k": Gsm8k,
    "function": OwnReward,
    "cartpole": CartPole,
    "gymnasium": Gymnasium,
}
"""Whoever writes a task of their own names it by its dotted path instead."""
