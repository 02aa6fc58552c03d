"""The flat trainer against torch.optim, step for step, and what it must never touch."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedasync.aggregation.model import Contribution, Model
from fedasync.workloads import LocalTraining, Task
from fedasync.workloads.optimizer import training_device
from fedasync.workloads.order import generator_seed, orders
from fedasync.workloads.training import ModuleTrainer, module_state


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batch_norm() -> nn.Module:
    # Before a normalisation a bias has no gradient but rounding, which Adam would take for one.
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3))


def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(x), y, reduction="none")


def built(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return make().to(dtype)


def samples(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    return torch.randn(count, 6, generator=g, dtype=dtype), torch.randint(3, (count,), generator=g)


def base(module: nn.Module) -> Model:
    return Model.from_tensors(module_state(module))


def reference(
    module: nn.Module, data: tuple[Tensor, Tensor], local: LocalTraining, seed: int, mu: float
) -> dict[str, Tensor]:
    """The same training with torch.optim and the proximal term written into the loss."""
    x, y = data
    start = [p.detach().clone() for p in module.parameters()]
    optimiser: torch.optim.Optimizer
    if local.optimizer == "adam":
        optimiser = torch.optim.Adam(
            module.parameters(), local.learning_rate, local.betas, local.epsilon, local.weight_decay
        )
    else:
        optimiser = torch.optim.SGD(
            module.parameters(), local.learning_rate, local.momentum, weight_decay=local.weight_decay
        )
    order = torch.from_numpy(orders(np.array([seed], dtype=np.uint64), local.epochs, np.array([len(x)]))[0])
    if len(x) <= local.batch_size:
        order = torch.arange(len(x)).expand(local.epochs, -1)  # everything needs no order
    with torch.random.fork_rng():
        torch.manual_seed(generator_seed(seed))
        for epoch in range(local.epochs):
            for i in range(0, len(x), local.batch_size):
                rows = order[epoch, i : i + local.batch_size]
                optimiser.zero_grad()
                value = loss(module, x[rows], y[rows]).mean()
                if mu:
                    pairs = zip(module.parameters(), start, strict=True)
                    value = value + mu / 2 * torch.stack([((p - s) ** 2).sum() for p, s in pairs]).sum()
                value.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


def trained(
    make: Callable[[], nn.Module],
    data: tuple[Tensor, Tensor],
    local: LocalTraining,
    seed: int = 5,
    mu: float = 0.0,
) -> dict[str, Tensor]:
    model = base(built(make, data[0].dtype))
    # The trainer's own module starts elsewhere: only the task decides where training starts.
    result = ModuleTrainer(make().to(data[0].dtype), loss).train(Task(0, model, seed, mu), data, local)
    assert result.form == "parameters"
    assert result.samples == len(data[0])
    return model.layout.views(result.values, result.integers)


@settings(deadline=None, max_examples=20)
@given(
    make=st.sampled_from([mlp, batch_norm, dropout]),
    count=st.integers(2, 17).filter(lambda n: n % 4 != 1),
    local=st.builds(
        LocalTraining,
        epochs=st.integers(1, 3),
        batch_size=st.just(4),
        learning_rate=st.sampled_from([0.01, 0.3]),
        momentum=st.sampled_from([0.0, 0.9]),
        weight_decay=st.sampled_from([0.0, 0.05]),
    )
    | st.builds(
        LocalTraining,
        epochs=st.integers(1, 3),
        batch_size=st.just(4),
        learning_rate=st.just(0.01),
        weight_decay=st.sampled_from([0.0, 0.05]),
        optimizer=st.just("adam"),
        betas=st.sampled_from([(0.9, 0.999), (0.5, 0.6), (0.0, 0.9)]),
        epsilon=st.sampled_from([1e-8, 1e-3]),
    ),
    seed=st.integers(0, 2**63 - 1),
    mu=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_training_is_that_of_torch_optim(
    make: Callable[[], nn.Module], count: int, local: LocalTraining, seed: int, mu: float
) -> None:
    data = samples(count, torch.float64)
    expected = reference(built(make, torch.float64), data, local, seed, mu)
    got = trained(make, data, local, seed, mu)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_single_and_double_precision_agree_with_torch_sgd_to_rounding(
    dtype: torch.dtype, momentum: float, weight_decay: float
) -> None:
    data = samples(23, dtype)
    local = LocalTraining(2, 5, 0.1, momentum, weight_decay)
    expected = reference(built(mlp, dtype), data, local, 11, 0.0)
    got = trained(mlp, data, local, 11)
    eps = torch.finfo(dtype).eps
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=50 * eps, atol=50 * eps)


def test_the_proximal_term_holds_the_model_back() -> None:
    data = samples(20)
    start = module_state(built(mlp))

    def distance(mu: float) -> float:
        moved = trained(mlp, data, LocalTraining(epochs=5), mu=mu)
        return sum(float(((moved[name] - tensor.detach()) ** 2).sum()) for name, tensor in start.items())

    assert distance(0.0) > distance(0.5) > distance(5.0)


def test_running_statistics_are_floats_and_the_batch_counter_stays_an_integer() -> None:
    module = built(batch_norm)
    model = base(module)
    trainer = ModuleTrainer(module, loss)
    result = trainer.train(Task(0, model, 1), samples(20), LocalTraining(epochs=2, batch_size=10))
    tensors = model.layout.views(result.values, result.integers)
    assert result.integers is not None
    assert result.integers.dtype == torch.int64
    assert tensors["1.num_batches_tracked"].item() == 4
    assert not torch.equal(tensors["1.running_mean"], torch.zeros(5))
    assert model.tensors()["1.num_batches_tracked"].item() == 0


def test_weight_decay_leaves_buffers_and_frozen_parameters_alone() -> None:
    class Scaled(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 5)
            self.register_buffer("scale", torch.full((5,), 2.0))
            self.last = nn.Linear(5, 3)
            self.first.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.first(x) * self.scale)
            return y

    start = {name: tensor.clone() for name, tensor in module_state(built(Scaled)).items()}
    got = trained(Scaled, samples(20), LocalTraining(momentum=0.9, weight_decay=0.1), mu=0.5)
    kept = {name for name, tensor in start.items() if torch.equal(got[name], tensor)}
    assert kept == {"first.weight", "scale"}


def test_tied_parameters_stand_once_and_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(6, 6, bias=False)
            self.two = nn.Linear(6, 6, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.two(self.one(x))
            return y

    data, local = samples(8, torch.float64), LocalTraining(batch_size=4)
    got = trained(Tied, data, local)
    assert got.keys() == {"one.weight"}
    expected = reference(built(Tied, torch.float64), data, local, 5, 0.0)
    torch.testing.assert_close(got["one.weight"], expected["one.weight"])


def run(trainer: ModuleTrainer, model: Model, seed: int) -> Contribution:
    return trainer.train(Task(0, model, seed, 0.1), samples(23), LocalTraining(momentum=0.5))


@pytest.mark.parametrize("make", [mlp, batch_norm, dropout])
def test_a_result_depends_on_its_task_alone(make: Callable[[], nn.Module]) -> None:
    model = base(built(make))
    trainer = ModuleTrainer(built(make), loss)
    first = run(trainer, model, 1)
    other = run(trainer, model, 2)
    again = run(trainer, model, 1)
    fresh = run(ModuleTrainer(make(), loss), model, 1)
    assert torch.equal(first.values, again.values)
    assert torch.equal(first.values, fresh.values)
    assert not torch.equal(first.values, other.values)


def test_seeds_that_share_their_low_bits_differ() -> None:
    model, trainer = base(built(dropout)), ModuleTrainer(built(dropout), loss)
    assert not torch.equal(run(trainer, model, 1).values, run(trainer, model, 1 + 2**32).values)


def test_the_base_the_generators_and_earlier_results_are_not_touched() -> None:
    model = base(built(batch_norm))
    before = deepcopy(model)
    trainer = ModuleTrainer(built(batch_norm), loss)
    state, numpy_state = torch.get_rng_state(), str(np.random.get_state(legacy=False))
    first = run(trainer, model, 1)
    kept = first.values.clone()
    run(trainer, model, 2)
    first_integers = first.integers
    assert torch.equal(model.values, before.values)
    assert model.integers is not None
    assert before.integers is not None
    assert torch.equal(model.integers, before.integers)
    assert first_integers is not None
    assert torch.equal(first.values, kept)
    assert torch.equal(torch.get_rng_state(), state)
    assert str(np.random.get_state(legacy=False)) == numpy_state


def test_after_an_exception_the_next_task_is_unharmed() -> None:
    model = base(built(mlp))
    trainer = ModuleTrainer(built(mlp), loss)
    expected = run(trainer, model, 1)
    state = torch.get_rng_state()
    x, _ = samples(12)
    with pytest.raises(IndexError):
        trainer.train(Task(0, model, 1), (x, torch.full((12,), 99)), LocalTraining(momentum=0.9))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(run(trainer, model, 1).values, expected.values)


def test_a_control_variate_is_added_to_every_gradient() -> None:
    model = base(built(mlp))
    data, local = samples(4), LocalTraining(batch_size=4, learning_rate=0.5)
    trainer = ModuleTrainer(built(mlp), loss)
    control = torch.randn(len(model.values), generator=torch.Generator().manual_seed(2))
    with_it = trainer.train(Task(0, model, 1, control=control), data, local)
    without = trainer.train(Task(0, model, 1), data, local)
    torch.testing.assert_close(with_it.values, without.values - 0.5 * control)
    with pytest.raises(ValueError, match=r"task\.control must be torch\.float32 of shape \[\d+\].*got .* \[3\]"):
        trainer.train(Task(0, model, 1, control=control[:3]), data, local)


def test_a_loss_that_is_reduced_is_refused_by_name() -> None:
    trainer = ModuleTrainer(built(mlp), lambda module, x, y: loss(module, x, y).mean())
    with pytest.raises(ValueError, match=r"one number per sample, shape \[4\], got \[\]: leave it unreduced"):
        trainer.train(Task(0, base(built(mlp)), 1), samples(4), LocalTraining())


def test_auto_is_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert training_device("auto") == training_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert training_device("auto") == torch.device("cuda")


@pytest.mark.parametrize("name", ["nowhere", "cuda:77", "meta"])
def test_a_device_that_is_not_here_is_one_line(name: str) -> None:
    with pytest.raises(ValueError, match=f"^LocalTraining: device '{name}' cannot be used here") as info:
        training_device(name)
    assert "\n" not in str(info.value)


def test_a_loss_that_is_not_finite_is_passed_on() -> None:
    model = base(built(mlp))
    x, y = samples(12)
    result = ModuleTrainer(built(mlp), loss).train(Task(0, model, 1), (x * float("nan"), y), LocalTraining())
    assert result.values.isnan().any()


def test_a_model_of_another_shape_or_dtype_is_refused() -> None:
    trainer = ModuleTrainer(built(mlp), loss)
    with pytest.raises(ValueError, match=r"layout \(2 tensors, 21 parameters\) is not that of module Sequential"):
        trainer.load(base(nn.Linear(6, 3)))
    with pytest.raises(ValueError, match=r"values must be torch\.float32, got torch\.float64"):
        trainer.load(base(built(mlp, torch.float64)))
    model = base(built(batch_norm))
    with pytest.raises(ValueError, match="the model lacks the 1 integers of its layout"):
        ModuleTrainer(built(batch_norm), loss).load(Model(model.values, model.layout))


class Averaging(nn.Module):
    """Keeps a running mean by assignment, so that it would drift out of the flat vector unseen."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        y: Tensor = self.linear(x - self.mean)
        return y


def test_a_buffer_replaced_by_assignment_is_reported() -> None:
    module = built(Averaging)
    with pytest.raises(ValueError, match="buffer 'mean' of module Averaging was replaced in training"):
        ModuleTrainer(module, loss).train(Task(0, base(built(Averaging)), 1), samples(12), LocalTraining())


def test_modules_that_cannot_be_a_flat_model_are_refused() -> None:
    masked = nn.Linear(6, 3)
    masked.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"buffer 'mask' has dtype torch\.bool"):
        module_state(masked)
    masked.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)
    assert list(module_state(masked)) == ["weight", "bias"]
    with pytest.raises(ValueError, match="module ReLU has no trainable parameters"):
        ModuleTrainer(nn.ReLU(), loss)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"epochs": 0}, "epochs must be an integer ≥ 1, got 0"),
        ({"batch_size": 2.5}, r"batch_size must be an integer ≥ 1, got 2\.5"),
        ({"learning_rate": 0.0}, r"learning_rate must be a finite number > 0, got 0\.0"),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number > 0, got nan"),
        ({"momentum": 1.0}, r"momentum must be a finite number ≥ 0 and < 1, got 1\.0"),
        ({"weight_decay": -0.1}, r"weight_decay must be a finite number ≥ 0, got -0\.1"),
        ({"optimizer": "rmsprop"}, "optimizer must be 'sgd' or 'adam', got 'rmsprop'"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] must be a finite number ≥ 0 and < 1, got 1\.0"),
        ({"betas": (0.9,)}, r"betas must be two numbers, got \(0\.9,\)"),
        ({"betas": 0.9}, r"betas must be two numbers, got 0\.9"),
        ({"steps": 0}, "steps must be an integer ≥ 1, got 0"),
        ({"epsilon": 0.0}, r"epsilon must be a finite number > 0, got 0\.0"),
        (
            {"optimizer": "adam", "momentum": 0.9},
            r"momentum is SGD's and must be 0 with optimizer 'adam', got 0\.9",
        ),
        ({"weight_decay": "a"}, "weight_decay must be a finite number ≥ 0, got 'a'"),
    ],
)
def test_settings_out_of_range_are_named(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^LocalTraining: {message}$"):
        LocalTraining(**settings_)
