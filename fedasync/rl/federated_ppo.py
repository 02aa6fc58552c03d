"""Federated reinforcement learning as a workload: each client answers prompts of its own and learns from that.

Rollouts and updates are stale at once: a client generates with the version that it was given, and what it has learnt
arrives when the server has gone on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from fedasync.aggregation.model import Contribution, Layout, Model
from fedasync.core.bounds import check_client, check_integer
from fedasync.rl.engine import Request
from fedasync.rl.episodes import Start
from fedasync.rl.prompt_order import PromptOrder
from fedasync.rl.trajectory import Group
from fedasync.workloads.protocol import Task

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

    from fedasync.rl.divergence import HeldOut
    from fedasync.rl.environment import ControlEnvironment, Environment
    from fedasync.rl.learner import Learner
    from fedasync.rl.optimiser import Optimiser
    from fedasync.rl.policy import Policy
    from fedasync.rl.problem import Problem

MOST_ROWS = 1024
"""Answers that are generated side by side."""
COMPARED = frozenset({"kl", "disagreement", "feature_cosine"})


class FederatedPpo:
    """A ``ComparingWorkload``: PPO, or another objective, on prompts of each client's own. It has ``accelerate``.

    A task makes ``local_steps`` versions of a learner that starts from the task's model with a fresh optimiser;
    ``task.steps`` are such versions too, each of ``minibatches`` × ``epochs`` optimiser steps. A version trains on
    ``batch`` groups of ``answers`` answers to prompts of the client, which come in an order of the task's own, all of
    them before one comes again. Answers are generated for ``rollouts_every`` versions at a time, so that the last of
    them are ``rollouts_every`` − 1 local versions old when they are trained on: there the objective's corrections act.
    Answers that fail are left out, and groups without answers too.

    ``proximal_mu`` and ``control`` of a task are added to each step's gradient after ``clip_norm``, which is the loss's
    (ours). All that is random in a task comes from its seed, but for the split into minibatches, which is the same in
    each task (ours).

    Parameters
    ----------
    problem : Problem
        What is learnt. Its environment's held-out prompts are those of ``evaluate`` and ``compare``; its alphabet is
        the policy's.
    clients : number of clients.
    prompts_per_client : one number, or one for each client
        How many prompts each client has: its ``client_samples`` and the ``samples`` of its contributions.
    environments : tasks of the clients in turn (client i has number i mod their number)
        None: all have the problem's. Clients of one environment share out its prompts, each a range of numbers.
    evaluation_prompts : at most so many held-out prompts are answered, greedily, by ``evaluate``.
    reward_timeout_s : see ``Guard``.
    seed : of the weights that ``optimiser.trainable`` leaves out, where ``problem.policy`` draws them, and of the split
        into minibatches.

    A model holds the trained weights and the buffers; frozen weights are those that ``problem.policy`` makes. Raises
    ValueError for settings out of range and for environments that do not fit.
    """

    not_batched = "federated_ppo generates as it trains, one client after the other"

    def __init__(
        self,
        problem: Problem,
        *,
        clients: int = 8,
        prompts_per_client: int | Sequence[int] = 64,
        batch: int = 8,
        answers: int = 8,
        local_steps: int = 4,
        rollouts_every: int = 1,
        environments: Sequence[Environment | ControlEnvironment] | None = None,
        evaluation_prompts: int = 128,
        reward_timeout_s: float | None = None,
        seed: int = 0,
    ) -> None:
        numbers = {
            "clients": clients,
            "batch": batch,
            "answers": answers,
            "local_steps": local_steps,
            "rollouts_every": rollouts_every,
            "evaluation_prompts": evaluation_prompts,
        }
        for name, value in numbers.items():
            check_integer(f"federated_ppo: {name}", value, 1)
        check_integer("federated_ppo: seed", seed, 0)
        if problem.objective.needs_reference:
            raise ValueError(
                "federated_ppo: objective.kl_coefficient: a client does not have the policy that the run began with; "
                "strategy rows with proximal_mu keep it near the server's"
            )
        self.problem, self.seed = problem, seed
        self.batch, self.answers = batch, answers
        self.local_steps, self.rollouts_every = local_steps, rollouts_every
        self._evaluation_prompts, self._reward_timeout_s = evaluation_prompts, reward_timeout_s
        own = [problem.environment] if environments is None else list(environments)
        self._samples = _samples(prompts_per_client, clients)
        self._environments = [own[client % max(1, len(own))] for client in range(clients)] if own else []
        self._check_environments()
        self._first = _first_prompts(self._environments, self._samples)
        self._accelerator: Accelerator | None = None
        self._learner: Learner | None = None
        self._layout: Layout | None = None
        self._held_out: HeldOut | None = None

    def client_samples(self) -> Sequence[int]:
        """Prompts of each client."""
        return self._samples

    def initial_model(self, seed: int) -> Model:
        """The first weights of the policy for this seed."""
        from fedasync.rl.optimiser import choose_trainable

        policy = self.problem.make_policy(seed)
        choose_trainable(policy.module, self.problem.optimiser.trainable)
        return _model_of(policy)

    def train(self, task: Task) -> Contribution:
        """Generate and learn, turn about. Raises ValueError where all answers of a version fail, DivergedError."""
        check_client(task.client, len(self._samples))
        learner = self._loaded(task.model)
        learner.version = learner.steps = 0
        learner.placement.optimiser.state.clear()
        steps = self.local_steps if task.steps is None else task.steps
        with self._drawn_by(task, learner):
            for first in range(0, steps, self.rollouts_every):
                for groups in self._rollouts(task, learner, range(first, min(steps, first + self.rollouts_every))):
                    learner.train(groups)
        learnt = _model_of(learner.policy)
        moved = step_size_sum(self.problem.optimiser, learner.steps)
        return Contribution(learnt.values.cpu(), "parameters", self._samples[task.client], learnt.integers, moved)

    def evaluate(self, model: Model) -> dict[str, float]:
        """``reward`` and, of a language task, ``exact`` on held-out prompts: see ``evaluation.evaluate``."""
        from fedasync.rl.evaluation import evaluate

        return evaluate(
            self._loaded(model).policy,
            self.problem.environment,
            self.problem.sampling,
            self._evaluation_prompts,
            reward_timeout_s=self._reward_timeout_s,
        )

    def compare(self, published: Model, current: Model) -> dict[str, float]:
        """``kl``, ``disagreement`` and ``feature_cosine`` on states of held-out prompts: see ``divergence.HeldOut``."""
        from fedasync.rl.divergence import HeldOut

        for model in (published, current):
            self._check(model)
        if self._held_out is None:
            policy, problem = self._made().policy, self.problem
            self._held_out = HeldOut(policy, problem.environment, problem.sampling.max_new_tokens)
        return self._held_out.measured(COMPARED, current.tensors(), published.tensors())

    def accelerate(self, accelerator: Accelerator) -> None:
        """Train through it from now on, in the precision of ``[optimiser]``, which must be its own.

        Raises ValueError where it is not, and for an accumulation: micro-batches are the optimiser's.
        """
        if accelerator.gradient_accumulation_steps != 1:
            raise ValueError(
                f"federated_ppo: gradient_accumulation_steps = {accelerator.gradient_accumulation_steps}: how large "
                "micro-batches are is told by the optimiser's microbatch_tokens; 1 would do"
            )
        self._accelerator = accelerator
        self._learner = self._held_out = None
        self._made()

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made on demand. Raises ValueError with an Accelerator, which is of one process alone."""
        if self._accelerator is not None:
            raise ValueError("federated_ppo: trains through Accelerate in this process: copy it before, and accelerate")
        return {**self.__dict__, "_learner": None, "_held_out": None}

    def _check_environments(self) -> None:
        if not self._environments:
            raise ValueError("federated_ppo: environments must be one or more, or None for the problem's, got none")
        if self.problem.environment.held_out < 1:
            raise ValueError(
                "federated_ppo: the task holds no prompts out, and evaluations need some; held_out ≥ 1 would do"
            )
        known = getattr(self.problem.environment, "alphabet", None)
        control = hasattr(self.problem.environment, "observation_size")
        for client, each in enumerate(self._environments):
            if hasattr(each, "observation_size") != control:
                raise ValueError(
                    f"federated_ppo: the task of client {client} speaks another language than the problem's"
                )
            if known is not None and (more := set(getattr(each, "alphabet", "")) - set(known)):
                raise ValueError(
                    f"federated_ppo: the task of client {client} has characters that the problem's has not: "
                    f"{''.join(sorted(more))!r}; a part of {known!r} would do"
                )

    def _made(self) -> Learner:
        from fedasync.rl.learner import Learner

        if self._learner is None:
            self._learner = Learner(self.problem, self.seed, accelerator=self._accelerator)
        return self._learner

    def _check(self, model: Model) -> None:
        """Raise ValueError for the model of another policy."""
        own = self._made().policy
        if self._layout is None:
            self._layout = _model_of(own).layout
        if model.layout is not self._layout and model.layout != self._layout:
            raise ValueError(
                f"the model's layout ({len(model.layout.entries)} tensors, {model.layout.parameters} parameters) is "
                f"not the policy's ({len(self._layout.entries)} tensors, {self._layout.parameters} parameters)"
            )
        dtype = next(iter(own.module.parameters())).dtype
        if model.values.dtype != dtype:
            raise ValueError(f"the model's values must be {dtype}, got {model.values.dtype}")

    def _loaded(self, model: Model) -> Learner:
        self._check(model)
        learner = self._made()
        learner.load_weights(model.tensors())
        return learner

    def _rollouts(self, task: Task, learner: Learner, steps: range) -> Iterator[list[Group]]:
        """The groups of each of these local versions, generated by the learner as it is now."""
        from fedasync.rl.engines import answers

        order = PromptOrder(self._samples[task.client], None, shuffle=True, seed=task.seed)
        size, first = self.answers, self._first[task.client]
        leases = range(steps.start * self.batch, steps.stop * self.batch)
        asked = []
        for lease in leases:
            place, epoch = cast("tuple[int, int]", order.prompt_at(lease))  # epochs have no end
            asked += [Start(Request(lease * size + index, first + place, epoch, index)) for index in range(size)]
        version = learner.version
        found = answers(
            learner.policy,
            asked,
            version,
            self._environments[task.client],
            self.problem.sampling,
            task.seed,
            max_running=MOST_ROWS,
            reward_timeout_s=self._reward_timeout_s,
        )
        groups = []
        for at, lease in enumerate(leases):
            made = [each.trajectory for each in found[at * size : (at + 1) * size] if each.trajectory is not None]
            groups.append(Group(lease, asked[at * size].request.prompt, version, tuple(made), size))
        for start in range(0, len(groups), self.batch):
            whole = [group for group in groups[start : start + self.batch] if group.trajectories]
            if not whole:
                raise ValueError(
                    f"all {self.batch * size} answers to prompts of client {task.client} failed, the first with: "
                    f"{found[start * size].failure}"
                )
            yield whole

    @contextmanager
    def _drawn_by(self, task: Task, learner: Learner) -> Iterator[None]:
        """Each step's gradient gains mu·(x − base), and the control variate."""
        import torch

        parameters, layout = learner.placement.parameters, self._layout
        assert layout is not None
        base = {name: each.detach().clone() for name, each in parameters.items()} if task.proximal_mu else {}
        control: dict[str, Tensor] = {}
        if task.control is not None:
            _check_control(task.control, task.model)
            control = layout.views(task.control.detach().to(learner.placement.device), task.model.integers)

        def add(*_: object) -> None:
            with torch.no_grad():
                for name, each in parameters.items():
                    if each.grad is None:
                        each.grad = torch.zeros_like(each)
                    if base:
                        each.grad.add_(each - base[name], alpha=task.proximal_mu)
                    if control:
                        each.grad.add_(control[name])

        hook = learner.placement.optimiser.register_step_pre_hook(add) if base or control else None
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()


def step_size_sum(optimiser: Optimiser, steps: int) -> float | None:
    """How far a gradient of constant 1 moves a parameter in ``steps`` steps (see ``Contribution``); None but for SGD
    whose gradients are not clipped."""
    if optimiser.kind != "sgd" or optimiser.clip_norm != "none":
        return None
    moved = velocity = 0.0
    for step in range(steps):
        velocity = optimiser.momentum * velocity + 1.0
        moved += optimiser.rate(step) * velocity
    return moved


def _model_of(policy: Policy) -> Model:
    """The trained weights, then the buffers."""
    from fedasync.rl.policy import weights_of

    weights = weights_of(policy.module, trainable_only=True)
    return Model.from_tensors(weights, dict(policy.module.named_buffers()))


def _check_control(control: Tensor, model: Model) -> None:
    if control.shape != model.values.shape or control.dtype != model.values.dtype:
        raise ValueError(
            f"task.control must be {model.values.dtype} of shape {list(model.values.shape)}, as the model's values, "
            f"got {control.dtype} of shape {list(control.shape)}"
        )


def _samples(given: int | Sequence[int], clients: int) -> list[int]:
    """Prompts of each client."""
    found = [given] * clients if isinstance(given, int) else list(given)
    if len(found) != clients:
        raise ValueError(
            f"federated_ppo: prompts_per_client must be one number or one for each client, {clients}, got {len(found)}"
        )
    for client, count in enumerate(found):
        check_integer(f"federated_ppo: prompts_per_client of client {client}", count, 1)
    return found


def _first_prompts(environments: Sequence[Environment | ControlEnvironment], samples: Sequence[int]) -> list[int]:
    """The first prompt of each client: those of one environment share its prompts out in their order."""
    found: list[int] = []
    for client, environment in enumerate(environments):
        alike = [other for other in range(client) if environments[other] is environment]
        found.append(sum(samples[other] for other in alike))
        last = found[-1] + samples[client]
        if environment.prompts is not None and last > environment.prompts:
            raise ValueError(
                f"federated_ppo: clients up to {client} take {last} prompts of one task, which has "
                f"{environment.prompts}; fewer prompts_per_client would do"
            )
    return found
