"""The learner: one version is one ``train`` over a batch of groups, on one device or over several processes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import isfinite, isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedasync.rl.advantages import Advantages, advantages, equal_groups
from fedasync.rl.batch import Answers, Batch, answers_of
from fedasync.rl.denominators import token_weights
from fedasync.rl.diagnostics import combined
from fedasync.rl.divergence import HeldOut
from fedasync.rl.learner_metrics import about, about_critic, joined, stat_names
from fedasync.rl.learner_state import restored, saved
from fedasync.rl.microbatches import microbatches
from fedasync.rl.optimiser import choose_trainable
from fedasync.rl.placement import Placement, spread_like, whole
from fedasync.rl.policy import load_weights, weights_of
from fedasync.rl.reference import penalised
from fedasync.rl.terms import Terms
from fedasync.rl.trajectory import Group
from fedasync.streams import Stream

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from fedasync.rl.policy import Policy
    from fedasync.rl.problem import Problem


class DivergedError(ArithmeticError):
    """A loss or a gradient was not finite. The learner is as it was before that version."""


class _Batch(NamedTuple):
    """What one version trains on; tensors [tokens], all answers end to end."""

    answers: Answers
    advantages: Tensor
    returns: Tensor | None
    old_values: Tensor | None
    proximal: Tensor | None
    reference: Tensor | None
    """Where it is in the loss."""


class _Part(NamedTuple):
    """A minibatch: rows of the batch, and this rank's micro-batches of them (an empty one only keeps step)."""

    rows: list[int]
    pieces: list[list[int]]


class Learner:
    """A policy that learns.

    The same groups in the same order give the same bits (on one CPU thread), also after ``restore``. Dropout is off,
    so that a ratio of log-probabilities tells what training has changed. Alone (no ``accelerator``) it computes where
    ``problem.policy`` made the module. With an ``accelerate.Accelerator`` of several processes, DDP or FSDP, every rank
    gets the same groups and trains its share of each minibatch's micro-batches; gradients are summed, so that ranks
    change nothing but rounding. Every rank must call every method. Trackers of the accelerator that were started
    (``placement.accelerator_of``) are given the metrics of each version.
    """

    def __init__(self, problem: Problem, seed: int, *, accelerator: Accelerator | None = None) -> None:
        self.problem, self.seed = problem, seed
        self.policy: Policy = problem.make_policy(seed)
        self.policy.module.eval()
        choose_trainable(self.policy.module, problem.optimiser.trainable)
        self.placement = Placement(self.policy.module, problem.optimiser, accelerator)
        self.version = 0
        self.steps = 0
        """Optimiser steps made."""
        self._stats = stat_names(problem.objective)
        self._order = Stream(seed, "minibatches")
        self._held_out: HeldOut | None = None

    def train(self, groups: Sequence[Group]) -> dict[str, float]:
        """Train the next version on a batch of groups; what came of it.

        Raises ValueError for no groups and for those that the policy cannot score, DivergedError where a loss or a
        gradient was not finite; the learner is then as it was.
        """
        trajectories = [each for group in groups for each in group.trajectories]
        settings, pad = self.problem.optimiser, self.policy.pad_token
        dtype = next(iter(self.placement.parameters.values())).dtype
        answers = answers_of(trajectories, pad, self.placement.device, torch.promote_types(dtype, torch.float32))
        epochs = [self._parts(answers, epoch) for epoch in range(settings.epochs)]
        batch, stats = self._prepared(groups, answers, epochs)
        parts = [part for epoch in epochs for part in epoch]
        with self._undone_on_error(len(parts) > 1):
            made = [self._step(batch, part) for part in parts]
        self.version += 1
        known = about(trajectories, self.version - 1)
        told = known | {"steps": len(parts)} | stats | joined(made) | {"reward_mean": known["reward_mean"]}
        metrics = {name: float(each) for name, each in told.items()}
        accelerator = self.placement.accelerator
        if accelerator is not None and accelerator.trackers:
            accelerator.log(metrics, step=self.version)
        return metrics

    def weights(self) -> dict[str, Tensor]:
        """The trained weights and the buffers, on the CPU; frozen ones are those that ``problem.policy`` makes."""
        own = weights_of(self.policy.module, trainable_only=True)
        return {name: whole(each).cpu().clone() for name, each in own.items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from these weights; the optimiser stays as it is. Raises ValueError for those of another policy."""
        own = weights_of(self.policy.module)
        fitting = {
            name: spread_like(each, own[name]) if name in own and own[name].shape == each.shape else each
            for name, each in weights.items()
        }
        load_weights(self.policy.module, fitting)

    def save(self, folder: Path) -> None:
        """Write weights, the optimiser's state, the version and the steps into a folder, all or nothing."""
        saved(self, folder)

    def restore(self, folder: Path) -> None:
        """Become what was saved. Raises ValueError for what another learner saved."""
        restored(self, folder)

    def measure(self, names: Collection[str], published: Mapping[str, Tensor]) -> dict[str, float]:
        """How far the policy has moved from published weights; see ``divergence.HeldOut``."""
        if self._held_out is None:
            self._held_out = HeldOut(self._spare, self.problem.environment, self.problem.sampling.max_new_tokens)
        return self._held_out.measured(names, self.weights(), published)

    def whole_policy(self) -> Policy:
        """The policy as it is now, for generating with it in this process; valid until the next call of a method.

        ``policy`` itself, unless FSDP has spread that over the ranks.
        """
        if not self.placement.sharded:
            return self.policy
        load_weights(self._spare.module, self.weights())
        return self._spare

    @cached_property
    def _spare(self) -> Policy:
        """A policy of the same problem, with now these weights, now those."""
        made = self.problem.make_policy(self.seed)
        made.module.eval()
        return made

    @cached_property
    def _reference(self) -> Policy:
        """Version 0, which is never trained; whole on each rank, also under FSDP."""
        made = self.problem.make_policy(self.seed)
        made.module.eval().requires_grad_(False).to(self.placement.device)
        return made

    def _parts(self, answers: Answers, epoch: int) -> list[_Part]:
        """The minibatches of an epoch, a function of (seed, version, epoch); a single one is in the given order."""
        settings, place = self.problem.optimiser, self.placement
        order = np.arange(len(answers.lengths))
        if settings.minibatches > 1:
            order = np.random.default_rng(self._order.seed(self.version, epoch)).permutation(order)
        parts = []
        for rows in np.array_split(order, min(settings.minibatches, len(order))):
            lengths = answers.lengths[rows].tolist()
            capacity = settings.microbatch_tokens or sum(lengths)
            pieces = microbatches(lengths, capacity, least=place.ranks, multiple_of=place.ranks)
            mine = pieces[place.rank :: place.ranks]
            parts.append(_Part(rows.tolist(), [sorted(int(rows[at]) for at in piece) for piece in mine]))
        return parts

    def _prepared(
        self, groups: Sequence[Group], answers: Answers, epochs: Sequence[Sequence[_Part]]
    ) -> tuple[_Batch, dict[str, float]]:
        """Advantages of all groups, after a look at the batch before the first step where one is needed."""
        objective = self.problem.objective
        proximal = old_values = values = returns = reference = None
        told: dict[str, float] = {}
        parts = [part for epoch in epochs for part in epoch]
        cut = self.placement.ranks > 1 or any(len(part.pieces) > 1 for part in parts)
        beforehand = objective.needs_proximal or objective.needs_selection
        if objective.needs_values or (beforehand and len(parts) > 1) or (objective.needs_selection and cut):
            proximal, old_values = self._looked_at(answers, epochs[0], self.policy, self.placement.module)
        if objective.needs_values and old_values is not None:
            values = _of_groups(groups, old_values)
        if objective.needs_reference:
            away = self._reference
            reference, _ = self._looked_at(answers, epochs[0], away, away.module)
            if objective.option("kl_in") == "reward":
                told["groups_equal"] = equal_groups(groups)  # as they were earned
                groups, told["kl_reference"] = penalised(groups, reference, objective)
                reference = None
        found: Advantages = advantages(groups, objective, values)
        tensor = answers.behaviour.new_tensor
        joined = tensor(np.concatenate([each for group in found.values for each in group]))
        if found.returns is not None:
            returns = tensor(np.concatenate([each for group in found.returns for each in group]))
        if old_values is not None:
            keep = np.delete(np.arange(len(old_values)), np.cumsum(answers.lengths + 1) - 1)
            old_values = old_values[torch.as_tensor(keep, device=old_values.device)]
            if returns is not None:
                told |= about_critic(returns[answers.generated], old_values[answers.generated])
        return _Batch(answers, joined, returns, old_values, proximal, reference), found.stats | told

    def _looked_at(
        self, answers: Answers, parts: Sequence[_Part], policy: Policy, module: nn.Module
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [tokens] and values [tokens + answers] under a policy's weights as they are."""
        log_probs = torch.zeros_like(answers.behaviour)
        values = log_probs.new_zeros(len(log_probs) + len(answers.lengths))
        critic = False
        for piece in (piece for part in parts for piece in part.pieces):
            seen = answers.rows(piece or [0])
            with torch.no_grad(), self.placement.looking():
                scores = policy.score(module, seen, self.problem.sampling.temperature)
            critic = scores.values is not None
            if not piece:
                continue
            log_probs[seen.places[seen.generated]] = scores.log_probs[seen.generated]
            if scores.values is not None:
                for row, at in enumerate(piece):
                    start, length = int(answers.starts[at]) + at, int(answers.lengths[at]) + 1
                    values[start : start + length] = scores.values[row, :length]
        summed = self.placement.summed
        return summed(log_probs), summed(values) if critic else None

    def _step(self, batch: _Batch, part: _Part) -> dict[str, float]:
        """One optimiser step along the loss of a minibatch."""
        settings, place, objective = self.problem.optimiser, self.placement, self.problem.objective
        minibatch = batch.answers.rows(part.rows)
        mask = minibatch.generated
        weights = torch.zeros_like(batch.advantages)
        share = token_weights(mask, objective.aggregation, objective.constant_tokens, dtype=weights.dtype)
        weights[minibatch.places[mask]] = share[mask]
        selected = None
        if objective.needs_selection and batch.proximal is not None:
            kept = objective.selected(minibatch.behaviour, batch.proximal[minibatch.places], mask)
            if kept is not None:
                selected = torch.zeros_like(batch.answers.generated)
                selected[minibatch.places[mask]] = kept[mask]
        place.optimiser.zero_grad(set_to_none=True)
        sums, stats = np.zeros(3), list[dict[str, float]]()
        for at, piece in enumerate(part.pieces, 1):
            with place.summing(at == len(part.pieces)):
                loss, entropy, seen = self._loss(batch, weights, selected, piece)
                place.backward(loss)
            sums += np.array([float(loss.detach()), entropy, seen[0]])
            stats.append(seen[1])
        totals = np.array(place.gathered(sums.tolist())).sum(0)
        norm = place.clip(settings.longest)
        for what, number in (("loss", float(totals[0])), ("norm of the gradient", norm)):
            if not isfinite(number):
                place.optimiser.zero_grad(set_to_none=True)
                raise DivergedError(
                    f"version {self.version + 1}, optimiser step {self.steps + 1}: the {what} is {number:g}; the step "
                    "was not made"
                )
        rate = settings.rate(self.steps)
        for group in place.optimiser.param_groups:
            group["lr"] = rate
        place.optimiser.step()
        self.steps += 1
        size = len(self._stats)
        numbers = [each.get(name, nan) for each in stats for name in self._stats]
        table = np.array(place.gathered(numbers)).reshape(-1, size).tolist()
        every = [{name: each for name, each in zip(self._stats, row, strict=True) if not isnan(each)} for row in table]
        told = {
            "loss": totals[0],
            "grad_norm": norm,
            "learning_rate": rate,
            "entropy": totals[1] / max(1.0, totals[2]),
        }
        return told | combined(every)

    def _loss(
        self, batch: _Batch, weights: Tensor, selected: Tensor | None, piece: Sequence[int]
    ) -> tuple[Tensor, float, tuple[float, dict[str, float]]]:
        """A micro-batch's part of the loss, its summed entropy, its generated tokens, and the ratios' stats."""
        objective = self.problem.objective
        seen = batch.answers.rows(piece or [0])
        mask = seen.generated if piece else torch.zeros_like(seen.generated)
        with self.placement.looking():
            scores = self.policy.score(self.placement.module, seen, self.problem.sampling.temperature)
        terms = self._terms(batch, seen, mask, scores.log_probs, scores.entropy, selected)
        found = objective.token_losses(terms)
        share = weights[seen.places].where(mask, 0.0)
        loss = (share * found.losses).sum()
        if scores.values is not None:
            values = scores.values[:, :-1]
            if objective.needs_values and batch.returns is not None and batch.old_values is not None:
                returns, old = batch.returns[seen.places], batch.old_values[seen.places]
                loss = loss + (share * objective.value_losses(values, returns, old, mask)).sum()
            else:
                loss = loss + 0.0 * values.sum()  # a critic that is not trained has a gradient too, as DDP asks
        if not piece:
            loss = loss + 0.0 * scores.log_probs.sum()
        entropy = float(scores.entropy.detach().where(mask, 0.0).sum())
        return loss, entropy, (float(mask.sum()), found.stats)

    def _terms(
        self, batch: _Batch, seen: Batch, mask: Tensor, log_probs: Tensor, entropy: Tensor, selected: Tensor | None
    ) -> Terms:
        objective = self.problem.objective
        proximal = log_probs.detach() if batch.proximal is None else batch.proximal[seen.places]
        return Terms(
            log_probs,
            seen.behaviour,
            batch.advantages[seen.places],
            mask,
            proximal=proximal if objective.needs_proximal else None,
            token_versions=seen.versions if objective.needs_versions else None,
            version=self.version,
            entropy=entropy if objective.entropy_bonus > 0 else None,
            reference=None if batch.reference is None else batch.reference[seen.places],
            selected=None if selected is None else selected[seen.places],
        )

    @contextmanager
    def _undone_on_error(self, several: bool) -> Iterator[None]:
        """Where several steps make a version, those before one that fails are undone (a single one was not made)."""
        place, steps = self.placement, self.steps
        if several:
            weights = [each.detach().clone() for each in place.parameters.values()]
            state = {
                each: {key: value.clone() for key, value in place.optimiser.state[each].items()}
                for each in list(place.optimiser.state)
            }
        try:
            yield
        except BaseException:
            if several:
                with torch.no_grad():
                    for own, former in zip(place.parameters.values(), weights, strict=True):
                        own.copy_(former)
                place.optimiser.state.clear()
                place.optimiser.state.update(state)
                self.steps = steps
            raise


def _of_groups(groups: Sequence[Group], values: Tensor) -> list[list[NDArray[np.float64]]]:
    """Values [tokens + answers] as ``advantages`` takes them: [T + 1] of each trajectory of each group."""
    numbers, at = values.double().cpu().numpy(), 0
    found = []
    for group in groups:
        of_group = []
        for each in group.trajectories:
            of_group.append(numbers[at : at + len(each) + 1])
            at += len(each) + 1
        found.append(of_group)
    return found
