"""A real run on prompts from its parts to its tables, on processes of this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedasync.core import Strategy
from fedasync.federated.result import BrokenLawError
from fedasync.runs.record import Record
from fedasync.runs.rollout_summary import broken_laws, rollout_summary
from fedasync.runs.rollouts import rollouts_frame
from fedasync.runs.run import Run
from fedasync.trainer.addresses import free_port
from fedasync.trainer.channels import ChannelSpec
from fedasync.trainer.child_settings import ChildSettings
from fedasync.trainer.controller import HOPELESS, Controller
from fedasync.trainer.link import Listener
from fedasync.trainer.processes import LocalProcesses
from fedasync.trainer.run_state import RunState
from fedasync.trainer.settings import ProcessSettings, PromptSettings, RunSettings

if TYPE_CHECKING:
    import polars as pl

POLICY, FAILURES = "policy", "failures.log"
"""In the folder of a run: the trainer's last state, and what went wrong, a line each."""

Told = Callable[[int, Mapping[str, float]], object]
"""Called with a version and metrics of it as they become known."""


def _nothing(version: int, metrics: Mapping[str, float]) -> None:
    pass


@dataclass(frozen=True)
class TrainerRequest:
    """What a run is to be.

    ``problem`` are the tables [task], [policy], [sampling], [objective] and [optimiser], which every process reads;
    ``task_prompts`` is the size of the task's data set (None: without end).
    """

    strategy: Strategy
    problem: Mapping[str, Any]
    task_prompts: int | None
    prompts: PromptSettings
    processes: ProcessSettings
    settings: RunSettings
    seed: int = 0
    target: Mapping[str, float] = field(default_factory=dict)
    name: str | None = None
    study: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    engine: Mapping[str, Any] | None = None
    """A completions server that generates in place of the workers' own engines."""
    where: str = "the problem"

    def make(self, folder: Path, told: Told = _nothing) -> Run:
        """Run it in ``folder``, where it goes on from its newest checkpoint if there is one.

        Leaves ``policy/``, ``failures.log`` and ``logs/`` there. Raises TrainerFailedError, LostProcessError,
        CheckpointError, and BrokenLawError for a run that contradicts itself.
        """
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.absolute()
        processes, place = self.processes, folder / "weights"
        over_network = processes.channel == "distributed"
        settings = ChildSettings(
            self.problem,
            self.where,
            self.seed,
            ChannelSpec(processes.channel, f"127.0.0.1:{free_port()}" if over_network else str(place)),
            max_running=processes.max_running,
            reward_timeout_s=processes.reward_timeout_s,
            evaluation_prompts=self.settings.evaluation_prompts,
            engine=self.engine,
            tracker=processes.tracker,
            tracker_folder=str(folder / "tracker"),
        )
        with (
            Listener() as listener,
            LocalProcesses(folder, listener.address, listener.authkey, settings, threads=processes.threads) as children,
            RunState(folder) as state,
        ):
            controller = Controller(
                self.strategy,
                self.task_prompts,
                self.prompts,
                processes,
                self.settings,
                self.seed,
                state,
                listener,
                children,
                told,
            )
            children.start_ranks(processes.ranks)
            for number in range(processes.workers):
                children.start_worker(number)
            try:
                ended = controller.make(folder / POLICY)
                if not ended.startswith(HOPELESS):
                    children.wait(5.0)
            finally:
                lines = [f"{each.time_s:.3f} s: {each.what}\n" for each in controller.incidents]
                (folder / FAILURES).write_text("".join(lines), "utf-8")
                shutil.rmtree(place, ignore_errors=True)
            return finished_run(self, controller, state, ended)


def finished_run(request: TrainerRequest, controller: Controller, state: RunState, ended: str) -> Run:
    """The run with its tables and its verdict on itself. Raises BrokenLawError."""
    controller.write_unfinished()
    controller.log.flush()
    record = Record()
    record.write(state.events.rows().tobytes())
    record.reasons = list(controller.log.reasons)
    answers, iterations = state.answers.rows(), state.iterations.rows()
    answers = answers[np.lexsort((answers["answer"], answers["lease"]))]
    rollouts = rollouts_frame({name: answers[name] for name in answers.dtype.names or ()})
    metrics = controller.time.steps.table()
    settings, end_s = request.settings, controller.now
    summary: dict[str, Any] = {
        "run_id": request.name or f"{request.strategy.name}-seed{request.seed}",
        "study": request.study,
        "seed": request.seed,
        "labels": dict(request.labels),
        "timing_only": False,
        "runtime": "processes",
        **rollout_summary(
            controller.driver.coordinator,
            record,
            rollouts,
            metrics,
            end_s=end_s,
            ended=ended,
            training_s=controller.time.steps.training_s,
            warm_up_versions=settings.warm_up_versions,
            prompts=request.task_prompts,
            epochs=request.prompts.epochs,
            target=request.target,
            incidents=[asdict(incident) for incident in controller.incidents],
        ),
        "shares": _shares(controller.time.spent_s, iterations, end_s, request.processes.workers),
        "failures": controller.failures,
        "restarts": controller.restarts,
    }
    if broken := broken_laws(summary):
        raise BrokenLawError(f"the run breaks its own laws: {'; '.join(broken)}")
    tables = {"metrics": metrics, "rollouts": rollouts, "iterations": _frame(iterations)}
    return Run(request.config or {}, summary, tables, record=record)


def _shares(
    trainer_s: Mapping[str, float], iterations: NDArray[Any], end_s: float, workers: int
) -> dict[str, dict[str, float]]:
    """Shares of the trainer's time, and of workers × time."""
    whole_s = max(end_s, 1e-9)
    trainer = {what: seconds / whole_s for what, seconds in trainer_s.items() if what != "lost"}
    trainer["waiting"] += max(0.0, 1.0 - sum(trainer.values()))  # since the last step
    area_s = whole_s * workers
    servers = {
        "decoding": float(iterations["seconds"].sum()) / area_s,
        "prefilling": float(iterations["prefill_s"].sum()) / area_s,
    }
    servers["idle"] = max(0.0, 1.0 - sum(servers.values()))
    return {"trainer": trainer, "servers": servers}


def _frame(rows: NDArray[Any]) -> pl.DataFrame:
    import polars as pl

    return pl.DataFrame({name: np.ascontiguousarray(rows[name]) for name in rows.dtype.names or ()})
