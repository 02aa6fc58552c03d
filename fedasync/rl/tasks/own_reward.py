"""The user's own prompts with the user's own reward, a function by its dotted path."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedasync.core.bounds import check_real, check_type
from fedasync.rl.environment import Message, Reply
from fedasync.rl.tasks.jsonl import rows as read
from fedasync.rl.tasks.prompts import check_counts, check_prompt
from fedasync.streams import Stream


@dataclass(frozen=True)
class OwnReward:
    """``kind = "function"``: prompts from a JSONL file, or a list, and ``reward(row, answer) -> float``.

    Each row has ``prompt``, a text or a list of messages, and whatever else the reward wants to see; a list may hold
    bare texts. ``reward`` is a dotted path such as ``my_module.my_reward``, or the function itself; it is called with
    a row of its own and the answer's text. A share ``held_out`` of the rows, chosen by ``seed``, is never trained on.
    """

    rows: str | Sequence[str | Mapping[str, Any]]
    reward: str | Callable[[dict[str, Any], str], float]
    held_out_share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        check_type("task: rows", self.rows, str | Sequence, "the path of a JSONL file, or a list of prompts")
        check_real("task: held_out_share", self.held_out_share, 0, 1, below=True)
        check_counts(None, 0, self.seed)
        if self.held_out_share and self.held_out in (0, len(self._all)):
            raise ValueError(
                f"task: a share {self.held_out_share:g} of {len(self._all)} rows is {self.held_out}; 0 (none is held "
                "out), or a share that leaves some on both sides, would do"
            )
        self._function  # noqa: B018 - a wrong path is to be told now

    @property
    def prompts(self) -> int:
        return len(self._all) - self.held_out

    @property
    def held_out(self) -> int:
        return round(len(self._all) * self.held_out_share)

    def start(self, prompt: int, *, held_out: bool = False) -> OwnEpisode:
        """The episode of a prompt. Raises ValueError for a prompt that there is not."""
        check_prompt("function", prompt, self.prompts, self.held_out, of_held_out=held_out)
        return OwnEpisode(self._all[self._order[prompt if held_out else self.held_out + prompt]], self._function)

    @cached_property
    def _all(self) -> list[dict[str, Any]]:
        if isinstance(self.rows, str):
            placed = read(self.rows, ("prompt",))
        else:
            rows = ({"prompt": row} if isinstance(row, str) else dict(row) for row in self.rows)
            placed = [(f"task: rows: row {number}", row) for number, row in enumerate(rows, 1)]
        for where, row in placed:
            _check_row(row, where)
        found = [row for _, row in placed]
        if not found:
            raise ValueError("task: rows has none")
        return found

    @cached_property
    def _order(self) -> list[int]:
        """The rows in an order of their own, those held out first."""
        stream = Stream(self.seed, "own reward")
        return sorted(range(len(self._all)), key=stream.bits) if self.held_out else list(range(len(self._all)))

    @cached_property
    def _function(self) -> Callable[[dict[str, Any], str], Any]:
        return resolved(self.reward) if isinstance(self.reward, str) else self.reward


@dataclass(frozen=True)
class OwnEpisode:
    """One prompt to one answer."""

    row: dict[str, Any]
    function: Callable[[dict[str, Any], str], Any]

    @property
    def prompt(self) -> str | Sequence[Message]:
        prompt: str | Sequence[Message] = self.row["prompt"]
        return prompt

    def step(self, text: str) -> Reply:
        """Raises TypeError where the reward gives no number; what it raises itself passes through."""
        reward = self.function(deepcopy(self.row), text)
        try:
            return Reply(float(reward))
        except (TypeError, ValueError):
            name = getattr(self.function, "__name__", "reward")
            raise TypeError(f"{name} gave {reward!r} for a reward; a number would do") from None


def _check_row(row: Mapping[str, Any], where: str) -> None:
    prompt = row.get("prompt")
    if isinstance(prompt, str) and prompt:
        return
    if not (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(each, dict) and {"role", "content"} <= set(each) for each in prompt)
    ):
        raise ValueError(
            f"{where}: prompt must be a text, or a list of messages with role and content, got {str(prompt)[:80]!r}"
        )


def resolved(path: str) -> Callable[..., Any]:
    """A function by its dotted path. Raises ValueError where there is none."""
    module_name, _, name = path.rpartition(".")
    if not module_name or not name:
        raise ValueError(f"task: reward must be a dotted path such as my_module.my_reward, got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"task: reward {path!r}: {error}; a module in the working directory would do") from error
    found: Any = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"task: reward {path!r}: module {module_name} has no function {name}")
    function: Callable[..., Any] = found
    return function
