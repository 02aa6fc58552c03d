"""What generating and training cost each other on this machine: each timed alone, and side by side.

A property of the machine and of the work, measured apart from any run that is to be predicted. One process trains on
one batch again and again, as many as the run has workers generate, and rounds of both alone and together follow each
other, so that a machine's mood of some seconds is in all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import pi, sqrt
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from fedasync.runs.run import write
from fedasync.studies.errors import StudyError
from fedasync.studies.rollout_fits import Floats, Mean

Role = Literal["generate", "train"]
ROUNDS = 20
WINDOW_S = 0.5
"""Each state of each round is watched so long at least, and for `LEAST_STEPS` steps."""
LEAST_STEPS = 4
TABLES = ("task", "policy", "sampling", "objective", "optimiser")


@dataclass(frozen=True)
class Probed:
    """How many times as long an iteration takes beside training (``servers``), and a step beside generation.

    ``iteration_s`` and ``step_s`` are of each alone.
    """

    servers: Mean
    trainer: Mean
    iteration_s: Mean
    step_s: Mean

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, (json.dumps(asdict(self), indent=1) + "\n").encode())

    @classmethod
    def read(cls, file: Path) -> Probed:
        """Raises StudyError for a file that is none."""
        try:
            told = json.loads(file.read_text("utf-8"))
            return cls(*(Mean(**told[name]) for name in ("servers", "trainer", "iteration_s", "step_s")))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StudyError(f"{file}: no result of a probe ({error}); remove it, and it is made again") from None


def probe(config: Mapping[str, Any], where: str) -> Probed:
    """Time iterations and steps of a real run's configuration, alone and side by side. Takes about half a minute.

    Raises StudyError where it is not one of a real run, and where a process of it fails.
    """
    if "task" not in config or "processes" not in config:
        raise StudyError(
            f"{where}: a probe needs the [task] and the [processes] of a real run; a simulated one has none"
        )
    if config["processes"].get("remote_workers"):
        raise StudyError(f"{where}: a probe measures one machine, and this run has workers on others; leave it out")
    workers = int(config["processes"].get("workers", 1))
    batch, most = _batch(config), int(config["processes"].get("max_running", 64))
    told = {
        "tables": {table: config[table] for table in TABLES if table in config},
        "seed": int(config.get("seed", 0)),
        "answers": int(config["prompts"]["answers"]),
        "batch": batch,
        "threads": int(config["processes"].get("threads", 1)),
        "running": max(1, min(most, batch * int(config["prompts"]["answers"]) // workers)),
    }
    with ExitStack() as stack:
        trainer = stack.enter_context(_Child("train", told))
        generators = [stack.enter_context(_Child("generate", {**told, "number": i})) for i in range(workers)]
        for child in (trainer, *generators):
            child.hear()
        rough_s = _watch([trainer], WINDOW_S)[0]
        window_s = max(WINDOW_S, LEAST_STEPS * rough_s)
        rows = []
        for _ in range(ROUNDS):
            iteration_s = float(np.mean(_watch(generators, window_s)))
            step_s = _watch([trainer], window_s)[0]
            beside_s, *others = _watch([trainer, *generators], window_s)
            rows.append((float(np.mean(others)) / iteration_s, beside_s / step_s, iteration_s, step_s))
    return Probed(*(_median(np.array(column)) for column in zip(*rows, strict=True)))


def _median(values: Floats) -> Mean:
    """Of rounds, some of which the machine may have had other work in; its standard error as for normal values."""
    mean = Mean.of(values)
    error = None if mean.standard_error is None else sqrt(pi / 2) * mean.standard_error
    return Mean(float(np.median(values)), error, mean.count, mean.spread)


def _batch(config: Mapping[str, Any]) -> int:
    strategy = config["strategy"]
    return int(strategy.get("batch") or strategy.get("mini_batch") or 16)


class _Child:
    """A process that does one of the two for a while when it is told to, and says how long each step of it took."""

    def __init__(self, role: Role, told: Mapping[str, Any]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(told["threads"]), "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fedasync.studies.contention_probe", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._role = role
        self.tell(told)

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def tell(self, what: Mapping[str, Any]) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(what) + "\n")
            pipe.flush()
        except BrokenPipeError:
            raise StudyError(f"the probe's process that was to {self._role} has ended", 1) from None

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise StudyError(f"the probe's process that was to {self._role} has ended; its words are above", 1)
        found: dict[str, Any] = json.loads(line)
        return found


def _watch(children: list[_Child], window_s: float) -> list[float]:
    """Seconds of a step of each, the middle ones, while all of them are at work."""
    from_s = time.monotonic() + 0.02
    for child in children:
        child.tell({"from_s": from_s, "until_s": from_s + window_s})
    return [float(child.hear()["step_s"]) for child in children]


# -- in the processes ----------------------------------------------------------------------------------------------


def serve(role: Role, source: IO[str], sink: IO[str]) -> None:
    """Make what is to be timed, and time it whenever a line says from when until when."""
    told = json.loads(source.readline())
    step = _generator(told) if role == "generate" else _learner(told)
    step()  # whatever the first one does beside

    def say(what: Mapping[str, Any]) -> None:
        sink.write(json.dumps(what) + "\n")
        sink.flush()

    say({"ready": True})
    for line in source:
        window = json.loads(line)
        say({"step_s": timed(step, window["from_s"], window["until_s"])})


def timed(
    step: Callable[[], object], from_s: float, until_s: float, clock: Callable[[], float] = time.monotonic
) -> float:
    """The median second of the steps that ended in time (of the first, where none did)."""
    time.sleep(max(0.0, from_s - clock()))
    before_s = clock()
    steps_s: list[float] = []
    while before_s < until_s:
        step()
        now_s = clock()
        if now_s <= until_s or not steps_s:
            steps_s.append(now_s - before_s)
        before_s = now_s
    return float(np.median(steps_s)) if steps_s else 0.0


def _problem(told: Mapping[str, Any]) -> Any:
    import torch

    from fedasync.studies.problem_tables import build_problem

    torch.set_num_threads(told["threads"])
    return build_problem(told["tables"], "probe")


def _generator(told: Mapping[str, Any]) -> Callable[[], object]:
    """A decoding step of an engine that always has as many answers to generate."""
    from fedasync.rl.engine import Request
    from fedasync.rl.engines import engine_of

    problem = _problem(told)
    prompts = problem.environment.prompts or 1 << 30
    engine = engine_of(problem, problem.make_policy(told["seed"]), told["seed"], max_running=told["running"])
    asked = 0

    def step() -> None:
        nonlocal asked
        missing = told["running"] - engine.running - engine.waiting
        if missing > 0:
            first = 1_000_000 * told["number"] + asked
            engine.submit([Request(first + i, (first + i) % prompts, 0, 0) for i in range(missing)])
            asked += missing
        engine.step()
        engine.take_iterations()

    return step


def _learner(told: Mapping[str, Any]) -> Callable[[], object]:
    """A step of a learner on one batch of its own answers."""
    from fedasync.rl.engine import Request
    from fedasync.rl.engines import answers
    from fedasync.rl.episodes import Start
    from fedasync.rl.learner import Learner
    from fedasync.rl.trajectory import Group

    problem = _problem(told)
    count, size = told["batch"], told["answers"]
    prompts = problem.environment.prompts or 1 << 30
    policy = problem.make_policy(told["seed"])
    starts = [Start(Request(i, (i // size) % prompts, 0, i % size)) for i in range(count * size)]
    found = answers(policy, starts, 0, problem.environment, problem.sampling, told["seed"])
    groups = []
    for lease in range(count):
        own = [one.trajectory for one in found[lease * size : (lease + 1) * size] if one.trajectory is not None]
        if own:
            groups.append(Group(lease, lease % prompts, 0, tuple(own), size))
    learner = Learner(problem, told["seed"])
    return lambda: learner.train(groups)


if __name__ == "__main__":
    serve("generate" if sys.argv[1] == "generate" else "train", sys.stdin, sys.stdout)
