"""A real run on prompts from its parts to its tables, on processes of this machine and workers of others."""

from __future__ import annotations

import errno
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedasync.core import Strategy
from fedasync.federated.result import BrokenLawError
from fedasync.runs.busy_servers import servers_s
from fedasync.runs.lease_arrays import lease_arrays
from fedasync.runs.record import Record
from fedasync.runs.rollout_summary import broken_laws, rollout_summary
from fedasync.runs.rollouts import rollouts_frame
from fedasync.runs.run import Run
from fedasync.runs.time_shares import Shares, measured_s, time_shares
from fedasync.trainer.addresses import free_port, host_and_port
from fedasync.trainer.channels import ChannelSpec
from fedasync.trainer.child_settings import ChildSettings
from fedasync.trainer.controller import HOPELESS, Controller
from fedasync.trainer.keys import KEY_FILE, KEY_VARIABLE, kept_key, key_of_environment
from fedasync.trainer.link import Listener
from fedasync.trainer.processes import LocalProcesses
from fedasync.trainer.run_state import RunState
from fedasync.trainer.session import Told
from fedasync.trainer.settings import ProcessSettings, PromptSettings, RunSettings

if TYPE_CHECKING:
    import polars as pl

POLICY, FAILURES = "policy", "failures.log"
"""In the folder of a run: the trainer's last state, and what went wrong, a line each."""


LOOPBACK = "127.0.0.1"


def _nothing(version: int, metrics: Mapping[str, float]) -> None:
    pass


def _silent(line: str) -> None:
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
    key_file: Path | None = None
    """Where workers of other machines find the key, and which is written where it is not there (None: in the run's
    folder)."""
    say: Callable[[str], object] = _silent
    """Called with a line about workers of other machines: whom the run waits for, who comes and goes."""

    def make(self, folder: Path, told: Told = _nothing) -> Run:
        """Run it in ``folder``, where it goes on from its newest checkpoint if there is one.

        Leaves ``policy/``, ``failures.log`` and ``logs/`` there. Raises TrainerFailedError, LostProcessError,
        CheckpointError, and BrokenLawError for a run that contradicts itself.
        """
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.absolute()
        processes, place = self.processes, folder / "weights"
        settings = ChildSettings(
            self.problem,
            self.where,
            self.seed,
            ChannelSpec(processes.channel, self._weights_at() if processes.channel == "distributed" else str(place)),
            max_running=processes.max_running,
            reward_timeout_s=processes.reward_timeout_s,
            evaluation_prompts=self.settings.evaluation_prompts,
            engine=self.engine,
            sharded=None if processes.data_parallel is None else processes.data_parallel == "fsdp",
            tracker=processes.tracker,
            tracker_folder=str(folder / "tracker"),
        )
        with (
            self._listener(folder) as listener,
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
                settings.for_others(),
                self.say,
            )
            children.start_ranks(processes.ranks)
            for number in range(processes.workers):
                children.start_worker(number)
            try:
                ended = controller.make(folder / POLICY)
                if not ended.startswith(HOPELESS):
                    children.wait(60.0 if processes.tracker else 5.0)  # a tracker may have much to send
            finally:
                lines = [f"{each.time_s:.3f} s: {each.what}\n" for each in controller.incidents]
                (folder / FAILURES).write_text("".join(lines), "utf-8")
                shutil.rmtree(place, ignore_errors=True)
            return finished_run(self, controller, state, ended)

    def _weights_at(self) -> str:
        """``host:port`` of the distributed channel."""
        processes = self.processes
        if not processes.remote_workers or processes.listen is None:
            return f"{LOOPBACK}:{free_port()}"
        host = processes.listen.rpartition(":")[0]
        with _told_of(processes.listen):
            return f"{host}:{processes.weights_port or free_port(host_and_port(processes.listen)[0])}"

    def _listener(self, folder: Path) -> Listener:
        """Where processes connect; says how workers of other machines do. Raises ValueError where nobody can listen."""
        processes = self.processes
        if not processes.remote_workers or processes.listen is None:
            return Listener()
        file, key = self.key_file or folder / KEY_FILE, key_of_environment()
        how = f" --key-file {shlex.quote(str(file))}" if key is None else f", with {KEY_VARIABLE} as here"
        key = key or kept_key(file)

        def turned_away(peer: str) -> None:
            self.say(f"somebody at {peer} is turned away: another key")

        with _told_of(processes.listen):
            listener = Listener(processes.listen, key, turned_away)
        waits = f"{processes.remote_workers} worker{'s' * (processes.remote_workers > 1)}"
        self.say(f"waits for {waits}: fedasync rollout-worker {listener.address}{how}")
        return listener


@contextmanager
def _told_of(listen: str) -> Iterator[None]:
    """Where nobody can listen ValueError says so."""
    try:
        yield
    except OSError as error:
        better = "a free port" if error.errno == errno.EADDRINUSE else "an address of its own"
        raise ValueError(
            f"processes: listen: this machine cannot listen at {listen}: {error}; {better} would do"
        ) from None


def finished_run(request: TrainerRequest, controller: Controller, state: RunState, ended: str) -> Run:
    """The run with its tables and its verdict on itself. Raises BrokenLawError."""
    session = controller.session
    session.write_unfinished()
    session.log.flush()
    record = Record()
    record.write(state.events.rows().tobytes())
    record.reasons = list(session.log.reasons)
    answers, iterations = state.answers.rows(), _frame(state.iterations.rows())
    answers = answers[np.lexsort((answers["answer"], answers["lease"]))]
    rollouts = rollouts_frame({name: answers[name] for name in answers.dtype.names or ()})
    metrics = session.time.steps.table()
    settings, end_s = request.settings, session.now
    summary: dict[str, Any] = {
        "run_id": request.name or f"{request.strategy.name}-seed{request.seed}",
        "study": request.study,
        "seed": request.seed,
        "labels": dict(request.labels),
        "timing_only": False,
        "runtime": "processes",
        **rollout_summary(
            session.driver.coordinator,
            record,
            rollouts,
            metrics,
            end_s=end_s,
            ended=ended,
            training_s=session.time.steps.training_s,
            warm_up_versions=settings.warm_up_versions,
            prompts=request.task_prompts,
            epochs=request.prompts.epochs,
            target=request.target,
            incidents=[asdict(incident) for incident in controller.incidents],
        ),
        "shares": _shares(
            record, metrics, rollouts, iterations, request.processes.all_workers, settings.warm_up_versions
        ),
        "failures": session.failures,
        "restarts": controller.attendance.restarts,
    }
    if broken := broken_laws(summary):
        raise BrokenLawError(f"the run breaks its own laws: {'; '.join(broken)}")
    tables = {"metrics": metrics, "rollouts": rollouts, "iterations": iterations}
    return Run(request.config or {}, summary, tables, record=record)


def _shares(
    record: Record, metrics: pl.DataFrame, rollouts: pl.DataFrame, iterations: pl.DataFrame, workers: int, warm_up: int
) -> Shares:
    """Shares of the trainer's time, and of workers × time."""
    span = measured_s(metrics, warm_up)
    spent = {} if span is None else servers_s(lease_arrays(record), metrics, rollouts, iterations, *span)
    return time_shares(metrics, spent, workers, warm_up)


def _frame(rows: NDArray[Any]) -> pl.DataFrame:
    import polars as pl

    return pl.DataFrame({name: np.ascontiguousarray(rows[name]) for name in rows.dtype.names or ()})
