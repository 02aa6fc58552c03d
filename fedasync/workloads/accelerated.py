"""Local training through Hugging Face Accelerate: device, mixed precision and gradient accumulation, in one process."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from fedasync.aggregation.model import Contribution, Model
from fedasync.core.bounds import check_choice, check_client, check_integer
from fedasync.workloads.classification import Classification
from fedasync.workloads.optimizer import LocalOptimizer, LocalTraining, training_device
from fedasync.workloads.protocol import Task, Workload
from fedasync.workloads.training import ModuleTrainer

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor
    from torch.amp import GradScaler

Precision = Literal["no", "bf16", "fp16"]
Device = Literal["auto", "cpu"]

RANKS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables by which Accelerate learns that its process is one of several, which it then waits for."""


def through_accelerate(
    workload: Workload,
    mixed_precision: Precision = "no",
    gradient_accumulation_steps: int = 1,
    device: Device = "auto",
) -> Workload:
    """The same workload, its ``train`` run through an ``accelerate.Accelerator``.

    A ``Classification`` (data workloads all are) comes back as an ``Accelerated``. A workload of its
    own kind is given the Accelerator if it has ``accelerate`` (see ``AcceleratedWorkload``); without, it comes back as
    it is, if nothing is asked of it. ``device`` "auto" is CUDA where there is one and the CPU elsewhere, unless the
    workload's ``LocalTraining`` says "cpu".

    Raises ValueError for options that cannot be had, here or by this workload, and for a precision or device other
    than those of the process's Accelerators so far; ImportError without Accelerate.
    """
    check_choice("mixed_precision", mixed_precision, Precision)
    check_integer("gradient_accumulation_steps", gradient_accumulation_steps, 1)
    check_choice("device", device, Device)
    own = getattr(workload, "accelerate", None)
    if callable(own):
        own(_accelerator(mixed_precision, device == "cpu", gradient_accumulation_steps))
        return workload
    if isinstance(workload, Classification) and type(workload).train is Classification.train:
        return Accelerated(workload, mixed_precision, gradient_accumulation_steps, device)
    asked = {"mixed_precision": mixed_precision, "gradient_accumulation_steps": gradient_accumulation_steps}
    ignored = [f"{name} = {value!r}" for name, value in asked.items() if value not in ("no", 1)]
    ignored += ["device = 'cpu'"] if device == "cpu" else []
    if ignored:
        raise ValueError(
            f"{type(workload).__name__} trains in its own way and would ignore {', '.join(ignored)}:"
            " leave that out, or give the workload a method accelerate(accelerator)"
        )
    return workload


class Accelerated:
    """A ``ComparingWorkload``: ``workload``, trained through Accelerate.

    On the CPU, without mixed precision and accumulation, a contribution is that of ``workload.train`` to the last bit.
    See ``train_through`` for what the options mean.
    """

    def __init__(self, workload: Classification, mixed_precision: Precision, accumulation: int, device: Device) -> None:
        import torch

        self.workload = workload
        self._options = (mixed_precision, accumulation, device)
        self._accumulation = accumulation
        named = workload.local.device
        self._accelerator = _accelerator(mixed_precision, "cpu" in (device, named))
        placed = str(self._accelerator.device)
        if device == "auto" and named != "auto" and training_device(named) != training_device(placed):
            raise ValueError(
                f"LocalTraining: device {named!r} is not where Accelerate trains ({placed}): 'auto' or 'cpu' would do;"
                " CUDA_VISIBLE_DEVICES chooses among several"
            )
        # A copy has a module and samples of its own, which are made where they are wanted.
        self._placed = copy.copy(workload)
        self._placed.local = replace(workload.local, device=placed)
        if mixed_precision != "no" and self._placed._bound().dtype != torch.float32:
            raise ValueError(
                f"mixed_precision = {mixed_precision!r} needs a module in torch.float32,"
                f" got {self._placed._bound().dtype}"
            )

    def __reduce__(self) -> tuple[Callable[..., Workload], tuple[Any, ...]]:
        """A copy asks for an Accelerator where it is: that of one process means nothing in another."""
        return through_accelerate, (self.workload, *self._options)

    def client_samples(self) -> Sequence[int]:
        return self.workload.client_samples()

    def client_labels(self) -> Sequence[Sequence[int]]:
        """The distinct labels of each client's samples, in order."""
        return self.workload.client_labels()

    def initial_model(self, seed: int) -> Model:
        return self.workload.initial_model(seed)

    def train(self, task: Task) -> Contribution:
        """See ``train_through``."""
        placed = self._placed
        check_client(task.client, len(placed._partition))
        data = placed._data().of(task.client)
        return train_through(self._accelerator, placed._bound(), task, data, placed.local, self._accumulation)

    def evaluate(self, model: Model) -> dict[str, float]:
        """In the model's own precision."""
        return self._placed.evaluate(model)

    def compare(self, published: Model, current: Model) -> dict[str, float]:
        """In the model's own precision."""
        return self._placed.compare(published, current)


def train_through(
    accelerator: Accelerator,
    trainer: ModuleTrainer,
    task: Task,
    data: Sequence[Tensor],
    local: LocalTraining,
    accumulation: int | None = None,
) -> Contribution:
    """``ModuleTrainer.train`` through an Accelerator on whose device the trainer and the data are.

    Every optimiser step is made of ``accumulation`` micro-batches of ``local.batch_size`` samples (None: the
    accelerator's ``gradient_accumulation_steps``), fewer at the end of an epoch, along the mean over all their samples:
    up to rounding, that is training in batches ``accumulation`` times as large. Steps, in ``task.steps``, ``local`` and
    ``step_size_sum``, are the optimiser's. Batch normalisation sees micro-batches.

    Module and loss run in the accelerator's precision, parameters and their gradients keep their own. In fp16 the loss
    is scaled; each task starts from the same scale, and a step whose gradient overflowed is left out and not counted.

    The accelerator, and what all of its process share, is left as it was found.
    """
    accumulation = accelerator.gradient_accumulation_steps if accumulation is None else accumulation
    windows = replace(local, batch_size=local.batch_size * accumulation)
    return trainer.train(task, data, windows, partial(_descend, accelerator, local.batch_size))


def _descend(
    accelerator: Accelerator,
    size: int,
    trainer: ModuleTrainer,
    windows: Iterable[Sequence[Tensor]],
    optimizer: LocalOptimizer,
) -> None:
    """A ``Descent``: a step along the mean loss of each window, in micro-batches of ``size``."""
    import torch

    scaler = accelerator.scaler
    step = partial(optimizer.step, [trainer.gradient]) if scaler is None else _scaled_step(scaler, trainer, optimizer)
    former = (accelerator.step, accelerator.gradient_accumulation_steps, accelerator.sync_gradients)
    scale = None if scaler is None else scaler.state_dict()
    try:
        for window in windows:
            trainer.gradient.zero_()
            pieces = list(zip(*(torch.split(tensor, size) for tensor in window), strict=True))
            # Accelerate counts micro-batches from ``step`` on and divides the loss of each by their number.
            accelerator.step, accelerator.gradient_accumulation_steps = 0, len(pieces)
            for piece in pieces:
                with accelerator.accumulate(trainer.module):
                    with accelerator.autocast():
                        losses = trainer.losses(piece)
                    loss = losses.to(trainer.dtype).mean()
                    share = len(pieces) * len(piece[0]) / len(window[0])
                    accelerator.backward(loss if share == 1 else loss * share)
                    if accelerator.sync_gradients:
                        step()
    finally:
        accelerator.step, accelerator.gradient_accumulation_steps, accelerator.sync_gradients = former
        if scaler is not None:
            scaler.load_state_dict(scale)


@dataclass(frozen=True, slots=True)
class _Scaled:
    """What a ``GradScaler`` needs to know of an optimiser."""

    param_groups: Sequence[dict[str, Any]]
    step: Callable[[], None]


def _scaled_step(scaler: GradScaler, trainer: ModuleTrainer, optimizer: LocalOptimizer) -> Callable[[], None]:
    """A step along the scaled gradient divided by its scale; none where that is not finite."""
    parameters = trainer.gradient.detach()
    parameters.grad = trainer.gradient  # the scaler looks at gradients only
    scaled: Any = _Scaled([{"params": [parameters]}], partial(optimizer.step, [trainer.gradient]))

    def step() -> None:
        scaler.step(scaled)
        scaler.update()

    return step


def _accelerator(mixed_precision: Precision, cpu: bool, accumulation: int | None = None) -> Accelerator:
    """An Accelerator of one process; ``accumulation`` None leaves what its process has, or 1.

    Accelerate keeps precision, device and accumulation once for a process: whoever asks for others is refused.
    """
    import torch

    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState, is_initialized
        from accelerate.utils import GradientAccumulationPlugin, parse_flag_from_env
    except ImportError as error:
        raise ImportError(
            f"training through Accelerate needs accelerate ({error}): pip install 'fedasync[flower]'"
        ) from error
    for name in RANKS:
        if int(os.environ.get(name) or 1) > 1:
            raise ValueError(
                f"a client trains in one process, and {name} = {os.environ[name]} makes Accelerate wait for others:"
                f" start the client with {name} unset"
            )
    cpu = cpu or not torch.cuda.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
    if cpu and mixed_precision == "fp16":
        raise ValueError("mixed_precision = 'fp16' needs a CUDA device, and training is on the CPU: 'bf16' would do")
    found = GradientState()
    if is_initialized():
        state = AcceleratorState()
        has = {"mixed_precision": state.mixed_precision, "device": state.device.type}
        wants: dict[str, object] = {"mixed_precision": mixed_precision, "device": "cpu" if cpu else "cuda"}
        if accumulation is not None:
            has["gradient_accumulation_steps"] = found.num_steps
            wants["gradient_accumulation_steps"] = accumulation
        for name, value in wants.items():
            if has[name] != value:
                raise ValueError(
                    f"Accelerate keeps one {name} for a process, which is {has[name]!r} already, got {value!r}:"
                    " the same for all its workloads, or another process, would do"
                )
    plugin = {"num_steps": 1, **found.plugin_kwargs} | ({} if accumulation is None else {"num_steps": accumulation})
    accelerator = Accelerator(
        mixed_precision=mixed_precision, cpu=cpu, gradient_accumulation_plugin=GradientAccumulationPlugin(**plugin)
    )
    if accelerator.distributed_type.value != "NO" or accelerator.device.type != ("cpu" if cpu else "cuda"):
        raise ValueError(
            f"a client trains in one process on {'the CPU' if cpu else 'CUDA'}, and the environment makes Accelerate"
            f" {accelerator.distributed_type.value} on {accelerator.device}: unset its ACCELERATE_ variables"
        )
    return accelerator
