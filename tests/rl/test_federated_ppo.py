"""Federated PPO: a contribution is its task's alone, and a client alone with its server is a plain learner."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fedasync as fa
from fedasync.aggregation.model import Contribution, Model
from fedasync.rl.engine import Request
from fedasync.rl.engines import answers
from fedasync.rl.environment import Reply
from fedasync.rl.episodes import Start
from fedasync.rl.federated_ppo import FederatedPpo, step_size_sum
from fedasync.rl.learner import Learner
from fedasync.rl.models import Gpt2
from fedasync.rl.objective import Objective
from fedasync.rl.optimiser import Optimiser
from fedasync.rl.policy import weights_of
from fedasync.rl.problem import Problem
from fedasync.rl.prompt_order import PromptOrder
from fedasync.rl.sampling import Sampling
from fedasync.rl.tasks import Reverse
from fedasync.rl.trajectory import Group
from fedasync.simulation.laws import Exponential
from fedasync.workloads import LocalTraining, Task
from fedasync.workloads.accelerated import through_accelerate

from ..simulation.rows import row
from . import tiny

BATCH, ANSWERS, CLIENTS = 2, 3, 3
SGD = Optimiser(learning_rate=0.5, kind="sgd", clip_norm="none")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def alone() -> Iterator[None]:
    """Accelerate keeps its state for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    yield
    reset()


def problem(**options: Any) -> Problem:
    usual: dict[str, Any] = {
        "environment": Reverse(length=2, symbols=4, held_out=8),
        "policy": Gpt2(hidden=16, layers=1, heads=2, context_tokens=12),
        "sampling": Sampling(max_new_tokens=4),
        "objective": Objective(),
        "optimiser": Optimiser(learning_rate=1e-2),
    }
    return Problem(**(usual | options))


def workload(asked: Problem | None = None, **options: Any) -> FederatedPpo:
    usual = {"clients": CLIENTS, "prompts_per_client": 4, "batch": BATCH, "answers": ANSWERS, "local_steps": 2}
    return FederatedPpo(asked or problem(), **{"evaluation_prompts": 8, **usual, **options})


def task_of(subject: FederatedPpo, client: int = 0, seed: int = 5, **options: Any) -> Task:
    return Task(client, subject.initial_model(1), seed, **options)


def same(one: Contribution, other: Contribution) -> bool:
    return torch.equal(one.values, other.values) and replace(one, values=other.values) == other


# -- a contribution is its task's alone ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimiser",
    [
        Optimiser(learning_rate=1e-2, minibatches=2, epochs=2),
        Optimiser(learning_rate=0.1, kind="sgd", momentum=0.9, warm_up_steps=3),
    ],
)
def test_the_same_task_gives_the_same_bits_whatever_came_before_it(optimiser: Optimiser) -> None:
    asked = problem(optimiser=optimiser, objective=Objective(loss="tis"))
    fresh, used = (workload(asked, rollouts_every=2) for _ in range(2))
    for before in (task_of(used, 1, 9), task_of(used, 0, 6, proximal_mu=0.5, steps=3)):
        used.train(before)
    used.evaluate(used.initial_model(4))
    used.compare(used.initial_model(2), used.initial_model(3))
    for options in ({}, {"proximal_mu": 0.5}, {"steps": 1}):
        assert same(used.train(task_of(used, **options)), fresh.train(task_of(fresh, **options)))
    assert same(pickle.loads(pickle.dumps(used)).train(task_of(used)), fresh.train(task_of(fresh)))


def test_another_seed_and_another_client_bring_something_else() -> None:
    subject = workload()
    found = [subject.train(task_of(subject, *which)).values for which in ((0, 5), (0, 6), (1, 5))]
    assert not any(torch.equal(found[a], found[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_a_task_leaves_its_model_and_torch_alone() -> None:
    subject = workload()
    task = task_of(subject, proximal_mu=0.1, control=torch.ones_like(subject.initial_model(1).values))
    values, state = task.model.values.clone(), torch.get_rng_state()
    version = task.model.values._version
    brought = subject.train(task).values
    assert torch.equal(task.model.values, values)
    assert task.model.values._version == version
    assert torch.equal(torch.get_rng_state(), state)
    kept = brought.clone()
    subject.train(task_of(subject, 2))
    assert torch.equal(brought, kept)


def test_a_model_is_the_weights_of_the_policy() -> None:
    asked = problem()
    model = workload(asked).initial_model(7)
    own = weights_of(asked.make_policy(7).module)
    assert model.tensors().keys() == own.keys()
    assert all(torch.equal(model.tensors()[name], each) for name, each in own.items())


def test_frozen_weights_do_not_travel() -> None:
    asked = problem(policy=Gpt2(hidden=16, layers=2, heads=2, context_tokens=12), optimiser=replace(SGD, trainable=1))
    subject = workload(asked)
    task = task_of(subject)
    names = task.model.tensors().keys()
    assert names == {name for name in weights_of(asked.make_policy(0).module) if ".h.1." in name or ".ln_f." in name}
    assert not torch.equal(subject.train(task).values, task.model.values)


# -- one client is a plain learner -----------------------------------------------------------------------------


class Recorded(FederatedPpo):
    """Remembers its tasks."""

    def __init__(self, *asked: Any, **options: Any) -> None:
        super().__init__(*asked, **options)
        self.tasks: list[Task] = []

    def train(self, task: Task) -> Contribution:
        self.tasks.append(task)
        return super().train(task)


def rollouts(learner: Learner, asked: Problem, seed: int, steps: int = 1) -> list[list[Group]]:
    """The next versions' groups under the weights as they are, by the order of a client that has prompts 0 … 3."""
    order, first = PromptOrder(4, None, shuffle=True, seed=seed), learner.version * BATCH
    leases = range(first, first + steps * BATCH)
    places: Any = [order.prompt_at(lease) for lease in leases]
    starts = [
        Start(Request(at * ANSWERS + index, *place, index))
        for at, place in enumerate(places)
        for index in range(ANSWERS)
    ]
    policy: Any = learner.policy
    found: list[Any] = [
        each.trajectory for each in answers(policy, starts, learner.version, asked.environment, asked.sampling, seed)
    ]
    groups = [
        Group(lease, places[at][0], learner.version, tuple(found[at * ANSWERS :][:ANSWERS]), ANSWERS)
        for at, lease in enumerate(leases)
    ]
    return [groups[at : at + BATCH] for at in range(0, len(groups), BATCH)]


def test_one_client_and_fedavg_are_the_plain_loop_bit_for_bit() -> None:
    """Of SGD without momentum, which has no state to lose between tasks."""
    asked = problem(optimiser=SGD)
    subject = Recorded(
        asked, clients=1, prompts_per_client=4, batch=BATCH, answers=ANSWERS, local_steps=1, evaluation_prompts=8
    )
    run = fa.simulate(row("fedavg", cohort=1), fa.Population(1, Exponential(1.0)), subject, versions=5, seed=3)
    learner = Learner(asked, 3)
    for task in subject.tasks[:5]:
        learner.version = 0  # of the task
        (groups,) = rollouts(learner, asked, task.seed)
        learner.train(groups)
    assert run.model is not None
    ours = {name: each.clone() for name, each in run.model.tensors().items()}
    assert all(torch.equal(ours[name], each) for name, each in learner.weights().items())
    assert not torch.equal(run.model.values, subject.initial_model(3).values)


def test_local_steps_are_versions_of_a_learner_and_rollouts_serve_as_many_as_they_are_told_to() -> None:
    """Five steps on rollouts of versions 0, 0, 2, 2, 4, by Adam, with the moments of one task."""
    asked = problem(objective=Objective(loss="coupled"))
    subject = workload(asked, local_steps=5, rollouts_every=2)
    brought = subject.train(task_of(subject))
    learner = Learner(asked, 0)
    learner.load_weights(subject.initial_model(1).tensors())
    for steps in (2, 2, 1):
        for groups in rollouts(learner, asked, 5, steps):
            learner.train(groups)
    assert torch.equal(Model.from_tensors(learner.weights()).values, brought.values)
    assert same(workload(asked, rollouts_every=2).train(task_of(subject, steps=5)), brought)


# -- terms of the task -----------------------------------------------------------------------------------------


class Worthless:
    """Everything earns nothing, so that the loss has no gradient and only the task's own terms move a client."""

    alphabet, prompts, held_out = "ab>", None, 4

    def start(self, prompt: int, *, held_out: bool = False) -> Any:
        return SimpleNamespace(prompt="ab>", step=lambda text: Reply(0.0))


def test_a_control_variate_moves_the_weights_by_the_step_sizes_and_the_proximal_term_pulls_back() -> None:
    """x ← x − η·(c + μ·(x − w)): after k steps x − w = −c·(1 − (1 − ημ)^k)/μ."""
    asked = problem(environment=Worthless(), optimiser=replace(SGD, learning_rate=0.1))
    subject = workload(asked)
    model = subject.initial_model(1)
    control = torch.linspace(-1, 1, len(model.values))
    plain = subject.train(Task(0, model, 5, control=control, steps=4))
    assert plain.step_size_sum == pytest.approx(0.4)
    torch.testing.assert_close(plain.values - model.values, -0.4 * control, atol=2e-6, rtol=1e-4)
    pulled = subject.train(Task(0, model, 5, control=control, steps=4, proximal_mu=2.0))
    expected = -control * (1 - 0.8**4) / 2
    torch.testing.assert_close(pulled.values - model.values, expected, atol=2e-6, rtol=1e-4)
    assert torch.equal(subject.train(Task(0, model, 5)).values, model.values)


def test_step_sizes_are_those_of_a_constant_gradient() -> None:
    local = LocalTraining(learning_rate=0.1, momentum=0.9)
    momentum = replace(SGD, learning_rate=0.1, momentum=0.9)
    assert step_size_sum(momentum, 7) == pytest.approx(local.step_size_sum(7))
    assert step_size_sum(replace(SGD, learning_rate=1.0, warm_up_steps=4), 5) == 0.25 + 0.5 + 0.75 + 1 + 1
    assert step_size_sum(Optimiser(learning_rate=0.1), 7) is None
    assert step_size_sum(replace(SGD, clip_norm=1.0), 7) is None


@pytest.mark.parametrize("name", ["scaffold", "fednova", "fedcompass", "fedprox"])
def test_strategies_that_ask_more_of_a_client(name: str) -> None:
    subject = workload(problem(optimiser=replace(SGD, learning_rate=0.05)), local_steps=1)
    knobs = {"concurrency": 2, "least_steps": 1, "most_steps": 2} if name == "fedcompass" else {"cohort": 2}
    run = fa.simulate(row(name, **knobs), fa.Population(CLIENTS, Exponential(1.0)), subject, updates=4, seed=0)
    assert run.summary["ledger"]["rejected"] == {}
    assert run.summary["versions"] >= 2


# -- whole runs ------------------------------------------------------------------------------------------------


def test_a_run_of_fedfa_learns_and_loses_nothing() -> None:
    subject = workload(problem(optimiser=Optimiser(learning_rate=3e-3)), local_steps=1)
    run = fa.simulate(
        row("fedfa", concurrency=3, window=2),
        fa.Population(CLIENTS, Exponential(5.0)),
        subject,
        updates=6,
        evaluate_every_s=10.0,
        seed=0,
    )
    assert set(run.metrics["name"]) == {"reward", "exact"}
    assert run.summary["consumed"] >= 6
    assert all(verdict["holds"] for verdict in run.summary["verdicts"])
    assert run.summary["ledger"]["rejected"] == {}


def test_rules_that_measure_are_told() -> None:
    subject = workload()
    first, other = subject.initial_model(1), subject.initial_model(2)
    assert subject.compare(first, first) == {"kl": 0.0, "disagreement": 0.0, "feature_cosine": pytest.approx(1.0)}
    found = subject.compare(first, other)
    assert found["kl"] > 0
    assert found["feature_cosine"] < 1
    assert subject.compare(first, other) == found


def test_a_control_task() -> None:
    subject = workload(tiny.problem(environment=tiny.Walk(), policy=tiny.Mlp(), objective=Objective(advantages="gae")))
    task = task_of(subject)
    assert not torch.equal(subject.train(task).values, task.model.values)
    assert subject.evaluate(task.model) == {"reward": 4.0}


# -- clients ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noted:
    """A task that remembers whose prompts were asked for."""

    asked: list[int]
    prompts: int | None = None
    held_out: int = 4
    alphabet: str = "ab>"

    def start(self, prompt: int, *, held_out: bool = False) -> Any:
        if not held_out:
            self.asked.append(prompt)
        return SimpleNamespace(prompt="ab>", step=lambda text: Reply(float(text == "a")))


def test_each_client_has_its_own_prompts_and_meets_all_of_them_before_one_comes_again() -> None:
    noted = Noted([])
    subject = workload(problem(environment=noted), prompts_per_client=[4, 2, 6], local_steps=3)
    assert subject.client_samples() == [4, 2, 6]
    ranges = []
    for client in range(CLIENTS):
        noted.asked.clear()
        assert subject.train(task_of(subject, client)).samples == subject.client_samples()[client]
        leases = noted.asked[::ANSWERS]
        count = min(len(leases), subject.client_samples()[client])
        assert len(set(leases[:count])) == count
        ranges.append(set(leases))
    assert ranges[0] == {0, 1, 2, 3}
    assert ranges[1] == {4, 5}
    assert ranges[2] <= set(range(6, 12))


def test_clients_may_have_tasks_of_their_own() -> None:
    tasks = [Noted([], alphabet="a>"), Noted([])]
    subject = workload(problem(environment=Noted([])), environments=tasks)
    for client in range(CLIENTS):
        subject.train(task_of(subject, client))
    assert set(tasks[0].asked) <= set(range(8))
    assert set(tasks[1].asked) <= set(range(4))
    assert min(len(set(each.asked)) for each in tasks) > 1


# -- what goes wrong -------------------------------------------------------------------------------------------


class Flaky(Worthless):
    """Some prompts, or all of them, raise."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def start(self, prompt: int, *, held_out: bool = False) -> Any:
        if prompt in self.bad:
            raise KeyError("no prompt")
        return SimpleNamespace(prompt="ab>", step=lambda text: Reply(float("a" in text)))


def test_answers_that_fail_are_left_out() -> None:
    subject = workload(problem(environment=Flaky({0, 1})), batch=4)
    task = task_of(subject)
    assert not torch.equal(subject.train(task).values, task.model.values)
    subject = workload(problem(environment=Flaky({0, 1, 2, 3})))
    with pytest.raises(ValueError, match=r"all 6 answers to prompts of client 0 failed, the first with: .*KeyError"):
        subject.train(task_of(subject))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clients": 0}, "federated_ppo: clients must be an integer ≥ 1, got 0"),
        ({"rollouts_every": 0}, "federated_ppo: rollouts_every must be an integer ≥ 1, got 0"),
        ({"prompts_per_client": [1, 2]}, "one number or one for each client, 3, got 2"),
        ({"prompts_per_client": [1, 2, 0]}, "prompts_per_client of client 2 must be an integer ≥ 1, got 0"),
        ({"environments": []}, "environments must be one or more"),
        ({"environments": [Reverse(symbols=6)]}, "client 0 has characters that the problem's has not: 'ef'"),
        ({"environments": [tiny.Walk()]}, "the task of client 0 speaks another language"),
        ({"asked": problem(environment=Reverse(2, 4, prompts=11, held_out=8))}, "up to 2 take 12 prompts .* has 11"),
        ({"asked": problem(environment=Reverse(2, 4, held_out=0))}, "holds no prompts out"),
        ({"asked": problem(objective=Objective(kl_coefficient=0.1))}, "a client does not have the policy that the run"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        workload(**options)
    assert "\n" not in str(refused.value)


def test_a_model_of_another_policy_and_an_unfit_control_are_refused() -> None:
    subject = workload()
    other = workload(problem(policy=Gpt2(hidden=8, layers=1, heads=2, context_tokens=12))).initial_model(0)
    model = subject.initial_model(0)
    for call in (lambda: subject.evaluate(other), lambda: subject.train(Task(0, other, 1))):
        with pytest.raises(ValueError, match=r"the model's layout .* is not the policy's"):
            call()
    with pytest.raises(ValueError, match=r"values must be torch.float32, got torch.float64"):
        subject.compare(model, replace(model, values=model.values.double()))
    with pytest.raises(ValueError, match=r"task.control must be torch.float32 of shape"):
        subject.train(Task(0, model, 1, control=torch.zeros(3)))
    with pytest.raises(ValueError, match="client must be between 0 and 2, got 3"):
        subject.train(Task(3, model, 1))


# -- Accelerate ------------------------------------------------------------------------------------------------


def test_through_accelerate_it_is_the_same_to_the_last_bit(alone: None) -> None:
    plain, subject = (workload(rollouts_every=2) for _ in range(2))
    assert through_accelerate(subject) is subject
    for options in ({}, {"proximal_mu": 0.3, "steps": 3}, {}):
        assert same(subject.train(task_of(subject, **options)), plain.train(task_of(plain, **options)))
    model = plain.initial_model(1)
    assert subject.evaluate(model) == plain.evaluate(model)
    with pytest.raises(ValueError, match="trains through Accelerate in this process"):
        pickle.dumps(subject)


def test_a_precision_that_is_not_the_optimisers_is_refused(alone: None) -> None:
    with pytest.raises(ValueError, match="precision is 'no' and the accelerator's mixed_precision 'bf16'"):
        through_accelerate(workload(), mixed_precision="bf16")
    asked = problem(optimiser=Optimiser(learning_rate=1e-2, precision="bf16"))
    subject = workload(asked)
    through_accelerate(subject, mixed_precision="bf16")
    assert subject.train(task_of(subject)).values.dtype == torch.float32


def test_accumulation_is_refused(alone: None) -> None:
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps = 2: .* microbatch_tokens"):
        through_accelerate(workload(), gradient_accumulation_steps=2)
