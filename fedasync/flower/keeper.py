"""What a deployment keeps of itself while it runs, so that a new one can go on where it was ended.

A run's folder holds its journal (``federated.journal``: the log, accepted contributions, digests of versions), the last
checkpoint, progress.json (metrics, how far the random draws are) and exchanges.jsonl. Without a folder all is kept in
memory, and nothing can go on.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedasync.core import Coordinator, EventLog, Strategy
from fedasync.core.log import ADMITTED
from fedasync.federated import checkpoint
from fedasync.federated.arrays import Arrays
from fedasync.federated.evaluation import Evaluations
from fedasync.federated.journal import Journal
from fedasync.federated.recorded import Recorded
from fedasync.federated.replay import replay
from fedasync.flower.settings import DeploymentSettings
from fedasync.runs.exchanges import LINES, Exchange, ExchangeLog, exchanges_frame, read
from fedasync.runs.record import Record
from fedasync.runs.run import SUMMARY, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

    from fedasync.aggregation.model import Contribution, Model

PROGRESS, FAILURES = "progress.json", "failures.log"
MOST_FAILURES = 1000
"""Exceptions of clients that are kept; all are counted by the ledger."""

log = logging.getLogger("fedasync.flower")


class Keeper:
    """Everything that a run leaves, written as it happens.

    After ``begin``, ``elapsed_s``, ``draws`` (of the selection) and ``turns`` (leases of each client) say what the run
    has behind it, and ``resumed`` whether there is anything.
    """

    def __init__(
        self, folder: Path | None, settings: DeploymentSettings, strategy: Strategy, profile: Sequence[float] | None
    ) -> None:
        self._folder, self._settings = folder, settings
        self._strategy, self._profile = strategy, profile
        self.elapsed_s = 0.0
        self.draws = 0
        self.turns: Counter[int] = Counter()
        self.resumed = False
        self._record = Record()
        self._log = EventLog(self._record.write)
        self._journal: Journal | None = None
        self._exchange_log: ExchangeLog | None = None
        self._exchanges: list[Exchange] = []
        self._failures = 0
        self._progress: tuple[int, int] = (-1, -1)
        self._saved_s = 0.0

    def begin(self, arrays: Arrays, evaluations: Evaluations, *, resume: bool) -> Coordinator:
        """The coordinator of a new run, or of the one that lies in the folder, whose arrays are put into ``arrays``.

        Raises ValueError for a folder that has a run already, or with ``resume`` one that cannot go on.
        """
        folder = self._folder
        if folder is None:
            return Coordinator(self._strategy, self._log, self._profile)
        there = Recorded(folder).size > 0
        if (folder / SUMMARY).is_file():
            raise ValueError(f"{folder}: a finished run lies here; another folder would do")
        if there and not resume:
            raise ValueError(f"{folder}: a run was begun here; resume = true would go on with it, or another folder")
        self._journal = journal = Journal(folder)
        self._exchange_log = ExchangeLog(folder / LINES)
        if not there:
            return Coordinator(self._strategy, journal.log, self._profile)
        return self._restored(folder, journal, arrays, evaluations)

    def _restored(self, folder: Path, journal: Journal, arrays: Arrays, evaluations: Evaluations) -> Coordinator:
        loaded = checkpoint.load(folder, self._strategy, profile=self._profile, rows=len(journal.log))
        first = rings = 0
        if loaded is not None:
            arrays.server, first, rings = loaded.server, loaded.rows, loaded.rings
            if loaded.note is not None:
                log.warning("an older checkpoint is used: %s", loaded.note)
        replayed = replay(
            journal.rows(first),
            journal.log.reasons,
            self._strategy,
            arrays,
            journal.contribution,
            profile=self._profile,
            coordinator=None if loaded is None else loaded.coordinator,
            first=first,
            rings=(journal.recorded.rings() or [])[rings:],
        )
        self.resumed = True
        for row in journal.rows():
            self.elapsed_s = row[0]
            if row[1] == ADMITTED:
                self.turns[row[3]] += 1
        progress = _progress(folder / PROGRESS)
        if progress:
            self.draws = progress["draws"]
            self.elapsed_s = max(self.elapsed_s, progress["time_s"])
            evaluations.load(progress["evaluations"])
        self._saved_s = self.elapsed_s
        return replayed.continued(journal.log)

    def contribution(self, lease_id: int, contribution: Contribution) -> None:
        """A contribution came that may be accepted: it goes to the disk before anything is made of it."""
        if self._journal is not None:
            self._journal.keep_contribution(lease_id, contribution)

    def no_contribution(self, lease_id: int) -> None:
        """It was not fit for use."""
        if self._journal is not None:
            self._journal.drop_contribution(lease_id)

    def version(self, version: int, model: Model) -> None:
        if self._journal is not None:
            self._journal.version(version, model)

    def rung(self, now: float) -> None:
        """The coordinator's timers are about to be rung."""
        if self._journal is not None:
            self._journal.rung(now)

    def failure(self, line: str) -> None:
        """A client raised: a line in failures.log, the first ``MOST_FAILURES``."""
        self._failures += 1
        if self._folder is not None and self._failures <= MOST_FAILURES:
            with (self._folder / FAILURES).open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def exchange(self, exchange: Exchange) -> None:
        if self._exchange_log is not None:
            self._exchange_log.append(exchange)
        else:
            self._exchanges.append(exchange)

    def turn(self, now: float, coordinator: Coordinator, arrays: Arrays, evaluations: Evaluations, draws: int) -> None:
        """A turn of the loop is over: have it on the disk. Raises OSError where there is no room."""
        journal, folder = self._journal, self._folder
        if journal is None or folder is None:
            return
        journal.sync()
        reached = (len(journal.log), len(evaluations.time_s))
        if reached != self._progress:
            self._progress = reached
            state = {"time_s": now, "draws": draws, "version": coordinator.version, "evaluations": evaluations.state()}
            write(folder / PROGRESS, (json.dumps(state) + "\n").encode())
        every_s = self._settings.checkpoint_every_s
        if now - self._saved_s >= every_s and coordinator.step is None:
            self._saved_s = now
            rows = len(journal.log)
            checkpoint.save(folder, coordinator, arrays.server, rows=rows, rings=journal.rings)
            if self._settings.record == "tail":
                journal.prune(rows)

    def record(self) -> Record:
        """The whole log."""
        if self._journal is not None:
            self._journal.sync()
            return self._journal.record()
        self._record.complete(self._log)
        return self._record

    def exchanges(self) -> pl.DataFrame:
        """The table of exchanges, those before a restart included."""
        if self._folder is not None and (self._folder / LINES).is_file():
            return read(self._folder)
        return exchanges_frame(self._exchanges)

    def sync(self) -> None:
        """Have on the disk what there is of a turn that did not come to its end."""
        if self._journal is not None:
            self._journal.sync()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
        if self._exchange_log is not None:
            self._exchange_log.close()


def _progress(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except FileNotFoundError:
        return None
