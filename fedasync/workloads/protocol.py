"""What a workload is: the four functions that a runtime calls, one more for publication rules that measure, one for
training through Accelerate, and three of one that trains many at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fedasync.aggregation.model import Contribution, Model

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Task:
    """The local work of one lease."""

    client: int
    model: Model
    """The base version: shared with other leases, so read it and never write it."""
    seed: int
    """Fixes everything random in the work (order of batches, dropout); 0 ≤ seed < 2^63."""
    proximal_mu: float = 0.0
    """Weight of FedProx's and FedAsync's term (mu/2)·‖x − w_base‖², added by the client (0: no term)."""
    control: Tensor | None = None
    """[P]: added to every gradient (SCAFFOLD's c − c_i; None: nothing); only the trainable parameters' part counts."""
    steps: int | None = None
    """Optimiser steps to make instead of what the workload's own settings say (None)."""


class Workload(Protocol):
    """Model, data, objective and metric of a federated problem.

    The result of ``train`` may depend on its task alone: a runtime calls it when the result is due, in any order,
    in any process.
    """

    def client_samples(self) -> Sequence[int]:
        """Training samples n_k ≥ 1 of each client; the length is the number of clients."""
        ...

    def initial_model(self, seed: int) -> Model:
        """Version 0."""
        ...

    def train(self, task: Task) -> Contribution:
        """Train from ``task.model`` on the data of ``task.client``."""
        ...

    def evaluate(self, model: Model) -> dict[str, float]:
        """Metrics of a version, by name, on data that no client trains on."""
        ...


class ComparingWorkload(Workload, Protocol):
    """A workload that says how differently two versions behave, for publication rules that measure it."""

    def compare(self, published: Model, current: Model) -> Mapping[str, float]:
        """Measures of ``current`` against ``published``, by the names that rules have for them (``disagreement``,
        ``kl``, ``feature_cosine``), on data that no client trains on.

        The same names for any two versions; equal ones give 0, 0 and 1. Called once with version 0 twice, to see which
        measures there are. Read the models, never write them.
        """
        ...


class AcceleratedWorkload(Workload, Protocol):
    """A workload of your own that trains through Hugging Face Accelerate (``through_accelerate``)."""

    def accelerate(self, accelerator: Accelerator) -> None:
        """Called once, before the first task: train on ``accelerator.device``, through it, from now on.

        Precision and ``gradient_accumulation_steps`` are those that the run asked for; there is one process. What
        ``train`` brings may still depend on its task alone, so whatever is prepared with the accelerator (optimisers,
        scalers, schedules) must start afresh in each task. A workload without this function trains as it does, and
        is refused where a precision, accumulation or device is asked for.
        """
        ...


class BatchedWorkload(Workload, Protocol):
    """A workload that can train many tasks in one call, from different versions and for different clients.

    What a task brings from ``train_batch`` may depend on nothing but the task, to the last bit: neither on the tasks
    beside it, nor on their order, nor on ``memory_bytes``. It equals what ``train`` brings up to rounding.
    """

    @property
    def batch_key(self) -> Hashable | None:
        """Workloads with equal keys can train in one call (the seeds of one study); None: one by one only.

        Finding out may take a trial run, made at the first question.
        """
        ...

    @property
    def not_batched(self) -> str | None:
        """Why ``batch_key`` is None, in one line; None if it is not."""
        ...

    def train_batch(self, work: Sequence[tuple[Workload, Task]], memory_bytes: int) -> Sequence[Contribution]:
        """Train each task on its workload's clients; contributions in the order of ``work``, each in its own memory.

        All workloads must have this one's ``batch_key``. ``memory_bytes`` bounds the working memory, as far as the
        smallest batch allows. What a module raises propagates, and then nothing is returned: call again with each
        task alone to learn whose it was.
        """
        ...
