"""Learning on virtual time: a plain loop's weights, whatever the clock says, and tokens that agree with it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedasync.core import EventLog, Strategy
from fedasync.core.log import PUBLISHED
from fedasync.core.measured_publication import Kl
from fedasync.rl.batch import answers_of
from fedasync.rl.engine import Request
from fedasync.rl.engines import answers
from fedasync.rl.environment import Reply
from fedasync.rl.episodes import Start
from fedasync.rl.learner import Learner
from fedasync.rl.models import Llama, Mlp
from fedasync.rl.objective import Objective
from fedasync.rl.optimiser import Optimiser
from fedasync.rl.policy import load_weights
from fedasync.rl.problem import Problem
from fedasync.rl.sampling import Sampling
from fedasync.rl.trajectory import Group
from fedasync.rl.virtual import VirtualLearner
from fedasync.simulation.cluster import Cluster, ClusterSettings, Faults, Prompts, Reward, Trainer, Weights
from fedasync.simulation.cluster.decoding import FixedSpeed, SharedSpeed
from fedasync.simulation.cluster.runtime import ClusterSimulation
from fedasync.simulation.laws import Uniform
from fedasync.strategies.rollouts import areal, synchronous_rl

BATCH, ANSWERS, VERSIONS = 4, 3, 4


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Repeat:
    """Prompts of one to four letters, whose answers earn the share of a's among them."""

    alphabet, prompts, held_out = "abcd>", None, 4

    def start(self, prompt: int, *, held_out: bool = False) -> Any:
        text = "abcd"[: 1 + prompt % 4] + ">"
        return SimpleNamespace(prompt=text, step=lambda text: Reply(text.count("a") / max(1, len(text))))


def problem(**options: Any) -> Problem:
    usual: dict[str, Any] = {
        "environment": Repeat(),
        "policy": Llama(hidden=16, layers=1, heads=2, context_tokens=24),
        "sampling": Sampling(max_new_tokens=12),
        "objective": Objective(),
        "optimiser": Optimiser(learning_rate=3e-2),
    }
    return Problem(**(usual | options))


class Recorded(VirtualLearner):
    """Remembers what it was asked."""

    def __init__(self, *asked: Any, **options: Any) -> None:
        self.every: dict[int, dict[str, torch.Tensor]] = {}
        self.batches: list[list[Group]] = []
        self.metrics: list[dict[str, float]] = []
        self.most_kept = 0
        super().__init__(*asked, **options)

    def publish(self, version: int) -> None:
        super().publish(version)
        self.every[version] = self.learner.weights()
        self.most_kept = max(self.most_kept, len(self.versions))

    def train(self, groups: Sequence[Group]) -> dict[str, float]:
        self.batches.append(list(groups))
        self.metrics.append(super().train(groups))
        return self.metrics[-1]


def cluster(**knobs: Any) -> Cluster:
    return Cluster(
        **{
            "generation_gpus": 2,
            "training_gpus": 1,
            "decoding": FixedSpeed(1000.0, max_running=64, prefill_tokens_per_second=10_000.0),
            "trainer": Trainer(step_s=0.004),
            "weights": Weights(transfer=False, load_s=0.001),
            **knobs,
        }
    )


def run(
    strategy: Strategy,
    of: Cluster | None = None,
    *,
    versions: int = VERSIONS,
    seed: int = 0,
    asked: Problem | None = None,
    **options: Any,
) -> tuple[ClusterSimulation, Recorded]:
    learning = Recorded(asked or problem(), seed, ANSWERS, **options)
    settings = ClusterSettings(versions=versions, evaluate_every=2)
    simulation = ClusterSimulation(
        strategy, of or cluster(), Prompts(answers=ANSWERS), settings, Faults(), seed, EventLog(), learning
    )
    simulation.run()
    assert simulation.ended == "versions", simulation.ended
    return simulation, learning


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- nothing is stale ------------------------------------------------------------------------------------------


def plain_loop(asked: Problem, seed: int = 0) -> tuple[Learner, list[list[Group]]]:
    """Generate a batch with the weights as they are, train on it, and so on."""
    learner, actor = Learner(asked, seed), asked.make_policy(seed)
    batches = []
    for version in range(VERSIONS):
        load_weights(actor.module, learner.weights())
        numbers = range(version * BATCH * ANSWERS, (version + 1) * BATCH * ANSWERS)
        starts = [Start(Request(number, number // ANSWERS, 0, number % ANSWERS)) for number in numbers]
        made: Any = actor
        found = answers(made, starts, version, asked.environment, asked.sampling, seed)
        told: list[Any] = [each.trajectory for each in found]
        batches.append(
            [
                Group(
                    version * BATCH + at, version * BATCH + at, version, tuple(told[at * ANSWERS :][:ANSWERS]), ANSWERS
                )
                for at in range(BATCH)
            ]
        )
        learner.train(batches[-1])
    return learner, batches


TIMINGS = {
    "plain": cluster(),
    "one server": cluster(generation_gpus=1),
    "round robin": cluster(generation_gpus=3, routing="round_robin"),
    "shared speed": cluster(decoding=SharedSpeed(500.0, 700.0, max_running=64)),
    "slow rewards": cluster(reward=Reward(Uniform(0.0, 0.1))),
    "colocated": cluster(colocated=True, training_gpus=2, switch_s=0.01),
}


def test_where_answers_start_one_by_one_the_company_changes_rounding_and_nothing_else() -> None:
    asked = problem()
    _, batches = plain_loop(asked)
    few = cluster(generation_gpus=1, decoding=FixedSpeed(1000.0, max_running=2))
    _, learning = run(synchronous_rl(batch=BATCH), few, asked=asked)
    for own, plain in zip(learning.batches, batches, strict=True):
        for one, other in zip(own, plain, strict=True):
            for a, b in zip(one.trajectories, other.trajectories, strict=True):
                assert a.tokens.tolist() == b.tokens.tolist()
                assert a.log_probs == pytest.approx(b.log_probs, abs=1e-4)


@pytest.mark.parametrize("name", TIMINGS)
def test_a_synchronous_run_has_the_weights_of_a_plain_loop_bit_for_bit_whatever_the_clock_says(name: str) -> None:
    asked = problem()
    learner, batches = plain_loop(asked)
    _, learning = run(synchronous_rl(batch=BATCH), TIMINGS[name], asked=asked)
    assert learning.batches == batches
    assert same(learning.learner.weights(), learner.weights())
    assert not same(learning.learner.weights(), learning.every[0])


def test_the_same_run_twice_has_the_same_log_and_weights() -> None:
    first, second = (run(areal(batch=BATCH, eta=2), cluster(), seed=3) for _ in range(2))
    assert list(first[0].log.rows()) == list(second[0].log.rows())
    assert same(first[1].learner.weights(), second[1].learner.weights())
    assert first[1].metrics == second[1].metrics


# -- something is ----------------------------------------------------------------------------------------------

STALE = {
    "all at once": cluster(),
    "one by one": cluster(weights=Weights(transfer=False, load_s=0.005, order="one_by_one")),
    "few places": cluster(generation_gpus=1, decoding=FixedSpeed(1000.0, max_running=4)),
    "small caches": cluster(decoding=FixedSpeed(1000.0, max_running=8, capacity_tokens=40)),
}


@pytest.fixture(scope="module")
def stale_runs() -> dict[str, tuple[ClusterSimulation, Recorded]]:
    return {name: run(areal(batch=BATCH, eta=2), of, versions=8) for name, of in STALE.items()}


@pytest.mark.parametrize("name", STALE)
def test_log_probabilities_are_those_of_the_version_that_chose_each_token(name: str, stale_runs: Any) -> None:
    """By teacher forcing under each version's weights, the tokens before an interruption and after it alike."""
    _, learning = stale_runs[name]
    asked = learning.problem
    policy: Any = asked.make_policy(0)
    told = [each for batch in learning.batches for group in batch for each in group.trajectories]
    assert max(each.segments for each in told) > 1
    batch = answers_of(told, policy.pad_token).rows(range(len(told)))
    seen = torch.zeros_like(batch.generated)
    for version, weights in learning.every.items():
        load_weights(policy.module, weights)
        with torch.no_grad():
            scores = policy.score(policy.module, batch, asked.sampling.temperature)
        mine = batch.generated & (batch.versions == version)
        torch.testing.assert_close(scores.log_probs[mine], batch.behaviour[mine], atol=2e-5, rtol=1e-4)
        seen |= mine
    assert bool((seen == batch.generated).all())


@pytest.mark.parametrize("name", STALE)
def test_the_table_of_rollouts_tells_of_the_tokens_that_were_trained(name: str, stale_runs: Any) -> None:
    simulation, learning = stale_runs[name]
    columns = simulation.answers.columns(simulation.rollouts.servers)
    rows = {
        (int(lease), int(answer)): row
        for row, (lease, answer) in enumerate(zip(columns["lease"], columns["answer"], strict=True))
    }
    for version, batch in enumerate(learning.batches):
        for group in batch:
            for index, each in enumerate(group.trajectories):
                row = rows[group.lease, index]
                found = [
                    columns[what][row]
                    for what in ("prompt_tokens", "generated_tokens", "first_version", "last_version", "segments")
                ]
                parts = [
                    each.prompt_tokens,
                    each.generated_tokens,
                    each.first_version,
                    each.last_version,
                    each.segments,
                ]
                assert found == parts
                assert each.last_version is not None
                assert each.last_version <= version
    steps = simulation.trainer.times.table()
    trained = [sum(len(each) for group in batch for each in group.trajectories) for batch in learning.batches]
    assert steps.filter(steps["name"] == "tokens")["value"].to_list() == trained


def test_weights_that_no_server_has_are_gone(stale_runs: Any) -> None:
    for name, (_, learning) in stale_runs.items():
        assert learning.most_kept <= (4 if name == "one by one" else 2)
        assert len(learning.versions) <= 3


def test_strategies_that_are_compared_meet_the_same_luck() -> None:
    """What version 0 says to a prompt is the same in every run of a seed."""
    stale, fresh = run(areal(batch=BATCH, eta=3))[1], run(synchronous_rl(batch=BATCH))[1]
    expected = {group.prompt: group.trajectories for group in fresh.batches[0]}
    found = [group for batch in stale.batches for group in batch if group.prompt in expected]
    assert found
    for group in found:
        for each, other in zip(group.trajectories, expected[group.prompt], strict=True):
            if each.last_version == 0:
                assert each.tokens.tolist() == other.tokens.tolist()


def test_a_publication_rule_measures_the_real_policy() -> None:
    strategy = areal(batch=BATCH, eta=None, limit=8, publication=Kl(above=0.1))
    simulation, learning = run(strategy, versions=8)
    assert simulation.coordinator.checks == 8
    assert 0 < simulation.coordinator.publications < 8
    assert set(learning.every) == {0, *(event[5] for event in _published(simulation))}


def _published(simulation: ClusterSimulation) -> list[Any]:
    return [row for row in simulation.log.rows() if row[1] == PUBLISHED]


def test_held_out_prompts_are_evaluated_now_and_then() -> None:
    simulation, _ = run(areal(batch=BATCH, eta=1), evaluation_prompts=3)
    table = simulation.trainer.times.table()
    for name in ("reward", "exact"):
        assert table.filter(table["name"] == name)["version"].to_list() == [2, 4]


# -- what cannot be --------------------------------------------------------------------------------------------


class Turned(Repeat):
    """Asks back once."""

    def start(self, prompt: int, *, held_out: bool = False) -> Any:
        replies = iter((Reply(0.0, done=False, observation="a"), Reply(1.0)))
        return SimpleNamespace(prompt="a>", step=lambda _: next(replies))


def test_answers_of_several_turns_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="has 2 turns, and nothing says how long its environment takes between them"):
        run(synchronous_rl(batch=BATCH), asked=problem(environment=Turned()))


class Broken(Repeat):
    """Raises at the end of every answer to prompt 2, and gives no prompt 5."""

    def start(self, prompt: int, *, held_out: bool = False) -> Any:
        if prompt == 5:
            raise RuntimeError("no such prompt")

        def step(text: str) -> Reply:
            if prompt == 2:
                raise ZeroDivisionError("by nothing")
            return Reply(1.0)

        return SimpleNamespace(prompt="ab>", step=step)


def test_a_prompt_whose_environment_fails_is_asked_again_and_then_given_up() -> None:
    simulation, learning = run(areal(batch=BATCH, eta=1), cluster(most_attempts=2), asked=problem(environment=Broken()))
    reasons = "\n".join(simulation.log.reasons)
    assert "environment raised ZeroDivisionError: by nothing" in reasons
    assert "environment raised RuntimeError: no such prompt" in reasons
    given_up = [each.what for each in simulation.incidents]
    assert given_up == [f"prompt {prompt} is given up after 2 attempts" for prompt in (2, 5)]
    assert not {group.prompt for batch in learning.batches for group in batch} & {2, 5}


def test_versions_that_are_not_kept_neither_generate_nor_are_published() -> None:
    learning = VirtualLearner(problem(), 0, ANSWERS)
    with pytest.raises(ValueError, match=r"weights of version 3 are not kept; one of \[0\] would do"):
        learning.generate(3, [Start(Request(0, 0, 0, 0))])
    with pytest.raises(ValueError, match="version 2 is published, and the learner is at version 0"):
        learning.publish(2)
    with pytest.raises(ValueError, match="answers must be"):
        VirtualLearner(problem(), 0, 0)


def test_what_is_forgotten_is_all_but_what_is_asked_for_and_what_was_published_last() -> None:
    learning = VirtualLearner(problem(), 0, ANSWERS)
    for version in (1, 2, 3):
        found = learning.generate(version - 1, [Start(Request(at, 0, 0, at)) for at in range(ANSWERS)])
        told: Any = tuple(each.trajectory for each in found)
        learning.train([Group(version, 0, version - 1, told, ANSWERS)])
        learning.publish(version)
    learning.forget({1})
    assert learning.versions == {1, 3}


def test_lengths_of_prompts_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Counted(Repeat):
        def start(self, prompt: int, *, held_out: bool = False) -> Any:
            started.append(prompt)
            return super().start(prompt, held_out=held_out)

    monkeypatch.setattr("fedasync.rl.virtual.MOST_PROMPTS", 2)
    learning = VirtualLearner(problem(environment=Counted()), 0, ANSWERS)
    assert [learning.prompt_tokens(prompt) for prompt in (0, 1, 1, 2, 0)] == [2, 3, 3, 4, 2]
    assert started == [0, 1, 2, 0]


def test_ages_of_tokens_do_not_hide_those_of_groups() -> None:
    """τ is of the version that a group was asked under; some of its tokens are newer."""
    simulation, learning = run(areal(batch=BATCH, eta=2), versions=8)
    table = simulation.trainer.times.table()
    of_groups, of_tokens = (
        table.filter(table["name"] == name)["value"].to_list() for name in ("staleness_mean", "token_staleness_mean")
    )
    assert of_tokens == [each["token_staleness_mean"] for each in learning.metrics]
    assert of_groups == [
        np.mean([version - group.base_version for group in batch]) for version, batch in enumerate(learning.batches)
    ]
    assert of_groups != of_tokens


# -- control ---------------------------------------------------------------------------------------------------


class Walk:
    """Where one's steps lead, until one is far from the start, or has made twelve."""

    observation_size, actions, prompts, held_out = 2, 3, None, 3

    def start(self, prompt: int, *, held_out: bool = False) -> Any:
        at, steps = np.array([prompt % 3, 0], np.float32), 0

        def step(action: int) -> tuple[Any, float, bool, bool]:
            nonlocal at, steps
            at, steps = at + np.float32([action - 1, 1]), steps + 1
            return at, float(action == 2), bool(abs(at[0]) > 4), steps == 12

        return SimpleNamespace(reset=lambda: at, step=step)


def test_episodes_of_a_control_task_are_interrupted_and_trained_alike() -> None:
    asked = problem(environment=Walk(), policy=Mlp(hidden=8, layers=1))
    simulation, learning = run(areal(batch=BATCH, eta=2), asked=asked, versions=8)
    told = [each for batch in learning.batches for group in batch for each in group.trajectories]
    assert max(each.segments for each in told) > 1
    for each in told:
        assert each.observations is not None
        steps = each.observations[1:, 1] - each.observations[:-1, 1]
        assert (steps == 1).all()
        assert (each.observations[1:, 0] - each.observations[:-1, 0] == each.tokens - 1).all()
    columns = simulation.answers.columns(simulation.rollouts.servers)
    assert set(columns["prompt_tokens"].tolist()) == {0}
