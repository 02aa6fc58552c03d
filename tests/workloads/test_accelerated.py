"""Training through Accelerate is the same training, and nothing of it stays behind."""

import copy
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedasync.aggregation.model import Contribution, Model
from fedasync.workloads import Classification, Digits, Iid, LocalTraining, Quadratic, Task, Workload
from fedasync.workloads.accelerated import Accelerated, through_accelerate, train_through
from fedasync.workloads.protocol import AcceleratedWorkload
from fedasync.workloads.training import ModuleTrainer


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Accelerate keeps its state for the whole process."""
    reset()
    yield
    reset()


def reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def double() -> nn.Module:
    return mlp().double()


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3))


def world(make: Any, local: LocalTraining, *counts: int) -> Classification:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((60, 6)), rng.integers(0, 3, 60)
    ends = np.cumsum(counts)
    return Classification(x, y, x[:9], y[:9], np.split(np.arange(ends[-1]), ends[:-1]), make, local)


def task_of(
    workload: Workload, seed: int = 5, mu: float = 0.0, control: bool = False, steps: int | None = None
) -> Task:
    model = workload.initial_model(1)
    variate = torch.linspace(-0.5, 0.5, len(model.values), dtype=model.values.dtype) if control else None
    return Task(0, model, seed, mu, variate, steps)


def assert_same(one: Contribution, other: Contribution) -> None:
    assert torch.equal(one.values, other.values)
    assert (one.integers is None) == (other.integers is None)
    assert one.integers is None or other.integers is None or torch.equal(one.integers, other.integers)
    assert replace(one, values=other.values, integers=other.integers) == other


tasks = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**63 - 1),
        "mu": st.sampled_from([0.0, 0.3]),
        "control": st.booleans(),
        "steps": st.none() | st.integers(1, 7),
    }
)


def training(batch_size: int) -> st.SearchStrategy[LocalTraining]:
    common = {
        "epochs": st.integers(1, 3),
        "batch_size": st.just(batch_size),
        "steps": st.none() | st.integers(1, 5),
        "weight_decay": st.sampled_from([0.0, 0.05]),
    }
    sgd = st.builds(LocalTraining, momentum=st.sampled_from([0.0, 0.9]), **common)
    # A small epsilon makes much of little rounding.
    adam = {"optimizer": st.just("adam"), "learning_rate": st.just(0.01), "epsilon": st.just(1e-3)}
    return sgd | st.builds(LocalTraining, **adam, **common)


@settings(deadline=None, max_examples=60)
@given(make=st.sampled_from([mlp, batch_norm, dropout]), count=st.integers(1, 17), local=training(4), task=tasks)
def test_alone_it_changes_nothing(make: Any, count: int, local: LocalTraining, task: dict[str, Any]) -> None:
    """To the last bit; a batch of one sample is refused by batch normalisation on either way."""
    count += make is batch_norm and count % 4 == 1
    plain = world(make, local, count)
    expected = plain.train(task_of(plain, **task))
    assert_same(through_accelerate(plain).train(task_of(plain, **task)), expected)


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 5), accumulation=st.integers(1, 4), count=st.integers(1, 23), task=tasks, data=st.data())
def test_accumulation_is_training_in_larger_batches(
    size: int, accumulation: int, count: int, task: dict[str, Any], data: st.DataObject
) -> None:
    """Also where an epoch ends in the middle of a window or of a micro-batch; steps are the optimiser's."""
    local = data.draw(training(size))
    large = world(double, replace(local, batch_size=size * accumulation), count)
    expected = large.train(task_of(large, **task))
    subject = through_accelerate(world(double, local, count), gradient_accumulation_steps=accumulation)
    found = subject.train(task_of(large, **task))
    torch.testing.assert_close(found.values, expected.values, rtol=1e-9, atol=1e-11)
    assert found.step_size_sum == expected.step_size_sum


def test_no_more_than_a_micro_batch_goes_through_the_module_at_once() -> None:
    rows: list[int] = []

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            rows.append(len(x))
            return super().forward(x)

    plain = world(lambda: Counting(6, 3), LocalTraining(batch_size=4, epochs=2), 15)
    subject = through_accelerate(plain, gradient_accumulation_steps=3)
    assert subject.train(task_of(plain)).step_size_sum == pytest.approx(0.1 * 2 * 2)  # 12 and 3 samples, twice
    assert rows == [4, 4, 4, 3] * 2


def test_bf16_multiplies_in_bf16_and_keeps_the_weights_in_float32() -> None:
    seen: set[tuple[torch.dtype, torch.dtype]] = set()

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            seen.add((self.weight.dtype, y.dtype))
            return y

    plain = world(lambda: Watched(6, 3), LocalTraining(batch_size=4), 20)
    subject = through_accelerate(plain, "bf16")
    found = subject.train(task_of(plain))
    assert seen == {(torch.float32, torch.bfloat16)}
    assert found.values.dtype == torch.float32
    torch.testing.assert_close(found.values, plain.train(task_of(plain)).values, rtol=0.05, atol=0.01)
    assert subject.evaluate(task_of(plain).model) == plain.evaluate(task_of(plain).model)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_in_bf16_the_loss_falls(model: Any, accumulation: int) -> None:
    local = LocalTraining(epochs=1 if model == "cnn" else 4, batch_size=5, learning_rate=0.2)
    subject = through_accelerate(Digits(5, Iid(), model, local=local), "bf16", accumulation)
    model = subject.initial_model(0)
    losses = [subject.evaluate(model)["loss"]]
    for client in range(5):
        found = subject.train(Task(client, model, client))
        assert found.values.dtype == torch.float32
        assert bool(found.values.isfinite().all())
        model = replace(model, values=found.values, integers=found.integers)
        losses.append(subject.evaluate(model)["loss"])
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16", "gradient_accumulation_steps": 3}])
@pytest.mark.parametrize("make", [mlp, batch_norm, dropout])
def test_nothing_of_a_task_stays_for_the_next(options: dict[str, Any], make: Any) -> None:
    local = LocalTraining(batch_size=4, momentum=0.9, epochs=2)
    plain = world(make, local, 23, 18)
    first, second = task_of(plain, control=True), replace(task_of(plain, mu=0.2), client=1)
    alone = through_accelerate(plain, **options).train(second)
    subject = through_accelerate(plain, **options)
    before = copy.deepcopy(GradientState().__dict__), torch.get_rng_state()
    subject.train(first)
    assert GradientState().__dict__ == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    subject.evaluate(first.model)
    assert_same(subject.train(second), alone)


def test_after_an_exception_in_the_middle_of_a_window_the_next_task_is_unharmed() -> None:
    class Fragile(nn.Linear):
        broken = False

        def forward(self, x: Tensor) -> Tensor:
            if self.broken and len(x) < 4:
                raise RuntimeError("broken")
            return super().forward(x)

    plain = world(lambda: Fragile(6, 3), LocalTraining(batch_size=4), 11)
    subject = through_accelerate(plain, gradient_accumulation_steps=3)
    expected = subject.train(task_of(plain))
    Fragile.broken = True
    with pytest.raises(RuntimeError, match="broken"):
        subject.train(task_of(plain))
    Fragile.broken = False
    assert_same(subject.train(task_of(plain)), expected)


def test_everything_but_training_is_the_workload_s_own() -> None:
    plain = world(mlp, LocalTraining(), 5, 25)
    subject = through_accelerate(plain)
    assert isinstance(subject, Accelerated)
    model, other = subject.initial_model(3), subject.initial_model(4)
    assert subject.client_samples() == plain.client_samples()
    assert subject.client_labels() == plain.client_labels()
    assert torch.equal(model.values, plain.initial_model(3).values)
    assert subject.evaluate(model) == plain.evaluate(model)
    assert subject.compare(model, other) == plain.compare(model, other)
    with pytest.raises(ValueError, match="client must be between 0 and 1, got -1"):
        subject.train(Task(-1, model, 0))


def test_a_copy_trains_alike() -> None:
    plain = world(mlp, LocalTraining(batch_size=4), 20)
    subject = through_accelerate(plain, "bf16", 2)
    expected = subject.train(task_of(plain))
    for other in (copy.deepcopy(subject), pickle.loads(pickle.dumps(subject))):
        assert_same(other.train(task_of(plain)), expected)


def test_accumulation_may_differ_in_one_process_and_precision_may_not() -> None:
    plain = world(double, LocalTraining(batch_size=4), 20)
    one, three = (through_accelerate(plain, gradient_accumulation_steps=n) for n in (1, 3))
    large = world(double, LocalTraining(batch_size=12), 20)
    assert_same(one.train(task_of(plain)), plain.train(task_of(plain)))
    torch.testing.assert_close(three.train(task_of(plain)).values, large.train(task_of(plain)).values)
    assert_same(one.train(task_of(plain)), plain.train(task_of(plain)))
    with pytest.raises(ValueError, match="keeps one mixed_precision for a process, which is 'no' already, got 'bf16'"):
        through_accelerate(world(mlp, LocalTraining(), 5), "bf16")
    assert_same(one.train(task_of(plain)), plain.train(task_of(plain)))


def test_a_device_may_not_differ_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = world(mlp, LocalTraining(), 5)
    through_accelerate(plain, device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="keeps one device for a process, which is 'cpu' already, got 'cuda'"):
        through_accelerate(plain)
    through_accelerate(world(mlp, LocalTraining(device="cpu"), 5))  # the workload's own word


class Own:
    """Four functions and a trainer, as a user writes them."""

    def __init__(self) -> None:
        self.local = LocalTraining(batch_size=4, momentum=0.5)
        self.trainer = ModuleTrainer(mlp(), lambda module, x: module(x).square().mean(1))
        self.x = torch.linspace(-1, 1, 90).reshape(15, 6)

    def client_samples(self) -> list[int]:
        return [15]

    def initial_model(self, seed: int) -> Model:
        return Model.from_tensors(dict(mlp().named_parameters()))

    def train(self, task: Task) -> Contribution:
        return self.trainer.train(task, (self.x,), self.local)

    def evaluate(self, model: Model) -> dict[str, float]:
        return {}


class Hooked(Own):
    accelerator: Accelerator | None = None

    def accelerate(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def train(self, task: Task) -> Contribution:
        if self.accelerator is None:
            return super().train(task)
        return train_through(self.accelerator, self.trainer, task, (self.x,), self.local)


def test_a_workload_of_its_own_is_given_the_accelerator() -> None:
    subject: AcceleratedWorkload = Hooked()
    task = task_of(subject)
    large = Own()
    large.local = replace(large.local, batch_size=12)
    assert through_accelerate(subject, gradient_accumulation_steps=3) is subject
    assert isinstance(subject, Hooked)
    assert isinstance(subject.accelerator, Accelerator)
    assert (subject.accelerator.mixed_precision, subject.accelerator.gradient_accumulation_steps) == ("no", 3)
    torch.testing.assert_close(subject.train(task).values, large.train(task).values)
    through_accelerate(world(mlp, LocalTraining(), 5))  # leaves the other's accumulation alone
    torch.testing.assert_close(subject.train(task).values, large.train(task).values)
    with pytest.raises(ValueError, match="keeps one gradient_accumulation_steps for a process, which is 3 already"):
        through_accelerate(Hooked(), gradient_accumulation_steps=2)


def test_the_page_says_how_to_write_it() -> None:
    page = Path(__file__).parents[2] / "docs" / "workloads.md"
    asked, hook = re.findall(r"```py\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {"ModuleTrainer": ModuleTrainer, "train_through": train_through}
    exec(asked + hook, names)
    assert isinstance(names["workload"], Accelerated)
    reset()
    own = Own()
    methods: dict[str, Any] = {name: names[name] for name in ("accelerate", "train")}
    shown: Any = type("Shown", (Own,), methods)()
    shown.module, shown.loss, shown.data = mlp(), own.trainer.loss, lambda client: (own.x,)
    task = task_of(own)
    assert_same(through_accelerate(shown).train(task), own.train(task))


def test_what_would_be_ignored_is_refused() -> None:
    class Lazy(Classification):
        def train(self, task: Task) -> Contribution:
            return Contribution(task.model.values.clone(), "parameters", 1)

    plain = world(mlp, LocalTraining(), 5)
    lazy = Lazy(*plain._train, *plain._test, plain._partition, mlp)
    for subject in (Own(), Quadratic(3), lazy):
        assert through_accelerate(subject) is subject
        for options in ({"mixed_precision": "bf16"}, {"gradient_accumulation_steps": 2}, {"device": "cpu"}):
            name, value = next(iter(options.items()))
            with pytest.raises(ValueError, match=f"^{type(subject).__name__} .* would ignore {name} = {value!r}: "):
                through_accelerate(subject, **options)


def scaled(scale: float) -> Accelerator:
    """As Accelerate makes it for fp16, which it does on a GPU only."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return accelerator


def test_a_scaled_loss_gives_the_same_steps() -> None:
    own, accelerator = Own(), scaled(2.0**10)
    task = task_of(own, mu=0.1)
    assert_same(train_through(accelerator, own.trainer, task, (own.x,), own.local), own.train(task))


def test_a_step_that_overflows_is_left_out_and_the_next_task_starts_from_the_same_scale() -> None:
    own, accelerator = Own(), scaled(2.0**127)
    own.trainer.loss = lambda module, x: 100 * module(x).square().mean(1)
    local, task = LocalTraining(batch_size=4, steps=20, learning_rate=0.001), task_of(own)
    found = train_through(accelerator, own.trainer, task, (own.x,), local)
    assert bool(found.values.isfinite().all())
    assert found.step_size_sum is not None
    assert 0 < found.step_size_sum < 0.02
    assert accelerator.scaler.get_scale() == 2.0**127
    assert_same(train_through(accelerator, own.trainer, task, (own.x,), local), found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": "fp8"}, "mixed_precision must be 'no' or 'bf16' or 'fp16', got 'fp8'"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be an integer ≥ 1, got 0"),
        ({"device": "cuda:1"}, "device must be 'auto' or 'cpu', got 'cuda:1'"),
        ({"mixed_precision": "fp16", "device": "cpu"}, "mixed_precision = 'fp16' needs a CUDA device"),
        ({"mixed_precision": "bf16"}, r"'bf16' needs a module in torch\.float32, got torch\.float64"),
    ],
)
def test_options_that_cannot_be_had_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as info:
        through_accelerate(world(double, LocalTraining(), 5), **options)
    assert "\n" not in str(info.value)


def test_a_process_that_accelerate_takes_for_one_of_several_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(ValueError, match="PMI_SIZE = 4 makes Accelerate wait for others: start the client with PMI_"):
        through_accelerate(world(mlp, LocalTraining(), 5))
    assert not PartialState._shared_state


def test_the_environment_does_not_say_how_often_to_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    plain = world(mlp, LocalTraining(batch_size=4), 20)
    assert_same(through_accelerate(plain).train(task_of(plain)), plain.train(task_of(plain)))
