"""Many tasks in one call: equal to one by one, and each result its task's alone, to the last bit."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedasync.aggregation.model import Contribution, Model
from fedasync.workloads import LocalTraining, Task, stacked
from fedasync.workloads.batched import BatchedTrainer, Dealt, Lane
from fedasync.workloads.training import ModuleTrainer, module_state

COUNTS = (9, 1, 4, 7, 2, 3, 11, 4)
"""Samples of each client; batches have 4."""
PLENTY = 2**30

# Sizes are odd: what torch's kernels do differently at the ends of vectors and off boundaries shows nowhere else.


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 27), nn.SiLU(), nn.Linear(27, 7), nn.Sigmoid(), nn.Linear(7, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 3, 2, padding=1),
        nn.ELU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


# Layers before a normalisation have no bias: its gradient would be 0 but for rounding.


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7, bias=False), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))


def image_norm() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 3, 2, bias=False),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def batch_statistics() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 7, bias=False), nn.BatchNorm1d(7, track_running_stats=False), nn.Tanh(), nn.Linear(7, 3)
    )


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = cell(2, 5, batch_first=True)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.cell(x.unflatten(1, (3, 2)))[0][:, -1])
        return y


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 7, dropout=0.0, activation="gelu", batch_first=True)
        self.embed = nn.Linear(2, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.layer(self.embed(x.unflatten(1, (3, 2)))).mean(1))
        return y


class Partly(nn.Module):
    """Tied, frozen and unused parameters, a buffer that is read, a constant that is no part of the model."""

    scale: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.frozen = nn.Linear(6, 3)
        self.frozen.weight.requires_grad_(False)
        self.unused = nn.Linear(2, 3)
        self.register_buffer("scale", torch.full((6,), 1.5))
        self.register_buffer("mask", torch.eye(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(self.two(self.one(x) * self.scale) @ self.mask)
        return y


MODULES: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "smooth": smooth,
    "cnn": cnn,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "transformer": Attention,
    "partly": Partly,
    "batch_norm": batch_norm,
    "image_norm": image_norm,
    "batch_statistics": batch_statistics,
}
SEES_THE_BATCH = ("batch_norm", "image_norm", "batch_statistics")


def losses(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(x), y, reduction="none")


def built(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        module = make()
        module(torch.zeros(2, 6))  # gives lazy layers their sizes
        return module.to(dtype)


def dealt(counts: Sequence[int], dtype: torch.dtype, seed: int = 3) -> Dealt:
    g = torch.Generator().manual_seed(seed)
    total = sum(counts)
    tensors = (torch.randn(total, 6, generator=g, dtype=dtype), torch.randint(3, (total,), generator=g))
    rows = np.random.default_rng(seed).permutation(total)
    return Dealt.to_clients(tensors, np.split(rows, np.cumsum(counts)[:-1]))


def versions(module: nn.Module, count: int) -> list[Model]:
    model = Model.from_tensors(module_state(module))
    g = torch.Generator().manual_seed(1)
    noise = [torch.rand(model.values.shape, generator=g, dtype=model.values.dtype) for _ in range(count)]
    return [replace(model, values=model.values * (0.8 + 0.4 * each)) for each in noise]


class Setting:
    """A module, two sets of clients, and lanes of all kinds on them."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32, **local: Any) -> None:
        self.local = LocalTraining(**{"batch_size": 4, "epochs": 2, "learning_rate": 0.05} | local)
        module = built(MODULES[name], dtype)
        # A batch of one sample has no variance.
        counts = [n for n in COUNTS if n % 4 != 1] if name in SEES_THE_BATCH else COUNTS
        self.data = (dealt(counts, dtype), dealt(counts[::-1], dtype, seed=4))
        self.trainer = ModuleTrainer(module, losses)
        self.batched = BatchedTrainer(self.trainer, self.local)
        self.models = versions(module, 3)
        assert self.batched.trial(self.data[0], self.models[0]) is None
        self.clients = len(counts)

    def lanes(self, mu: float = 0.0, control: bool = False) -> list[Lane]:
        vector = 0.01 * self.models[0].values if control else None
        lanes = []
        for k, model in zip(range(2 * self.clients), cycle(self.models)):
            task = Task(k % self.clients, model, 2**40 * k + 1, mu if k % 3 else 0.0, vector if k % 4 else None)
            lanes.append(Lane(self.data[k // self.clients], task))
        return lanes

    def alone(self, lane: Lane) -> Contribution:
        return self.trainer.train(lane.task, lane.data.of(lane.task.client), self.local)


@cache
def setting(name: str, dtype: torch.dtype = torch.float32) -> Setting:
    return Setting(name, dtype)


def assert_equal(found: Contribution, expected: Contribution, rtol: float) -> None:
    torch.testing.assert_close(found.values, expected.values, rtol=rtol, atol=rtol * 1e-2)
    assert (found.form, found.samples) == (expected.form, expected.samples)
    assert (found.integers is None) == (expected.integers is None)
    if found.integers is not None and expected.integers is not None:
        assert torch.equal(found.integers, expected.integers)


def same_bytes(one: Contribution, other: Contribution) -> bool:
    integers = one.integers is None or other.integers is None or torch.equal(one.integers, other.integers)
    return one.values.numpy().tobytes() == other.values.numpy().tobytes() and integers


@pytest.mark.parametrize("name", MODULES)
def test_lanes_train_as_one_by_one(name: str) -> None:
    subject = Setting(name, torch.float64)
    lanes = subject.lanes(mu=0.1, control=True)
    for found, lane in zip(subject.batched.train(lanes, PLENTY), lanes, strict=True):
        assert_equal(found, subject.alone(lane), rtol=1e-9)
    # In single precision up to its rounding.
    single = Setting(name)
    lanes = single.lanes()
    for found, lane in zip(single.batched.train(lanes, PLENTY), lanes, strict=True):
        difference = (found.values - single.alone(lane).values).norm()
        assert difference < 1e-5 * found.values.norm()


@settings(deadline=None, max_examples=15)
@given(
    name=st.sampled_from(["mlp", "smooth", "partly", "batch_norm"]),
    local=st.fixed_dictionaries(
        {
            "epochs": st.integers(1, 3),
            "weight_decay": st.sampled_from([0.0, 0.05]),
            "batch_size": st.sampled_from([4, 100]),
        }
    ),
    optimizer=st.sampled_from(
        [{}, {"momentum": 0.9}, {"optimizer": "adam"}, {"optimizer": "adam", "betas": (0.5, 0.7)}]
    ),
    mu=st.sampled_from([0.0, 0.3]),
    control=st.booleans(),
)
def test_every_kind_of_local_training(
    name: str, local: dict[str, Any], optimizer: dict[str, Any], mu: float, control: bool
) -> None:
    subject = Setting(name, torch.float64, **local, **optimizer)
    lanes = subject.lanes(mu, control)
    for found, lane in zip(subject.batched.train(lanes, PLENTY), lanes, strict=True):
        assert_equal(found, subject.alone(lane), rtol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODULES)
def test_bytes_do_not_depend_on_the_company(name: str, dtype: torch.dtype) -> None:
    subject = setting(name, dtype)
    lanes = subject.lanes(mu=0.2)
    expected = [subject.batched.train([lane], PLENTY)[0] for lane in lanes]

    @settings(deadline=None, max_examples=12, derandomize=True)
    @given(
        company=st.lists(st.integers(0, len(lanes) - 1), min_size=1, max_size=70),
        memory=st.sampled_from([0, 20_000, 200_000, PLENTY]),
    )
    def law(company: list[int], memory: int) -> None:
        trained = subject.batched.train([lanes[i] for i in company], memory)
        assert all(same_bytes(found, expected[i]) for found, i in zip(trained, company, strict=True))

    law()


@pytest.mark.parametrize("name", MODULES)
def test_a_recorded_pass_gives_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Setting(name)
    lanes = subject.lanes(mu=0.2)
    expected = subject.batched.train(lanes, PLENTY)
    monkeypatch.setattr(stacked, "RECORD_AFTER", 1)
    gradient = subject.batched._gradient
    for _ in range(2):
        again = subject.batched.train(lanes, PLENTY)
        assert all(same_bytes(a, b) for a, b in zip(again, expected, strict=True))
    assert gradient._recorded
    assert all(gradient._recorded.values())


def test_generators_models_and_earlier_results_are_not_touched() -> None:
    subject = setting("batch_norm")
    lanes = subject.lanes(mu=0.1, control=True)
    kept = [(model.values.clone(), model.values._version) for model in subject.models]
    torch_state, numpy_state = torch.get_rng_state(), str(np.random.get_state(legacy=False))
    first = subject.batched.train(lanes, PLENTY)
    copies = [each.values.clone() for each in first]
    subject.batched.train(lanes[::-1], PLENTY)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert str(np.random.get_state(legacy=False)) == numpy_state
    for model, (values, version) in zip(subject.models, kept, strict=True):
        assert torch.equal(model.values, values)
        assert model.values._version == version
    assert all(torch.equal(each.values, copy) for each, copy in zip(first, copies, strict=True))
    # Each in its own memory: a receiver may overwrite it and keep nothing else alive.
    assert all(each.values.untyped_storage().nbytes() == each.values.nbytes for each in first)
    assert not any(each.values.is_inference() for each in first)


def test_a_lane_that_diverges_leaves_the_others_alone() -> None:
    subject = setting("mlp")
    lanes = subject.lanes()
    expected = subject.batched.train(lanes, PLENTY)
    broken = replace(subject.models[0], values=torch.full_like(subject.models[0].values, float("nan")))
    lanes[3] = Lane(lanes[3].data, replace(lanes[3].task, model=broken))
    found = subject.batched.train(lanes, PLENTY)
    assert found[3].values.isnan().all()
    assert all(same_bytes(f, e) for i, (f, e) in enumerate(zip(found, expected, strict=True)) if i != 3)


def test_what_does_not_fit_is_refused() -> None:
    subject = setting("mlp")
    lane = subject.lanes()[0]
    with pytest.raises(ValueError, match="is not that of module Sequential"):
        subject.batched.train([Lane(lane.data, replace(lane.task, model=setting("lstm").models[0]))], PLENTY)
    with pytest.raises(ValueError, match=r"task\.control must be .* of shape \[73\]"):
        subject.batched.train([Lane(lane.data, replace(lane.task, control=torch.zeros(2)))], PLENTY)
    assert subject.batched.train([], PLENTY) == []


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


class Averaging(nn.Linear):
    """Keeps what it saw in a constant, which is no part of the model."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("seen", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean(0)  # type: ignore[operator]
        return super().forward(x)


class Changing(nn.Linear):
    """Does something else each time, behind torch's back."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)), r"Sequential draws random numbers in training \("),
        (lambda: Branching(6, 3), "Branching cannot be vectorised: RuntimeError: vmap: It looks like"),
        (Averaging, "Averaging cannot be vectorised: RuntimeError: unsupported operation"),
        (lambda: Changing(6, 3), r"Changing gives other results in lanes than alone \(.* relative\)"),
    ],
)
def test_what_cannot_be_trusted_is_named(make: Callable[[], nn.Module], reason: str) -> None:
    with torch.random.fork_rng():
        trainer = ModuleTrainer(make(), losses)
    batched = BatchedTrainer(trainer, LocalTraining())
    found = batched.trial(dealt(COUNTS, trainer.dtype), versions(trainer.module, 1)[0])
    assert found is not None
    assert re.match(f"module {reason}", found), found
    assert "\n" not in found
    assert len(found) < 200


def test_dropout_that_drops_nothing_is_no_reason() -> None:
    with torch.random.fork_rng():
        trainer = ModuleTrainer(nn.Sequential(nn.Dropout(0.0), nn.Linear(6, 3)), losses)
    batched = BatchedTrainer(trainer, LocalTraining())
    assert batched.trial(dealt(COUNTS, trainer.dtype), versions(trainer.module, 1)[0]) is None
