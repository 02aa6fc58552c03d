"""Which prompts are given up: those whose groups failed by their own fault so often as may be, and no others."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.core import Coordinator, Lease, Published, Step
from fedasync.rl.group_driver import CRASHED, TOO_LONG, GroupDriver
from fedasync.rl.partial_groups import AllowShort, PartialGroups, Refill, RequireFull
from fedasync.rl.prompt_order import PromptOrder
from fedasync.rl.prompt_queue import Asked, PromptQueue
from fedasync.strategies import areal

ANSWERS = 2
Loss = Literal["own", "other"]
"""Whose fault it is that an attempt loses an answer: the prompt's, or that of those who generate."""


class Runtime:
    """Whoever generates: each attempt of a prompt goes as it is scripted, and well where nothing is."""

    holds_up = False

    def __init__(self, script: Mapping[int, Sequence[Loss]], policy: PartialGroups, most_attempts: int) -> None:
        self.script = script
        self.waiting: list[tuple[int, Asked]] = []
        self.asked: list[Asked] = []
        self.trained: list[int] = []
        self.notes: list[str] = []
        self.step: Step | None = None
        order = PromptOrder(len(script), 1, shuffle=False, seed=0)
        queue = PromptQueue(order, most_attempts)
        self.coordinator = Coordinator(areal(batch=1, eta=2))
        self.driver = GroupDriver(self.coordinator, queue, ANSWERS, self, partial_groups=policy)

    def start(self, lease: Lease, asked: Asked, now: float) -> str | None:
        self.waiting.append((lease.id, asked))
        self.asked.append(asked)
        return None

    def again(self, answer: int, now: float) -> None:
        """It comes at the next look, with its group."""

    def stop(self, leases: Sequence[int], left_out: Container[int], now: float) -> None: ...

    def delivers(self, lease: int, left_out: Collection[int], now: float) -> str | None:
        return None

    def dropped(self, lease: int) -> None:
        raise AssertionError("nothing is dropped here")

    def take(self, step: Step, now: float) -> None:
        self.step = step

    def publish(self, event: Published, now: float) -> None: ...

    def note(self, what: str) -> None:
        self.notes.append(what)

    def explain(self) -> str:
        return ""

    def play(self) -> None:
        """Until there is nothing to do."""
        self.driver.fill(0.0)
        while self.waiting or self.step is not None:
            if self.step is not None:
                self.trained += [arrival.lease.worker for arrival in self.step.entering]
                self.step = None
                self.driver.handle(self.driver.commit(0.0), 0.0)
            elif self.waiting:
                self._attempt(*self.waiting.pop(0))
            self.driver.fill(0.0)

    def _attempt(self, lease: int, asked: Asked) -> None:
        losses = self.script[asked.prompt]
        if asked.attempt < len(losses):
            own = losses[asked.attempt] == "own"
            self.driver.lose(lease * ANSWERS, "raised" if own else "worker died", 0.0, own_fault=own)
        for index in range(ANSWERS):
            self.driver.complete(lease * ANSWERS + index, 0.0)


def foreseen(losses: Sequence[Loss], policy: PartialGroups, most_attempts: int) -> tuple[bool, int]:
    """Whether a prompt is trained in the end, and how often it is asked."""
    own = 0
    for attempt, loss in enumerate(losses, 1):
        if loss == "other" and isinstance(policy, Refill):
            return True, attempt  # the answer is generated again within the attempt
        own += loss == "own"
        if own == most_attempts:
            return False, attempt
    return True, len(losses) + 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["own", "other"]), max_size=6), min_size=1, max_size=5),
    st.sampled_from([RequireFull(), AllowShort(ANSWERS), Refill()]),
    st.integers(1, 3),
)
def test_a_prompt_is_given_up_after_so_many_failures_of_its_own_and_never_for_those_of_others(
    losses: list[list[Loss]], policy: PartialGroups, most_attempts: int
) -> None:
    runtime = Runtime(dict(enumerate(losses)), policy, most_attempts)
    runtime.play()
    fates = {prompt: foreseen(each, policy, most_attempts) for prompt, each in enumerate(losses)}
    assert sorted(runtime.trained) == [prompt for prompt, (trained, _) in fates.items() if trained]
    for prompt, (_, times) in fates.items():
        assert sum(asked.prompt == prompt for asked in runtime.asked) == times
    given_up = sorted(int(note.split()[1]) for note in runtime.notes)
    assert given_up == [prompt for prompt, (trained, _) in fates.items() if not trained]
    assert runtime.coordinator.ledger.imbalance == 0


@pytest.mark.parametrize("policy", [RequireFull(), AllowShort(ANSWERS)], ids=lambda policy: policy.kind)
def test_workers_that_die_a_hundred_times_cost_no_prompt(policy: PartialGroups) -> None:
    runtime = Runtime({0: ["other"] * 100, 1: []}, policy, most_attempts=1)
    runtime.play()
    assert sorted(runtime.trained) == [0, 1]
    assert not runtime.notes


def test_who_is_given_up_is_told_with_whose_faults() -> None:
    runtime = Runtime({0: ["own", "own"], 1: ["other", "own", "other", "own"]}, RequireFull(), most_attempts=2)
    runtime.play()
    assert runtime.notes == [
        "prompt 0 is given up after 2 attempts",
        "prompt 1 is given up after 4 attempts, 2 of which failed by its own fault",
    ]


def test_a_short_group_that_an_own_fault_made_too_short_is_a_failure_of_its_own() -> None:
    """Whoever lost the other answer."""
    for order in ((True, False), (False, True), (False, False)):
        runtime = Runtime({0: []}, AllowShort(1), most_attempts=1)
        runtime.driver.fill(0.0)
        ((lease, _),) = runtime.waiting[:1]
        for index, own in enumerate(order):
            runtime.driver.lose(lease * ANSWERS + index, "lost", 0.0, own_fault=own)
        assert bool(runtime.notes) == any(order)


def test_a_lost_answer_that_came_in_the_end_is_forgotten() -> None:
    """The next failure of its prompt is looked at by itself."""
    runtime = Runtime({0: ["other"]}, Refill(), most_attempts=1)
    runtime.play()
    assert runtime.trained == [0]
    assert not runtime.driver._own_fault


@pytest.mark.parametrize(("reason", "notes"), [("timeout", 1), (CRASHED, 0), (TOO_LONG, 0)])
def test_groups_that_end_without_a_lost_answer(reason: str, notes: int) -> None:
    """One that took too long is taken for its prompt's; one whose run crashed for nobody's; a long prompt goes."""
    runtime = Runtime({0: []}, RequireFull(), most_attempts=1)
    runtime.driver.fill(0.0)
    (lease, _) = runtime.waiting.pop()
    runtime.driver.handle(runtime.coordinator.fail(lease, reason, 0.0), 0.0)
    assert len(runtime.notes) == notes
    runtime.driver.fill(0.0)
    assert len(runtime.asked) == (2 if reason == CRASHED else 1)
