"""Runs of a cluster as a runtime would leave them, made by a plain heap loop: events, rollouts, metrics, summary."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from fedasync.runs.cluster_measures import told_by_rollouts
from fedasync.runs.rollouts import TYPES, rollouts_frame
from fedasync.runs.rows import chunks_of
from fedasync.runs.run import Run
from fedasync.runs.summary import told_by_the_log

EVENTS = {
    "time_s": pl.Float64,
    "kind": pl.String,
    "lease": pl.Int64,
    "worker": pl.Int64,
    "base_version": pl.Int64,
    "version": pl.Int64,
    "staleness": pl.Int64,
    "reason": pl.String,
}
METRICS = {"time_s": pl.Float64, "version": pl.Int64, "name": pl.String, "value": pl.Float64}


@dataclass
class Answer:
    """One answer of a group: what it is to generate, and where it is."""

    lease: int
    number: int
    tokens: int
    start_s: float | None = None
    end_s: float | None = None
    stop_s: float | None = None
    server: int = -1


@dataclass
class Group:
    prompt: int
    base: int
    answers: list[Answer] = field(default_factory=list)
    place: str = "in flight"


@dataclass
class Cluster:
    """A cluster without costs: ``servers`` × ``running`` sequences at ``speed`` tokens a second, whatever the load.

    A version is made of ``batch`` groups of ``answers``, in ``train_s``; every ``every``-th is published, and a server
    takes it ``delay_s`` × (1 + its number) later. Admission: accepted and in flight ≤ (eta + version + 1) · batch.
    A group older than ``most_stale`` at delivery is rejected (``requeue``: its prompt goes out again), with ``abort``
    it is cancelled in flight at the commit that makes it so old. ``short``: it is delivered without its last answer.
    """

    seed: int = 0
    servers: int = 4
    running: int = 4
    answers: int = 4
    batch: int = 3
    eta: int = 1
    sigma: float = 1.0
    mean_tokens: float = 400.0
    speed: float = 100.0
    train_s: float = 4.0
    every: int = 1
    delay_s: float = 0.1
    most_stale: int | None = None
    abort: bool = False
    requeue: bool = False
    short: bool = False
    prompts: int | None = None
    versions: int = 40

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.now, self.version, self.published = 0.0, 0, 0
        self.rows: list[tuple[Any, ...]] = []
        self.metrics: list[tuple[float, int, str, float]] = []
        self.groups: list[Group] = []
        self.heap: list[tuple[float, int, Any]] = []
        self.tie = 0
        self.queue: deque[Answer] = deque()
        self.again: deque[int] = deque()
        self.next_prompt = 0
        self.free = [self.running] * self.servers
        self.loads: list[list[tuple[float, int]]] = [[(0.0, 0)] for _ in range(self.servers)]
        self.waiting: list[int] = []
        self.step: list[int] | None = None
        self.free_since = self.trained_s = 0.0
        self.last_commit = 0.0
        self.publications = self.accepted = 0

    def _later(self, time_s: float, what: Any) -> None:
        self.tie += 1
        heapq.heappush(self.heap, (time_s, self.tie, what))

    def _row(self, kind: str, lease: int | None = None, reason: str | None = None) -> None:
        if lease is None:
            self.rows.append((self.now, kind, None, None, None, self.version, None, None))
            return
        group = self.groups[lease]
        version = group.base if kind == "admitted" else self.version
        staleness = None if kind == "admitted" else version - group.base
        self.rows.append((self.now, kind, lease, group.prompt, group.base, version, staleness, reason))

    def _admit(self) -> None:
        flying = sum(group.place == "in flight" for group in self.groups[-500:])
        while self.accepted + flying < (self.eta + self.version + 1) * self.batch:
            if self.again:
                prompt = self.again.popleft()
            elif self.prompts is None or self.next_prompt < self.prompts:
                prompt, self.next_prompt = self.next_prompt, self.next_prompt + 1
            else:
                return
            group = Group(prompt, self.published)
            lease = len(self.groups)
            lengths = self.rng.lognormal(np.log(self.mean_tokens) - self.sigma**2 / 2, self.sigma, self.answers)
            group.answers = [Answer(lease, j, max(1, int(n))) for j, n in enumerate(lengths)]
            self.groups.append(group)
            self._row("admitted", lease)
            self.queue.extend(group.answers)
            flying += 1
        self._start()

    def _start(self) -> None:
        while self.queue and max(self.free) > 0:
            answer = self.queue.popleft()
            answer.server = int(np.argmax(self.free))
            self.free[answer.server] -= 1
            answer.start_s = self.now
            self._later(self.now + answer.tokens / self.speed, answer)

    def _stop(self, group: Group) -> None:
        for answer in group.answers:
            if answer.start_s is None:
                self.queue.remove(answer)
            elif answer.end_s is None and answer.stop_s is None:
                answer.stop_s = self.now
                self.free[answer.server] += 1

    def _end(self, lease: int, kind: str, reason: str | None = None) -> None:
        group = self.groups[lease]
        self._row(kind, lease, reason)
        group.place = kind
        self._stop(group)
        if kind in ("rejected", "cancelled"):
            if self.requeue:
                self.again.append(group.prompt)
        elif kind == "delivered":
            self.accepted += 1
            self.waiting.append(lease)

    def _train(self) -> None:
        if self.step is None and len(self.waiting) >= self.batch:
            self.step, self.waiting = self.waiting[: self.batch], self.waiting[self.batch :]
            self.trained_s = self.now
            self._later(self.now + self.train_s, "commit")

    def _commit(self) -> None:
        assert self.step is not None
        for lease in self.step:
            self._row("consumed", lease)
            self.groups[lease].place = "consumed"
        trained = [a for lease in self.step for a in self.groups[lease].answers if a.end_s is not None]
        self.version += 1
        self._row("committed")
        if self.version % self.every == 0:
            self.published = self.version
            self.publications += 1
            self._row("published")
            for server, loads in enumerate(self.loads):
                loads.append((self.now + self.delay_s * (1 + server), self.version))
        tokens = float(sum(answer.tokens + 50 for answer in trained))
        step_s = self.now - self.last_commit
        values = {
            "step_s": step_s,
            "train_s": self.train_s,
            "wait_s": self.trained_s - self.free_since,
            "sync_s": 0.0,
            "tokens": tokens,
            "tokens_per_second": tokens / step_s,
            "staleness_mean": float(np.mean([self.version - 1 - self.groups[lease].base for lease in self.step])),
            "staleness_max": float(max(self.version - 1 - self.groups[lease].base for lease in self.step)),
            "groups": float(len(self.step)),
            "publications": float(self.publications),
            "checks": 0.0,
        }
        self.metrics.extend((self.now, self.version, name, value) for name, value in values.items())
        self.step, self.last_commit, self.free_since = None, self.now, self.now
        if self.abort and self.most_stale is not None:
            for lease, group in enumerate(self.groups):
                if group.place == "in flight" and self.version - group.base > self.most_stale:
                    self._end(lease, "cancelled", "stale")

    def play(self) -> Cluster:
        """Until the last version, until nothing is left to do, or until far too many groups were lost."""
        self._admit()
        most = 40 * self.versions * self.batch  # nothing comes of a bound that all work has passed when it starts
        while self.heap and self.version < self.versions and len(self.groups) < most:
            self.now, _, what = heapq.heappop(self.heap)
            if what == "commit":
                self._commit()
            elif what.stop_s is None:
                what.end_s = self.now
                self.free[what.server] += 1
                group = self.groups[what.lease]
                left = sum(answer.end_s is None for answer in group.answers)
                if left <= self.short and group.place == "in flight":
                    stale = self.most_stale is not None and self.version - group.base > self.most_stale
                    self._end(what.lease, "rejected" if stale else "delivered", "stale" if stale else None)
            self._train()
            self._admit()
        return self

    # -- what a runtime leaves ---------------------------------------------------------------------------------

    @property
    def events(self) -> pl.DataFrame:
        return pl.DataFrame(self.rows, schema=EVENTS, orient="row")

    def stretches(self, answer: Answer) -> list[tuple[float, int]]:
        """Seconds under each version, in order."""
        assert answer.start_s is not None
        end = next(s for s in (answer.end_s, answer.stop_s, self.now) if s is not None)
        loads = [*self.loads[answer.server], (float("inf"), -1)]
        cut = [
            (min(after, end) - max(begin, answer.start_s), version)
            for (begin, version), (after, _) in pairwise(loads)
            if begin < end and after > answer.start_s
        ]
        return cut or [(0.0, next(v for (b, v), (a, _) in pairwise(loads) if b <= answer.start_s < a))]

    @property
    def rollouts(self) -> pl.DataFrame:
        started = [answer for group in self.groups for answer in group.answers if answer.start_s is not None]
        rows = []
        for answer in started:
            group = self.groups[answer.lease]
            parts = self.stretches(answer)
            whole = sum(seconds for seconds, _ in parts)
            versions = [version for _, version in parts]
            mean = sum(s * v for s, v in parts) / whole if whole else float(versions[0])
            rows.append(
                {
                    "lease": answer.lease,
                    "prompt": group.prompt,
                    "answer": answer.number,
                    "prompt_tokens": 50,
                    "generated_tokens": answer.tokens if answer.end_s is not None else int(whole * self.speed),
                    "lost_tokens": 0,
                    "turns": 1,
                    "start_s": answer.start_s,
                    "end_s": np.nan if answer.end_s is None else answer.end_s,
                    "server": answer.server,
                    "base_version": group.base,
                    "first_version": versions[0],
                    "last_version": versions[-1],
                    "mean_version": min(max(mean, versions[0]), versions[-1]),
                    "segments": len(parts),
                }
            )
        return rollouts_frame({name: [row[name] for row in rows] for name in rows[0]})

    @property
    def metric_table(self) -> pl.DataFrame:
        return pl.DataFrame(self.metrics, schema=METRICS, orient="row")

    @property
    def ledger(self) -> dict[str, Any]:
        places = Counter(group.place for group in self.groups)
        reasons = {kind: {"stale": places[kind]} if places[kind] else {} for kind in ("rejected", "cancelled")}
        return {
            "admitted": len(self.groups),
            "in_flight": places["in flight"],
            "buffered": places["delivered"],
            "consumed": places["consumed"],
            "failed": {},
            **reasons,
            "ignored": 0,
        }

    def run(self, strategy: str = "areal", labels: dict[str, str] | None = None, warm_up_versions: int = 0) -> Run:
        """The finished run with its summary."""
        if not self.rows:
            self.play()
        events, rollouts, metrics = self.events, self.rollouts, self.metric_table
        started = [answer for group in self.groups for answer in group.answers if answer.start_s is not None]
        busy = sum(seconds for answer in started for seconds, _ in self.stretches(answer))
        decoding = busy / (self.now * self.servers * self.running)
        training = self.version * self.train_s / self.now
        told = told_by_the_log(
            chunks_of(events), self.ledger, metrics, end_s=self.now, slots=1 << 62, server_busy_s=training * self.now
        )
        by_rollouts = told_by_rollouts(
            events, rollouts, metrics, end_s=self.now, warm_up_versions=warm_up_versions, prompts=self.prompts, epochs=1
        )
        told["verdicts"] += by_rollouts.pop("verdicts")
        final = {name: value for _, _, name, value in self.metrics[-11:]}
        summary = {
            "run_id": f"{strategy}-seed{self.seed}",
            "study": "synthetic",
            "seed": self.seed,
            "labels": labels or {},
            "strategy": strategy,
            "timing_only": True,
            "time_s": self.now,
            "ended": "versions",
            "versions": self.version,
            "admitted": len(self.groups),
            "consumed": self.ledger["consumed"],
            "ledger": self.ledger,
            **told,
            "final": final,
            "best": final,
            "publications": self.publications,
            "checks": 0,
            "shares": {
                "trainer": {
                    "training": training,
                    "syncing": 0.0,
                    "switching": 0.0,
                    "waiting": 1 - training,
                    "down": 0.0,
                },
                "servers": {
                    "decoding": decoding,
                    "prefilling": 0.02 * (1 - decoding),
                    "paused": 0.0,
                    "down": 0.0,
                    "idle": 0.98 * (1 - decoding),
                },
            },
            "rollouts": by_rollouts,
            "unfit": [],
            "unfit_total": 0,
            "closed_forms": [],
        }
        return Run({}, summary, {"events": events, "metrics": metrics, "rollouts": rollouts})


def rollouts(*rows: dict[str, Any]) -> pl.DataFrame:
    """A table of rows that say what matters; the rest is of version 0, server 0 and time 0."""
    usual = {
        **dict.fromkeys(
            ("answer", "prompt_tokens", "lost_tokens", "server", "base_version", "first_version", "last_version"), 0
        ),
        **dict.fromkeys(("generated_tokens", "turns", "segments"), 1),
        "start_s": 0.0,
    }
    full = [{**usual, "prompt": row["lease"], "mean_version": row.get("first_version", 0), **row} for row in rows]
    return rollouts_frame({name: [row[name] for row in full] for name in TYPES})
