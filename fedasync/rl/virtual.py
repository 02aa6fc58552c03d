"""A learner whose answers others time: it generates and trains at once, and somebody else says how long that took.

Beside the learner there is an actor, a second policy of the same specification, which generates under any of the
versions that are kept. The same calls give the same bits, and what is drawn for a token depends on (seed, prompt,
epoch, place in the group, position) alone, whatever is generated with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

from fedasync.core.bounds import check_integer
from fedasync.rl.engine import Finished
from fedasync.rl.episodes import Start
from fedasync.rl.trajectory import Group

if TYPE_CHECKING:
    from torch import Tensor

    from fedasync.rl.problem import Problem

MOST_ROWS = 1024
"""Answers that are generated side by side."""
MOST_PROMPTS = 65536
"""Prompts whose lengths are remembered."""


class VirtualLearner:
    """A problem's learner and the versions of it that generate: ``fedasync.simulation.cluster.learning.Learning``.

    ``evaluation_prompts`` are those of ``evaluate``; ``reward_timeout_s``: see ``Guard``. Raises what Learner does.
    """

    def __init__(
        self,
        problem: Problem,
        seed: int,
        answers: int,
        *,
        evaluation_prompts: int = 64,
        reward_timeout_s: float | None = None,
    ) -> None:
        from fedasync.rl.engines import prompt_tokens
        from fedasync.rl.learner import Learner

        check_integer("answers", answers, 1)
        check_integer("evaluation_prompts", evaluation_prompts, 1)
        self.answers = answers
        self.problem = problem
        self.learner = Learner(problem, seed)
        self._seed = seed
        self._evaluation_prompts, self._reward_timeout_s = evaluation_prompts, reward_timeout_s
        self._actor: Any = problem.make_policy(seed)
        self._kept: dict[int, dict[str, Tensor]] = {}
        """Version → weights."""
        self._published = self._loaded = -1
        asked = partial(prompt_tokens, cast(Any, self._actor), cast(Any, problem.environment))
        self._tokens_of = lru_cache(MOST_PROMPTS)(asked)
        self.publish(self.learner.version)

    @property
    def versions(self) -> frozenset[int]:
        """Those whose weights are kept."""
        return frozenset(self._kept)

    def prompt_tokens(self, prompt: int) -> int:
        """Tokens of a prompt; 0 for a control task, and for a prompt whose answers will fail."""
        from fedasync.rl.engines import is_control

        return 0 if is_control(self.problem.environment) else self._tokens_of(prompt)

    def generate(self, version: int, starts: Sequence[Start]) -> list[Finished]:
        """Each answer whole, from its prefix on, under a version that is kept; failures are told, not raised.

        Raises ValueError for a version that is not kept, and for an environment of several turns.
        """
        from fedasync.rl.engines import answers
        from fedasync.rl.policy import load_weights

        if version not in self._kept:
            raise ValueError(f"weights of version {version} are not kept; one of {sorted(self._kept)} would do")
        if version != self._loaded:
            load_weights(self._actor.module, self._kept[version])
            self._loaded = version
        problem, found = self.problem, []
        for first in range(0, len(starts), MOST_ROWS):
            found += answers(
                self._actor,
                starts[first : first + MOST_ROWS],
                version,
                problem.environment,
                problem.sampling,
                self._seed,
                reward_timeout_s=self._reward_timeout_s,
            )
        for each in found:
            if each.trajectory is not None and each.trajectory.turns > 1:
                raise ValueError(
                    f"an answer has {each.trajectory.turns} turns, and nothing says how long its environment takes "
                    "between them: learning under a virtual clock is for environments that reply once (done = True)"
                )
        return found

    def train(self, groups: Sequence[Group]) -> dict[str, float]:
        """Make the next version; the metrics of the step."""
        return self.learner.train(groups)

    def publish(self, version: int) -> None:
        """Keep the present weights, which are those of that version. Raises ValueError where they are not."""
        if version != self.learner.version:
            raise ValueError(f"version {version} is published, and the learner is at version {self.learner.version}")
        self._kept[version] = self.learner.weights()
        self._published = version

    def forget(self, but: Collection[int]) -> None:
        """Keep no weights but those of these versions, and of the one published last."""
        self._kept = {
            version: own for version, own in self._kept.items() if version in but or version == self._published
        }

    def measure(self, names: Collection[str], published: int) -> dict[str, float]:
        """Measures of the present weights against a version that is kept."""
        return self.learner.measure(names, self._kept[published])

    def evaluate(self) -> dict[str, float]:
        """``reward`` and ``exact`` of greedy answers to held-out prompts, under the present weights."""
        from fedasync.rl.evaluation import evaluate

        problem, policy = self.problem, cast(Any, self.learner.policy)
        return evaluate(
            policy,
            problem.environment,
            problem.sampling,
            self._evaluation_prompts,
            reward_timeout_s=self._reward_timeout_s,
        )
