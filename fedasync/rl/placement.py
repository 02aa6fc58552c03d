"""Where a learner computes: alone in its process, or through Accelerate on its device and over its processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedasync.rl.trackers import PROJECT, start_settings, tracker_refusal

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import Tensor, nn

    from fedasync.rl.optimiser import Optimiser, Precision


def accelerator_of(
    precision: Precision = "no",
    *,
    cpu: bool = False,
    sharded: bool | None = None,
    log_with: str | None = None,
    folder: Path | None = None,
) -> Accelerator:
    """An Accelerator for a learner, of all processes that the environment names (``accelerate launch``, torchrun).

    ``sharded``: FSDP (version 2) instead of DDP, block by block, on the CPU too; None: what ACCELERATE_USE_FSDP says,
    which ``accelerate launch`` sets. ``log_with`` and ``folder``: the tracker of metrics, which is started, and
    where it writes. Raises ValueError for a tracker that is none, or is not installed.
    """
    if log_with is not None and (refusal := tracker_refusal(log_with)) is not None:
        raise ValueError(refusal)
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    if sharded is None:
        sharded = _asks_for_fsdp()
    plugin = None
    if sharded:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    made = Accelerator(mixed_precision=precision, cpu=cpu, fsdp_plugin=plugin, log_with=log_with, project_dir=folder)
    if plugin is not None and made.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate 1.15 has FSDP for accelerators only and leaves the plugin out without a word; torch has it.
        if precision != "no":
            plugin.set_mixed_precision(precision)
        made.state.distributed_type, made.state.fsdp_plugin = DistributedType.FSDP, plugin
    if log_with is not None:
        made.init_trackers(PROJECT, init_kwargs=start_settings(log_with, folder))
    return made


class Placement:
    """A module and its optimiser, as they are computed with.

    ``module`` is what forward passes go through, ``bare`` what has the parameters under their own names. Over several
    ranks a gradient is the sum of the ranks' own, and every method that speaks of ranks must be called by all.
    """

    def __init__(self, module: nn.Module, settings: Optimiser, accelerator: Accelerator | None) -> None:
        """Raises ValueError where the accelerator's precision is not the settings', or its FSDP is not version 2."""
        self.accelerator = accelerator
        self.precision = settings.precision
        if accelerator is not None and accelerator.mixed_precision != settings.precision:
            raise ValueError(
                f"optimiser: precision is {settings.precision!r} and the accelerator's mixed_precision "
                f"{accelerator.mixed_precision!r}: the same for both would do"
            )
        several = accelerator is not None and accelerator.num_processes > 1
        if accelerator is not None and several and _asks_for_fsdp() and not getattr(accelerator, "is_fsdp2", False):
            raise ValueError(
                f"accelerator: FSDP was asked for, and Accelerate made {accelerator.distributed_type.value} of it; "
                "fsdp_version = 2, on the CPU through placement.accelerator_of, would do"
            )
        optimiser = settings.make([each for each in module.parameters() if each.requires_grad])
        self.bare, self.module, self.optimiser = module, module, optimiser
        self.rank, self.ranks = 0, 1
        if accelerator is not None:
            self.rank, self.ranks = accelerator.process_index, accelerator.num_processes
            self.module, wrapped = accelerator.prepare(module, optimiser)
            self.optimiser = wrapped.optimizer
        self.sharded = any(hasattr(each, "full_tensor") for each in self.bare.parameters())
        """No rank has all weights: its module answers only where all ranks ask it."""
        self.device: torch.device = next(self.module.parameters()).device
        self.parameters: dict[str, nn.Parameter] = {
            name: each for name, each in self.bare.named_parameters() if each.requires_grad
        }

    def looking(self) -> AbstractContextManager[Any]:
        """The precision of forward passes."""
        import torch

        return torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def summing(self, last: bool) -> AbstractContextManager[Any]:
        """Around a micro-batch's forward and backward pass: after the last one gradients are summed over ranks."""
        if last or self.accelerator is None:
            return nullcontext()
        held: AbstractContextManager[Any] = self.accelerator.no_sync(self.module)
        return held

    def backward(self, loss: Tensor) -> None:
        if self.accelerator is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:  # Accelerate divides by what it takes for the number of micro-batches, DDP and FSDP by the ranks.
            self.accelerator.backward(loss * (self.ranks * self.accelerator.gradient_accumulation_steps))

    def clip(self, most: float) -> float:
        """Scale the gradient down to a norm of at most ``most``; its norm before."""
        import torch

        parameters = list(self.module.parameters())
        if self.accelerator is None:
            return float(torch.nn.utils.clip_grad_norm_(parameters, most))
        return float(whole(self.accelerator.clip_grad_norm_(parameters, most)))

    def summed(self, tensor: Tensor) -> Tensor:
        """Over all ranks."""
        if self.ranks == 1:
            return tensor
        import torch.distributed

        torch.distributed.all_reduce(tensor)
        return tensor

    def gathered(self, numbers: Sequence[float]) -> list[list[float]]:
        """Each rank's numbers; all have equally many."""
        if self.ranks == 1:
            return [list(numbers)]
        import torch

        table = torch.zeros(self.ranks, len(numbers), dtype=torch.float64, device=self.device)
        table[self.rank] = torch.tensor(numbers, dtype=torch.float64)
        rows: list[list[float]] = self.summed(table).tolist()
        return rows

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()


def whole(tensor: Tensor) -> Tensor:
    """A tensor that FSDP has spread over ranks, put together on each of them; others as they are."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def spread_like(tensor: Tensor, own: Tensor) -> Tensor:
    """The inverse of ``whole``: as ``own`` is spread, on its device and of its type."""
    tensor = tensor.to(own.device, own.dtype)
    if not hasattr(own, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    placed: Any = own
    return distribute_tensor(tensor, placed.device_mesh, placed.placements)


def _asks_for_fsdp() -> bool:
    """Also of an Accelerator that got a plugin, which sets the variable."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1", "yes")
