"""``fedasync calibrate``: the simulator's clients, fitted to what a deployment's runs recorded."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from functools import partial
from math import isfinite, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from fedasync.federated.arrays import WorkloadError
from fedasync.report import save
from fedasync.report.calibration_figure import ClientDurations, durations_figure
from fedasync.runs.measures import lease_table
from fedasync.runs.run import Run, write
from fedasync.studies.build import build_world
from fedasync.studies.client_laws import FEW, Floats, Slope
from fedasync.studies.client_population import (
    Choice,
    Measured,
    Share,
    absent,
    choices,
    few,
    population_table,
    work_fits,
)
from fedasync.studies.command import console_for_tables
from fedasync.studies.errors import StudyError
from fedasync.studies.predicted_study import demand_configuration, study_tables, study_text
from fedasync.studies.run_folders import name_of, one_strategy, opened

if TYPE_CHECKING:
    import polars as pl

MOST_ROWS = 40
"""Clients printed one by one; calibration.json has all."""
PREDICTED, CALIBRATION = "predicted.toml", "calibration.json"


def calibrate(runs: Sequence[Path], out: Path | None) -> int:
    """Fit clients to the exchanges of runs that differ in their seeds alone, and write a study that predicts them.

    Writes predicted.toml, calibration.json and figures/durations.png and .svg into ``out`` (results/calibrated/RUN),
    and prints what was fitted. Returns the exit status 0. Raises StudyError.
    """
    recorded = opened(runs)
    one_strategy(recorded)
    tables = [_exchanges(run) for run in recorded]
    demand_configuration(recorded)
    measured = Measured(tables, _clients(recorded, tables))
    try:
        ways = choices(measured)
    except ValueError as error:
        raise StudyError(f"{', '.join(map(name_of, recorded))}: {error}") from None
    choice = _written(ways, recorded)
    population = population_table(measured, choice, recorded[0].seed)
    study = study_tables(recorded, population, measured.silent_s)
    notes = _notes(measured, ways, choice, recorded, study)
    folder = out or Path("results") / "calibrated" / Path(name_of(recorded[0])).name
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["fedasync", "calibrate", *map(str, runs)])
    write(folder / PREDICTED, study_text(study, [f"Written by {command}", *notes]).encode())
    write(folder / CALIBRATION, (json.dumps(_account(measured, choice, notes), indent=1) + "\n").encode())
    drawn = [
        ClientDurations(c, measured.of(c, "lease_s"), partial(choice.quantile_s, c), choice.mean_s(c))
        for c in measured.known
    ]
    title = f"How long leases took, and the laws fitted to them: {recorded[0].summary['run_id']}"
    written = save(durations_figure(drawn, title, command), folder / "figures", "durations")
    console = console_for_tables()
    console.print(_table(measured, choice))
    for note in notes:
        console.print(f"* {note}", markup=False, highlight=False, soft_wrap=True)
    names = ", ".join([PREDICTED, CALIBRATION, *(str(p.relative_to(folder)) for p in written if p.suffix == ".png")])
    console.print(f"{folder}: {names}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"next: fedasync sim {folder / PREDICTED}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _exchanges(run: Run) -> pl.DataFrame:
    """A run's exchanges, with ``ended_s`` of the log. Raises StudyError."""
    try:
        table = run.exchanges
        ended = lease_table(run.events, float(run.summary["time_s"])).select("lease", ended_s="end_s")
    except ValueError as error:
        raise StudyError(str(error)) from None
    if table is None:
        raise StudyError(
            f"{name_of(run)}: no exchanges here, so nothing says how long clients took; a deployment's run would do "
            "(docs/prediction.md has how to make them of a simulated one)"
        )
    if table.is_empty():
        raise StudyError(f"{name_of(run)}: its exchanges are empty: no task ended, so there is nothing to fit")
    return table.join(ended, on="lease", how="left", maintain_order="left")


def _clients(runs: Sequence[Run], tables: Sequence[pl.DataFrame]) -> int:
    """How many there are: of the workload, the recorded population, or the highest number that had a task."""
    config = runs[0].config
    found = 1 + max(int(table["worker"].max()) for table in tables)  # type: ignore[arg-type]
    if config.get("workload"):
        nobody = {"population": {"duration_s": {"kind": "constant", "value": 1.0}}}
        where = name_of(runs[0])
        world = build_world({**nobody, "workload": config["workload"], "seed": runs[0].seed}, where)
        try:
            held = len(world.workload().client_samples()) if world.workload is not None else found
        except (ValueError, WorkloadError) as error:
            raise StudyError(f"{where}: workload: {error}") from error
    else:
        held = int((config.get("population") or {}).get("clients") or found)
    if held < found:
        raise StudyError(f"{name_of(runs[0])}: client {found - 1} had a task, but there are {held} clients")
    return held


def _written(ways: Sequence[Choice], runs: Sequence[Run]) -> Choice:
    """The likeliest way. Tiers are dealt anew by each seed, so laws of each client's own are for one seed alone."""
    several = len({run.seed for run in runs}) > 1
    return next(way for way in ways if way.shared or not several)


def _notes(
    measured: Measured, ways: Sequence[Choice], choice: Choice, runs: Sequence[Run], study: dict[str, Any]
) -> list[str]:
    """What was fitted, and what could not be told, in sentences."""
    notes = [
        f"fitted to {measured.timed.height} durations of {len(measured.known)} of {measured.clients} clients, from "
        f"{len(runs)} run{'s' * (len(runs) > 1)} ({measured.tasks.height} tasks)",
        _form(ways, choice, runs),
        _failures("failures that the server heard of", measured.dropouts),
        _failures("tasks of which nothing was heard", measured.silences)
        + (f", for {measured.silent_s:.4g} s on average" if measured.silences.hits and measured.silent_s else ""),
    ]
    if uneven := _uneven(measured):
        notes.append(uneven)
    if "lease_timeout_s" in study["strategy"] and "lease_timeout_s" not in runs[0].config["strategy"]:
        notes.append(f"[strategy] has lease_timeout_s = {study['strategy']['lease_timeout_s']:g} for silent clients")
    if gone := absent(measured):
        notes.append(f"never given a task, so taken for absent: {_named(gone)}")
    unknown = [c for c in range(measured.clients) if c not in measured.known and c not in gone]
    if unknown:
        notes.append(f"no duration is known of {_named(unknown)}: each gets the mean of the others")
    if scarce := few(measured):
        what = "the shape of the others" if choice.shared else "a constant"
        notes.append(f"fewer than {FEW} durations, too few to tell a law, of {_named(scarce)}: their mean, and {what}")
    if unclocked := measured.timed["work_s"].null_count():
        notes.append(f"of {unclocked} replies the client's own clock is not known: they count as leases, not as work")
    notes.append("the log does not say when clients were connected: availability is not fitted")
    notes.append(_slope("a byte more", "s a byte", measured.per_byte_s, "messages hardly differ in size", used=True))
    for column, what in (("overhead_s", "the overhead of a message"), ("work_s", "a client's work")):
        found = measured.contention(column)
        said = _slope(f"one more in flight, {what}", "s", found, "the number in flight hardly varied", used=False)
        notes.append(said)
    if early := [run for run in runs if run.summary["ended"] not in ("time", "updates", "versions", "target")]:
        notes.append(f"{name_of(early[0])} ended early ({early[0].summary['ended']}); the prediction does not know it")
    return notes


def _form(ways: Sequence[Choice], choice: Choice, runs: Sequence[Run]) -> str:
    law = next(iter(choice.laws.values())).kind.replace("_", " ")
    kinds = ", ".join(sorted({each.kind.replace("_", " ") for each in choice.laws.values()}))
    said = (
        f"clients differ by their means and share one law ({law})"
        if choice.shared
        else f"each client has a law of its own ({kinds}), as a tier of one, placed for seed {runs[0].seed}: another "
        "seed would deal these laws to other clients"
    )
    overhead = "a constant of each client" if choice.apart else "part of that law"
    said += f"; the overhead of a message is {overhead}"
    if ways[0] is not choice:
        said += f". Laws of each client's own would be likelier (AIC {ways[0].aic:.1f} against {choice.aic:.1f}), but "
        said += "hold for one seed alone, and these runs have several"
    return said


def _failures(what: str, share: Share) -> str:
    return f"{what}: {share.hits} of {share.count} ({share.value:.2%} ± {share.standard_error:.2%})"


def _uneven(measured: Measured) -> str:
    """That clients fail unequally, where that is no chance: the simulator lets all fail alike."""
    from scipy.stats import chi2_contingency

    shares = [measured.failures(client) for client in measured.seen]
    counts = [[share.hits, share.count - share.hits] for share in shares if share.count]
    if len(counts) < 2 or not sum(hits for hits, _ in counts) or not sum(rest for _, rest in counts):
        return ""
    p = float(chi2_contingency(counts).pvalue)
    if not p < 0.01:
        return ""
    worst = max(measured.seen, key=lambda client: measured.failures(client).value)
    share = measured.failures(worst)
    return (
        f"clients fail unequally (χ² test: p = {p:.1g}), client {worst} in {share.hits} of {share.count}; the "
        "simulator draws failures alike for all"
    )


def _slope(what: str, unit: str, found: Slope | None, why_not: str, *, used: bool) -> str:
    if found is None:
        return f"{what}: not told, {why_not}"
    number = f"{found.value:+.3g} ± {found.standard_error:.2g} {unit} ({found.count} messages)"
    if not found.is_told:
        return f"{what}: {number}, no effect that can be told from none"
    if used:
        return f"{what}: {number}" + ("" if found.value > 0 else ", which no network can do: not modelled")
    return f"{what}: {number}; this is not modelled"


def _named(clients: Sequence[int]) -> str:
    head = ", ".join(map(str, clients[:10]))
    return f"client{'s' * (len(clients) > 1)} {head}" + (f" and {len(clients) - 10} more" if len(clients) > 10 else "")


def _table(measured: Measured, choice: Choice) -> Table:
    table = Table(
        "client", "tasks", "failed", "timed", "work", "mean work (s)", "overhead (s)", "lease in the simulator (s)",
        title="clients, ± standard errors of means",
    )  # fmt: skip
    fits = work_fits(measured)
    for client in measured.known[:MOST_ROWS]:
        fit, failed = fits.get(client), measured.failures(client)
        low, high = (choice.quantile_s(client, u) for u in (0.05, 0.95))
        table.add_row(
            str(client),
            str(failed.count),
            str(failed.hits),
            str(len(measured.of(client, "lease_s"))),
            "not told" if fit is None else escape(fit.text),
            "" if fit is None else _plus_minus(fit.mean, fit.standard_error),
            "" if fit is None else _plus_minus(*_mean(measured.overhead_s(client))),
            f"{choice.mean_s(client):.4g} ({low:.3g} … {high:.3g})",
        )
    if len(measured.known) > MOST_ROWS:
        table.caption = f"and {len(measured.known) - MOST_ROWS} more in {CALIBRATION}"
    return table


def _account(measured: Measured, choice: Choice, notes: Sequence[str]) -> dict[str, Any]:
    """calibration.json."""
    clients = []
    fits = work_fits(measured)
    for client in measured.known:
        fit, failed = fits.get(client), measured.failures(client)
        told: dict[str, Any] = {"work": None, "overhead": None}
        if fit is not None:
            overhead = zip(("mean_s", "standard_error_s"), _mean(measured.overhead_s(client)), strict=True)
            told["work"] = {**vars(fit.law), "mean_s": fit.mean, "standard_error_s": fit.standard_error}
            told["overhead"] = dict(overhead)
        clients.append(
            {
                "client": client,
                "tasks": failed.count,
                "failed": failed.hits,
                "timed": len(measured.of(client, "lease_s")),
                **told,
                "lease": {**vars(choice.laws[client]), "constant_s": choice.constant_s[client]},
            }
        )
    slopes = {
        "overhead_s_per_byte": measured.per_byte_s,
        "overhead_s_per_message_in_flight": measured.contention("overhead_s"),
        "work_s_per_message_in_flight": measured.contention("work_s"),
    }
    shares = {"dropout": measured.dropouts, "crash": measured.silences}
    return {
        "clients": clients,
        "slopes": {name: None if found is None else vars(found) for name, found in slopes.items()},
        "failures": {
            name: {**vars(share), "value": share.value, "standard_error": share.standard_error}
            for name, share in shares.items()
        },
        "notes": list(notes),
    }


def _mean(values: Floats) -> tuple[float, float | None]:
    """And its standard error, which one value does not have."""
    return float(values.mean()), float(values.std(ddof=1) / sqrt(len(values))) if len(values) > 1 else None


def _plus_minus(value: float, error: float | None) -> str:
    """Rounding of the last digit is no error."""
    if error is None or not isfinite(error):
        return f"{value:.4g}"
    return f"{value:.4g} ± {0.0 if error < 1e-9 * abs(value) else error:.2g}"
