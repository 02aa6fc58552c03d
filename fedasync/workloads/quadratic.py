"""The oracle: a workload whose every result is known in closed form."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import log
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedasync.aggregation.model import Contribution, Model
from fedasync.core.bounds import check_client, check_integer, check_real
from fedasync.workloads.protocol import Task, Workload

if TYPE_CHECKING:
    from torch import Tensor


class Quadratic:
    """A ``BatchedWorkload``: client i pulls the model towards its centre, x = c_i + ρ·(w − c_i) + d.

    That is local gradient flow on f_i(x) = ½‖x − c_i‖² for a time t with ρ = e^(−t) (ρ = 0: minimised exactly;
    ρ = 1: no pull at all), and a constant ``drift`` d, the bias of a client that stops elsewhere. A task with
    proximal weight μ flows for the same time on f_i(x) + (μ/2)‖x − w‖², whose minimum is
    m = (c_i + μ·w)/(1 + μ): x = m + ρ^(1+μ)·(w − m) + d. With μ = 0 that is the map above.

    A task's ``control`` c, added to the gradient, moves the centre to c_i − c; its ``steps`` q make the flow q times as
    long. The flow's duration is the contribution's ``step_size_sum`` (None for ρ = 0, which takes for ever, and ρ = 1).

    With weights p_i a step of FedAvg takes w to c̄ + ρ·(w − c̄) + d, c̄ = Σ p_i·c_i: the distance to the fixed point
    c̄ + d/(1 − ρ) shrinks by ρ a round.

    Parameters
    ----------
    clients : number of clients.
    centres : one number per client, the same in all dimensions; None draws normal ones from ``seed``.
    centre_spread : standard deviation of drawn centres, whose mean is 0.
    contraction : ρ, from 0 to 1.
    drift : d.
    start : every coordinate of version 0.
    dimensions : length P of the model, a single tensor ``w``.
    samples : n_k, one per client; None means 1 each.
    dtype : dtype of the model, in which ``train`` computes. Metrics are computed in float64.
    seed : of the drawn centres.

    Raises ValueError for parameters out of range.
    """

    def __init__(
        self,
        clients: int,
        centres: tuple[float, ...] | None = None,
        centre_spread: float = 1.0,
        contraction: float = 0.5,
        drift: float = 0.0,
        start: float = 0.0,
        dimensions: int = 1,
        samples: tuple[int, ...] | None = None,
        dtype: Literal["float32", "float64"] = "float64",
        seed: int = 0,
    ) -> None:
        check_integer("Quadratic: clients", clients, 1)
        check_real("Quadratic: centre_spread", centre_spread, 0)
        check_real("Quadratic: contraction", contraction, 0, 1)
        check_real("Quadratic: drift", drift, -np.inf)
        check_real("Quadratic: start", start, -np.inf)
        check_integer("Quadratic: dimensions", dimensions, 1)
        check_integer("Quadratic: seed", seed, 0)
        if dtype not in ("float32", "float64"):
            raise ValueError(f"Quadratic: dtype must be 'float32' or 'float64', got {dtype!r}")
        for name, given in (("centres", centres), ("samples", samples)):
            if given is not None and len(given) != clients:
                raise ValueError(f"Quadratic: {name} must have one number per client, {clients}, got {len(given)}")
        for client, count in enumerate(samples or ()):
            check_integer(f"Quadratic: samples[{client}]", count, 1)
        for client, centre in enumerate(centres or ()):
            check_real(f"Quadratic: centres[{client}]", centre, -np.inf)
        self.contraction = contraction
        self.drift = drift
        self.start = start
        self._samples = (1,) * clients if samples is None else tuple(samples)
        if centres is None:
            stream = np.random.SeedSequence(seed, spawn_key=tuple(b"centres"))
            drawn = np.random.default_rng(stream).standard_normal((clients, dimensions)) * centre_spread
        else:
            drawn = np.repeat(np.array(centres, dtype=np.float64)[:, None], dimensions, axis=1)
        self.centres = drawn.astype(dtype)
        """c_i as an array [clients, dimensions] of ``dtype``."""
        exact = self.centres.astype(np.float64)
        self._mean = exact.mean(axis=0)
        self._variance = float(exact.var(axis=0).mean())

    def client_samples(self) -> Sequence[int]:
        return self._samples

    def initial_model(self, seed: int) -> Model:
        """``start`` in every coordinate, whatever the seed."""
        import torch

        centre = torch.from_numpy(self.centres[0])
        return Model.from_tensors({"w": torch.full_like(centre, self.start)})

    def train(self, task: Task) -> Contribution:
        """The map of the class docstring, in the dtype of the model."""
        import torch

        self._check(task)
        centre = torch.from_numpy(self.centres[task.client])
        if task.control is not None:
            centre = centre - task.control
        return self._contribution(self._map(task.model.values, centre, task), task)

    @property
    def batch_key(self) -> Hashable | None:
        """Equal for all quadratics with models of one length and dtype."""
        return None if self.not_batched else (Quadratic, self.centres.shape[1], self.centres.dtype.str)

    @property
    def not_batched(self) -> str | None:
        """None, except for a subclass with another ``train``."""
        return None if type(self).train is Quadratic.train else f"{type(self).__name__} trains in its own way"

    def train_batch(self, work: Sequence[tuple[Workload, Task]], memory_bytes: int) -> Sequence[Contribution]:
        """``train`` of each, to the bit: the map is elementwise."""
        import torch

        groups: dict[Hashable, list[int]] = {}
        for i, (workload, task) in enumerate(work):
            if not isinstance(workload, Quadratic) or workload.batch_key != self.batch_key:
                raise ValueError(f"{type(workload).__name__} has another batch_key than {type(self).__name__}")
            if self.not_batched is None:
                workload._check(task)
            groups.setdefault((id(workload), task.proximal_mu, task.control is None, task.steps), []).append(i)
        if self.not_batched is not None:
            return [workload.train(task) for workload, task in work]
        at_most = max(1, memory_bytes // (6 * self.centres[0].nbytes))
        results: dict[int, Contribution] = {}
        for members in groups.values():
            workload = work[members[0]][0]
            assert isinstance(workload, Quadratic)
            for start in range(0, len(members), at_most):
                chunk = members[start : start + at_most]
                tasks = [work[i][1] for i in chunk]
                centres = torch.from_numpy(workload.centres[[task.client for task in tasks]])
                if tasks[0].control is not None:
                    centres = centres - torch.stack([task.control for task in tasks if task.control is not None])
                x = workload._map(torch.stack([t.model.values for t in tasks]), centres, tasks[0])
                for i, task, row in zip(chunk, tasks, x.unbind(), strict=True):
                    results[i] = workload._contribution(row.clone(), task)
        return [results[i] for i in range(len(work))]

    def _map(self, w: Tensor, centre: Tensor, task: Task) -> Tensor:
        """``w`` and ``centre`` of one task, or of several that agree in all else."""
        minimum, mu = centre, task.proximal_mu
        rho = self.contraction if task.steps is None else self.contraction**task.steps
        if mu:
            minimum = (centre + mu * w) / (1 + mu)
            rho = rho ** (1 + mu)
        return minimum + rho * (w - minimum) + self.drift

    def _contribution(self, values: Tensor, task: Task) -> Contribution:
        flow = -log(self.contraction) if 0 < self.contraction < 1 else None
        if flow is not None and task.steps is not None:
            flow *= task.steps
        return Contribution(values, "parameters", self._samples[task.client], step_size_sum=flow)

    def _check(self, task: Task) -> None:
        import torch

        check_client(task.client, len(self._samples))
        w, expected = task.model.values, torch.from_numpy(self.centres[0])
        if w.shape != expected.shape or w.dtype != expected.dtype:
            raise ValueError(
                f"the model must be {expected.dtype} of shape {list(expected.shape)},"
                f" got {w.dtype} of shape {list(w.shape)}"
            )

    def evaluate(self, model: Model) -> dict[str, float]:
        """``w``, the mean coordinate; ``distance`` and ``loss`` against the clients, each counted once.

        ``distance`` is the root mean square over coordinates of w − c̄, c̄ the mean of the centres; ``loss`` the
        mean over clients of ½‖w − c_i‖²/P, which is ½(distance² + variance of the centres).
        """
        w = model.values.detach().double().numpy()
        squared = float(np.mean((w - self._mean) ** 2))
        return {"w": float(w.mean()), "distance": squared**0.5, "loss": 0.5 * (squared + self._variance)}
