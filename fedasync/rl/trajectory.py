"""What an answer was: its tokens, who chose them under which version and how likely that was, and what it earned.

Arrays are numpy's, so that whoever passes trajectories on needs no torch. ``packed`` and ``unpacked`` are the bytes in
which groups travel between processes and lie in checkpoints: safetensors, never pickle.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedasync.core.bounds import check_choice

Finish = Literal["stop", "length", "context", "done"]
"""Why an answer ended: its end token, ``max_new_tokens``, the model's context was full, the environment said so."""

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One answer of T tokens: the prompt, then what the policy generated and what its environment said in between.

    For control (CartPole) the tokens are the actions, all of them generated, and ``observations`` [T + 1, d] is what
    the policy saw before each, and last what it saw at the end.
    """

    tokens: Ints
    """[T]"""
    generated: Bools
    """[T]: the policy chose this token. Only such tokens are trained."""
    log_probs: Floats
    """[T]: log-probability of a generated token under the policy that chose it, at the sampling's temperature; 0 for
    others, NaN where the engine gave none."""
    versions: NDArray[np.int32]
    """[T]: the version that chose the token; −1 for tokens that were not generated."""
    rewards: Floats
    """[T]: what the environment gave after this token; the sum is the answer's reward."""
    finish: Finish
    turns: int = 1
    observations: Floats | None = None

    def __post_init__(self) -> None:
        check_choice("trajectory: finish", self.finish, Finish)
        kinds = (
            ("tokens", np.int64),
            ("generated", np.bool_),
            ("log_probs", np.float32),
            ("versions", np.int32),
            ("rewards", np.float32),
        )
        for name, dtype in kinds:
            array = getattr(self, name)
            if array.shape != (len(self.tokens),) or array.dtype != dtype:
                raise ValueError(
                    f"trajectory: {name} is {array.dtype}{list(array.shape)}; {np.dtype(dtype)}[{len(self.tokens)}] "
                    "would do"
                )
        if ((self.versions < 0) == self.generated).any() or self.versions.min(initial=-1) < -1:
            raise ValueError("trajectory: versions must be ≥ 0 where the policy chose, and −1 elsewhere")
        if self.observations is not None and (
            self.observations.ndim != 2 or len(self.observations) != len(self.tokens) + 1
        ):
            raise ValueError(f"trajectory: observations must be [{len(self.tokens) + 1}, d]")

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        """The same to the last bit (NaN equals NaN)."""
        return isinstance(other, Trajectory) and packed_trajectories([self]) == packed_trajectories([other])

    __hash__ = None  # type: ignore[assignment]

    @property
    def reward(self) -> float:
        """Of the whole answer; NaN where the environment gave NaN."""
        return float(self.rewards.sum(dtype=np.float64))

    @property
    def generated_tokens(self) -> int:
        return int(np.count_nonzero(self.generated))

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first generated one."""
        first = int(self.generated.argmax()) if len(self.generated) else 0
        return first if first < len(self.generated) and self.generated[first] else len(self.tokens)

    @property
    def first_version(self) -> int | None:
        """The oldest version that chose a token; None where none was generated."""
        return int(self.versions[self.generated].min()) if self.generated.any() else None

    @property
    def last_version(self) -> int | None:
        return int(self.versions[self.generated].max()) if self.generated.any() else None

    @property
    def segments(self) -> int:
        """Stretches of generated tokens of one version."""
        chosen = self.versions[self.generated]
        return 1 + int(np.count_nonzero(np.diff(chosen))) if len(chosen) else 0


@dataclass(frozen=True, slots=True)
class Group:
    """A lease's answers to one prompt."""

    lease: int
    prompt: int
    base_version: int
    trajectories: tuple[Trajectory, ...]
    asked: int
    """Answers that were asked for; fewer came where a group may be short."""

    @property
    def rewards(self) -> NDArray[np.float64]:
        return np.array([each.reward for each in self.trajectories])


_COLUMNS = ("tokens", "generated", "log_probs", "versions", "rewards")


def packed(groups: Iterable[Group]) -> bytes:
    """Groups as bytes (safetensors); the same groups give the same bytes."""
    groups = list(groups)
    told = [[g.lease, g.prompt, g.base_version, len(g.trajectories), g.asked] for g in groups]
    return packed_trajectories([each for g in groups for each in g.trajectories], {"groups": told})


def unpacked(content: bytes) -> list[Group]:
    """The groups that ``packed`` wrote. Raises ValueError for other bytes."""
    trajectories, told = unpacked_trajectories(content)
    groups, at = [], 0
    for lease, prompt, base, count, asked in told["groups"]:
        groups.append(Group(lease, prompt, base, tuple(trajectories[at : at + count]), asked))
        at += count
    return groups


def packed_trajectories(trajectories: Sequence[Trajectory], told: dict[str, Any] | None = None) -> bytes:
    """Trajectories end to end as bytes, with ``told`` (what JSON keeps) beside them."""
    from safetensors.numpy import save

    seen = [each.observations for each in trajectories if each.observations is not None]
    wide = max((each.shape[1] for each in seen), default=0)
    arrays: dict[str, NDArray[Any]] = {
        name: np.concatenate([getattr(each, name) for each in trajectories] or [np.zeros(0, np.int64)])
        for name in _COLUMNS
    }
    arrays["observations"] = np.concatenate(seen) if seen else np.zeros((0, wide), np.float32)
    finishes = get_args(Finish)
    about = [
        [len(each), finishes.index(each.finish), each.turns, int(each.observations is not None)]
        for each in trajectories
    ]
    arrays["about"] = np.array(about, np.int64).reshape(-1, 4)
    return bytes(save(arrays, {"told": json.dumps(told or {}, sort_keys=True)}))


def unpacked_trajectories(content: bytes) -> tuple[list[Trajectory], dict[str, Any]]:
    """What ``packed_trajectories`` wrote: the trajectories, and what was told with them. Raises ValueError."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        told = json.loads(header["__metadata__"]["told"])
        about = arrays["about"]
        columns = [arrays[name] for name in _COLUMNS]
        observations = arrays["observations"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"these bytes hold no trajectories: {error}") from None
    found, at, seen_at = [], 0, 0
    for length, finish, turns, sees in about.tolist():
        parts = {name: column[at : at + length] for name, column in zip(_COLUMNS, columns, strict=True)}
        at += length
        seen = observations[seen_at : seen_at + length + 1] if sees else None
        seen_at += (length + 1) * sees
        found.append(Trajectory(**parts, finish=get_args(Finish)[finish], turns=turns, observations=seen))
    return found, told
