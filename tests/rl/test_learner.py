from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.rl.advantages import advantages
from fedasync.rl.batch import answers_of
from fedasync.rl.learner import DivergedError, Learner
from fedasync.rl.objective import Objective
from fedasync.rl.optimiser import Optimiser
from fedasync.rl.reference import penalised

from .tiny import Llama, Mlp, Walk, groups, on_policy, problem

torch.set_num_threads(1)
DOUBLE = torch.float64
SGD = Optimiser(learning_rate=1.0, kind="sgd", clip_norm="none")


def double(control: bool = False, **options: Any) -> Any:
    """A problem in float64, so that rounding stays out of sight."""
    if control:
        return problem(environment=Walk(), policy=Mlp(DOUBLE), **options)
    return problem(policy=Llama(1, DOUBLE), **options)


def moved(learner: Learner, found: Any) -> dict[str, torch.Tensor]:
    """What a version changes; with ``SGD`` the negative gradient."""
    before = learner.weights()
    learner.train(found)
    return {name: each - before[name] for name, each in learner.weights().items()}


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, each in one.items():
        torch.testing.assert_close(each, other[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert_close(one, other, rtol=0.0, atol=0.0)


def test_one_step_on_policy_goes_along_the_reinforce_gradient() -> None:
    """GRPO at π = π_prox = μ: ∇ of mean over tokens of A log π, whatever the clip."""
    learner = Learner(double(optimiser=SGD), 3)
    found = on_policy(learner.policy, groups(1))
    told = advantages(found, learner.problem.objective).values
    module, total, tokens = learner.policy.module, torch.zeros((), dtype=DOUBLE), 0
    for group, of_group in zip(found, told, strict=True):
        for each, advantage in zip(group.trajectories, of_group, strict=True):
            logits = module(torch.tensor(each.tokens)[None]).logits[0]
            for t in np.flatnonzero(each.generated):
                total = total + advantage[t] * torch.log_softmax(logits[t - 1], -1)[each.tokens[t]]
                tokens += 1
    names = [name for name, _ in module.named_parameters()]
    gradient = dict(zip(names, torch.autograd.grad(total / tokens, module.parameters()), strict=True))
    assert_close(moved(learner, found), gradient, rtol=1e-6, atol=1e-9)


@settings(deadline=None, max_examples=12)
@given(
    budget=st.integers(12, 60),
    control=st.booleans(),
    aggregate=st.sampled_from(["token", "sequence"]),
    loss=st.sampled_from(["ppo", "decoupled", "gspo", "m2po", "coupled"]),
    minibatches=st.integers(1, 3),
    kl=st.sampled_from([{}, {"kl_coefficient": 0.3}, {"kl_coefficient": 0.3, "kl_in": "reward"}]),
)
def test_the_micro_batch_budget_changes_nothing(
    budget: int, control: bool, aggregate: Any, loss: Any, minibatches: int, kl: dict[str, Any]
) -> None:
    """Weights and every metric, up to rounding."""
    compared: Any = "gae" if control else "rloo" if "kl_in" in kl else "grpo"
    objective = Objective(loss=loss, aggregate=aggregate, advantages=compared, **kl)
    optimiser = replace(SGD, minibatches=minibatches, learning_rate=0.1)
    whole, cut = (
        Learner(double(control, objective=objective, optimiser=replace(optimiser, microbatch_tokens=tokens)), 0)
        for tokens in (None, budget)
    )
    found = groups(2, 3, 4, control=control)
    expected, told = whole.train(found), cut.train(found)
    assert_close(cut.weights(), whole.weights(), rtol=1e-7, atol=1e-10)
    assert told == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("optimiser", [Optimiser(1e-2), Optimiser(1e-2, minibatches=3, epochs=2, microbatch_tokens=40)])
@pytest.mark.parametrize("control", [False, True])
def test_the_same_twice_gives_the_same_bits(optimiser: Optimiser, control: bool) -> None:
    options = {"environment": Walk(), "policy": Mlp(), "objective": Objective(advantages="gae")} if control else {}
    learners = [Learner(problem(optimiser=optimiser, **options), 0) for _ in range(2)]
    for seed in range(3):
        one, other = (learner.train(groups(seed, control=control)) for learner in learners)
        assert one == other
    assert_same(learners[0].weights(), learners[1].weights())
    assert learners[0].version == 3
    assert learners[0].steps == 3 * optimiser.minibatches * optimiser.epochs


def test_tokens_of_the_environment_are_not_trained() -> None:
    """Whatever stands there for log-probabilities changes no bit."""
    found = groups(5)

    def other(each: Any) -> Any:
        log_probs = np.where(each.generated, each.log_probs, -3.0).astype(np.float32)
        return replace(each, log_probs=log_probs)

    changed = [replace(group, trajectories=tuple(map(other, group.trajectories))) for group in found]
    one, same = Learner(problem(), 0), Learner(problem(), 0)
    assert one.train(found) == same.train(changed)
    assert_same(one.weights(), same.weights())


@pytest.mark.parametrize("budget", [None, 40])
def test_the_proximal_policy_looked_at_is_the_trained_one_to_the_last_bit(budget: int | None) -> None:
    """So that with one step per version, where nothing is looked at beforehand, its numbers are the same."""
    learner = Learner(problem(optimiser=Optimiser(1e-2, minibatches=2, microbatch_tokens=budget)), 0)
    answers = answers_of([each for group in groups(3) for each in group.trajectories], 0)
    parts = learner._parts(answers, 0)
    looked, values = learner._looked_at(answers, parts, learner.policy, learner.placement.module)
    assert values is None
    for piece in (piece for part in parts for piece in part.pieces):
        seen = answers.rows(piece)
        trained = learner.policy.score(learner.policy.module, seen, 1.0).log_probs.detach()
        assert torch.equal(looked[seen.places][seen.generated], trained[seen.generated])


def test_the_first_version_is_its_own_reference() -> None:
    """KL is 0 and has no gradient there, to the last bit; from then on it has one."""
    plain, near = Learner(problem(), 0), Learner(problem(objective=Objective(kl_coefficient=0.5)), 0)
    found = [groups(seed) for seed in range(2)]
    plain.train(found[0])
    assert near.train(found[0])["kl_reference"] == 0
    assert_same(near.weights(), plain.weights())
    plain.train(found[1])
    assert near.train(found[1])["kl_reference"] > 0
    assert any(not torch.equal(each, plain.weights()[name]) for name, each in near.weights().items())


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_where_nothing_is_earned_the_policy_goes_back_to_its_reference(estimator: Any) -> None:
    """Equal rewards, and answers of its own: only KL has a gradient."""
    objective = Objective(kl_coefficient=1.0, kl_estimator=estimator)
    learner = Learner(problem(objective=objective, optimiser=Optimiser(1e-2)), 0)
    first = learner.weights()
    learner.load_weights({name: each + 0.02 * torch.sin(each * 100) for name, each in first.items()})
    told = [learner.train(on_policy(learner.policy, groups(1, reward=1.0)))["kl_reference"] for _ in range(12)]
    assert told[0] > 0
    assert told[-1] < 0.3 * told[0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_penalty_in_the_reward_is_that_reward(estimator: Any) -> None:
    """The same as training without on rewards from which β · KL(μ ‖ version 0) of each token is taken."""
    objective = Objective(advantages="rloo", kl_coefficient=0.25, kl_in="reward", kl_estimator=estimator)
    learner = Learner(problem(objective=objective, optimiser=SGD), 0)
    plain = Learner(problem(objective=Objective(advantages="rloo"), optimiser=SGD), 0)
    found, policy = groups(5), plain.problem.make_policy(0)

    def shaped(each: Any) -> Any:
        log_probs = next(one for one in on_policy(policy, [replace(found[0], trajectories=(each,))])).trajectories[0]
        x = np.where(each.generated, log_probs.log_probs.astype(np.float64) - each.log_probs, 0.0)
        kl = {"k1": -x, "k2": x**2 / 2, "k3": np.exp(x) - 1 - x}[estimator]
        return replace(each, rewards=(each.rewards - 0.25 * kl).astype(np.float32))

    by_hand = [replace(group, trajectories=tuple(map(shaped, group.trajectories))) for group in found]
    told, expected = learner.train(found), plain.train(by_hand)
    assert_close(learner.weights(), plain.weights(), rtol=1e-5, atol=1e-6)
    assert told["reward_mean"] > expected["reward_mean"], "what is told is what was earned"
    assert told["kl_reference"] != 0
    equal = groups(5, reward=1.0)
    assert learner.train(equal)["groups_equal"] == len(equal), "as they were earned"


def test_tokens_without_a_log_probability_are_not_penalised() -> None:
    found = groups(2, 1, 2)
    unknown = replace(
        found[0], trajectories=tuple(replace(each, log_probs=each.log_probs * np.nan) for each in found[0].trajectories)
    )
    objective = Objective(advantages="rloo", kl_coefficient=0.25, kl_in="reward")
    shaped, mean = penalised([unknown], torch.zeros(sum(map(len, unknown.trajectories))), objective)
    assert shaped[0].trajectories == unknown.trajectories
    assert mean == 0


def test_the_clip_acts_from_the_second_step_on() -> None:
    """The proximal policy stays that of the beginning of the version: at a large rate ratios leave the interval."""
    optimiser = Optimiser(0.05, epochs=3)
    learner = Learner(problem(optimiser=optimiser), 0)
    found = on_policy(learner.policy, groups(3))
    assert learner.train(found)["clipped_share"] > 0.1
    single = Learner(problem(optimiser=replace(optimiser, epochs=1)), 0)
    assert single.train(found)["clipped_share"] == 0


def test_minibatches_are_a_function_of_seed_and_version() -> None:
    def parts(seed: int, version: int) -> list[list[int]]:
        learner = Learner(problem(optimiser=Optimiser(1e-2, minibatches=3)), seed)
        learner.version = version
        seen = []
        step = learner._step
        learner._step = lambda batch, part: (seen.append(part.rows), step(batch, part))[1]  # type: ignore[method-assign]
        learner.train(groups(0, 4, 4))
        return seen

    rows = parts(0, 5)
    assert sorted(map(len, rows)) == [5, 5, 6]
    assert sorted(at for part in rows for at in part) == list(range(16))
    assert rows == parts(0, 5)
    assert rows != parts(0, 6)
    assert rows != parts(1, 5)


def test_training_raises_the_probability_of_better_answers() -> None:
    learner = Learner(problem(optimiser=Optimiser(1e-2)), 0)
    found = on_policy(learner.policy, groups(0, 1, 4, prompt=2, answer=4))
    best = int(np.argmax(found[0].rewards))
    before = on_policy(learner.policy, found)[0].trajectories[best].log_probs.sum()
    for _ in range(5):
        learner.train(found)
    assert on_policy(learner.policy, found)[0].trajectories[best].log_probs.sum() > before + 1


def test_a_critic_learns_the_returns() -> None:
    """Of episodes that always earn 1, whatever is done; cut ones count what the critic says of their end."""
    options = {"environment": Walk(), "policy": Mlp(), "optimiser": Optimiser(1e-2, epochs=4)}
    learner = Learner(problem(objective=Objective(advantages="gae", gamma=1.0), **options), 0)
    found = groups(0, 4, 4, control=True, reward=1.0)
    for _ in range(30):
        learner.train(found)
    batch = answers_of([each for group in found for each in group.trajectories], 0).rows(range(16))
    values = learner.policy.score(learner.policy.module, batch, 1.0).values
    assert values is not None
    assert (values[:, :-1][batch.generated] - 1).abs().max() < 0.2


def test_a_cut_episode_is_worth_what_the_critic_says_of_its_end() -> None:
    objective = Objective(advantages="gae", gamma=0.9, gae_lambda=0.8)
    learner = Learner(double(True, objective=objective, optimiser=SGD), 0)
    (group,) = groups(0, 1, 2, control=True)
    ended = replace(group, trajectories=tuple(replace(each, finish="done") for each in group.trajectories))
    cut = replace(group, trajectories=tuple(replace(each, finish="length") for each in group.trajectories))
    one, other = moved(learner, [ended]), moved(Learner(learner.problem, 0), [cut])
    assert not torch.equal(one["value.weight"], other["value.weight"])


def test_metrics_are_what_was_trained_on() -> None:
    learner = Learner(problem(optimiser=Optimiser(1e-2, warm_up_steps=4, minibatches=2)), 0)
    learner.version = 7
    found = [*groups(0, 2, 3, version=7), *groups(1, 2, 3, version=4)]
    told = learner.train(found)
    trajectories = [each for group in found for each in group.trajectories]
    generated = np.array([each.generated_tokens for each in trajectories])
    assert (told["answers"], told["groups"], told["steps"]) == (12, 4, 2)
    assert told["tokens"] == sum(map(len, trajectories))
    assert told["generated_tokens"] == generated.sum()
    assert told["response_tokens_mean"] == pytest.approx(generated.mean())
    assert told["reward_mean"] == pytest.approx(np.mean([each.reward for each in trajectories]))
    assert told["reward_std"] == pytest.approx(np.std([each.reward for each in trajectories]))
    assert told["token_staleness_mean"] == pytest.approx(3 * generated[6:].sum() / generated.sum())
    assert told["token_staleness_max"] == 3
    assert told["learning_rate"] == pytest.approx(1e-2 * 2 / 4)
    assert 0 < told["entropy"] < np.log(12)
    assert all(type(each) is float and np.isfinite(each) for each in told.values())


def test_a_missing_log_probability_is_counted_and_harms_nothing() -> None:
    (group,) = groups(0, 1)
    first = group.trajectories[0]
    log_probs = np.where(first.generated, np.nan, 0).astype(np.float32)
    group = replace(group, trajectories=(replace(first, log_probs=log_probs), *group.trajectories[1:]))
    learner = Learner(problem(objective=Objective(loss="decoupled")), 0)
    assert learner.train([group])["missing_tokens"] == first.generated_tokens
    assert all(bool(each.isfinite().all()) for each in learner.weights().values())


@pytest.mark.parametrize("optimiser", [Optimiser(1e-2), Optimiser(1e-2, minibatches=2, epochs=2)])
def test_a_gradient_that_is_not_finite_makes_no_step(optimiser: Optimiser) -> None:
    """Weights, moments and counts are as before, also where earlier steps of the version had been made."""
    learner, spared = (Learner(problem(optimiser=optimiser), 0) for _ in range(2))
    for each in (learner, spared):
        each.train(groups(0))
    before, steps = learner.weights(), learner.steps
    last = steps + optimiser.minibatches * optimiser.epochs
    weight = learner.policy.module.lm_head.weight

    def spoilt(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan") if learner.steps == last - 1 else gradient

    hook = weight.register_hook(spoilt)
    with pytest.raises(DivergedError, match=f"^version 2, optimiser step {last}: the norm of the gradient is nan; "):
        learner.train(groups(1))
    hook.remove()
    assert_same(learner.weights(), before)
    assert (learner.version, learner.steps) == (1, steps)
    assert learner.train(groups(2)) == spared.train(groups(2))
    assert_same(learner.weights(), spared.weights())


def test_a_loss_that_is_not_finite_says_so() -> None:
    learner = Learner(problem(), 0)
    with torch.no_grad():
        learner.policy.module.lm_head.weight[3] = float("nan")
    with pytest.raises(DivergedError, match=r"^version 1, optimiser step 1: the loss is nan; the step was not made$"):
        learner.train(groups(0))


def test_a_gradient_is_clipped_to_its_norm() -> None:
    free, bound = (Learner(double(optimiser=replace(SGD, clip_norm=most)), 0) for most in ("none", 1e-3))
    along, clipped = moved(free, groups(0)), moved(bound, groups(0))

    def norm(change: dict[str, torch.Tensor]) -> float:
        return float(torch.stack([each.square().sum() for each in change.values()]).sum().sqrt())

    assert norm(clipped) == pytest.approx(1e-3, rel=1e-3)
    scale = norm(clipped) / norm(along)
    assert_close(clipped, {name: each * scale for name, each in along.items()}, rtol=1e-6, atol=1e-12)


def test_frozen_weights_stay_and_are_not_passed_on() -> None:
    learner = Learner(problem(optimiser=Optimiser(1e-2, trainable=1)), 0)
    module = learner.policy.module
    frozen = {name: each.clone() for name, each in module.named_parameters() if not each.requires_grad}
    own = learner.weights()
    assert not set(frozen) & set(own)
    learner.train(groups(0))
    assert all(torch.equal(each, frozen[name]) for name, each in module.named_parameters() if name in frozen)
    assert not torch.equal(learner.weights()["model.norm.weight"], own["model.norm.weight"])


def test_weights_are_copies() -> None:
    learner = Learner(problem(), 0)
    first = learner.weights()
    kept = {name: each.clone() for name, each in first.items()}
    learner.train(groups(0))
    assert_same(first, kept)
    learner.load_weights(first)
    assert_same(learner.weights(), kept)
    with pytest.raises(ValueError, match="'x' is not of this policy"):
        learner.load_weights({"x": torch.zeros(1)})


def test_in_bf16_forward_passes_only_are_coarse() -> None:
    fine, coarse = (Learner(problem(optimiser=replace(SGD, precision=kind)), 0) for kind in ("no", "bf16"))
    one, other = moved(fine, groups(0)), moved(coarse, groups(0))
    assert all(each.dtype == torch.float32 for each in other.values())
    assert_close(other, one, rtol=0.2, atol=0.02)
    assert any(not torch.equal(each, one[name]) for name, each in other.items())


def test_groups_that_cannot_be_trained_are_refused() -> None:
    learner = Learner(problem(), 0)
    with pytest.raises(ValueError, match="at least one answer"):
        learner.train([])
    with pytest.raises(ValueError, match="a control policy scores observations"):
        Learner(problem(environment=Walk(), policy=Mlp()), 0).train(groups(0))
    with pytest.raises(ValueError, match="the reward is nan"):
        learner.train(groups(0, reward=float("nan")))
    assert learner.version == 0


def test_the_accelerator_must_have_the_same_precision() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    try:
        with pytest.raises(ValueError, match="precision is 'bf16' and the accelerator's mixed_precision 'no'"):
            Learner(problem(optimiser=Optimiser(1e-2, precision="bf16")), 0, accelerator=Accelerator(cpu=True))
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()


def test_fsdp_that_accelerate_would_leave_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    ddp: Any = SimpleNamespace(
        mixed_precision="no",
        num_processes=2,
        is_fsdp2=False,
        distributed_type=SimpleNamespace(value="MULTI_CPU"),
    )
    with pytest.raises(ValueError, match=r"FSDP was asked for, and Accelerate made MULTI_CPU of it; fsdp_version = 2"):
        Learner(problem(), 0, accelerator=ddp)


def test_without_a_critic_gae_is_the_reward_to_go() -> None:
    """With γ = λ = 1 every token of an answer has its reward for advantage."""
    found = groups(0)
    gae, reward = (
        Learner(problem(objective=Objective(advantages=kind, normalise="batch")), 0) for kind in ("gae", "reward")
    )
    assert gae.train(found)["loss"] == pytest.approx(reward.train(found)["loss"])
    assert_close(gae.weights(), reward.weights())


def test_the_whole_policy_of_one_process_is_the_policy() -> None:
    learner = Learner(problem(), 0)
    assert learner.whole_policy() is learner.policy


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_through_accelerate_alone_nothing_changes(tmp_path: Path, precision: Any) -> None:
    """To the last bit; its tracker has the metrics."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    optimiser = Optimiser(1e-2, precision=precision, minibatches=2, microbatch_tokens=40)
    plain = Learner(problem(optimiser=optimiser), 0)
    try:
        accelerator = Accelerator(
            cpu=True,
            mixed_precision=precision,
            log_with="tensorboard",
            project_dir=tmp_path,
            gradient_accumulation_steps=3,
        )
        accelerator.init_trackers("test")
        learner = Learner(problem(optimiser=optimiser), 0, accelerator=accelerator)
        told = [learner.train(groups(seed)) for seed in range(2)]
        assert told == [plain.train(groups(seed)) for seed in range(2)]
        assert_same(learner.weights(), plain.weights())
        accelerator.end_training()
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
    (file,) = tmp_path.rglob("events.out.tfevents*")
    events = EventAccumulator(str(file.parent)).Reload().Scalars("reward_mean")
    assert [(each.step, each.value) for each in events] == [
        (at, pytest.approx(each["reward_mean"])) for at, each in enumerate(told, 1)
    ]
