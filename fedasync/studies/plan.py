"""What the command ``plan`` does."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from fedasync.studies import store
from fedasync.studies.command import console_for_tables, execute_all, why_ended
from fedasync.studies.errors import StudyError
from fedasync.studies.execute import Job, LostWorkerError, Outcome
from fedasync.studies.plan_file import check_limits, load_plan
from fedasync.studies.plan_pages import show_plan, write_plan
from fedasync.studies.plan_search import search
from fedasync.studies.plan_trials import Trials
from fedasync.studies.plan_verdict import conclude
from fedasync.studies.shipped import find


def run_plan(name: str, changes: Sequence[str], processes: int | None, out: Path | None) -> int:
    """Make and publish a plan; the exit status: 0, or 1 when nothing lies within its limits.

    Raises StudyError, with status 130 after Ctrl-C and 1 when the machine does not let it go on.
    """
    console = console_for_tables()
    path = find(name, "sims/plans", "plan")
    plan = load_plan(path, changes)
    check_limits(plan)
    folder = out or Path("results") / "plans" / plan.name
    for room in ("trials", "runs"):
        store.sweep(folder / room)
    folder.mkdir(parents=True, exist_ok=True)
    console.print(plan.header.title, style="bold", markup=False, highlight=False)
    made = 0

    def make(waiting: Sequence[Sequence[Job]]) -> list[Outcome]:
        nonlocal made
        outcomes = execute_all(waiting, processes, console, "local")
        made += len(outcomes)
        return outcomes

    trials = Trials(plan, folder, make)
    try:
        confirmed = search(plan, trials)
        verdict = conclude(plan, trials.all, confirmed)
        command = shlex.join(["fedasync", "plan", name, *(word for change in changes for word in ("--set", change))])
        written = write_plan(plan, trials.all, confirmed, verdict, folder, command)
    except (KeyboardInterrupt, OSError, BrokenProcessPool, LostWorkerError) as error:
        for room in ("trials", "runs"):
            store.sweep(folder / room)
        why, status = why_ended(error, folder)
        raise StudyError(f"{why}; finished runs stay, and the same command goes on from there", status) from None
    show_plan(plan, verdict, console)
    console.print(f"{len(trials.all)} candidates, {made} runs made now.", markup=False, highlight=False)
    names = ", ".join(str(file.relative_to(folder)) for file in written if file.suffix != ".svg")
    console.print(f"{folder}: {names}", markup=False, highlight=False, soft_wrap=True)
    return 0 if verdict.best is not None else 1
