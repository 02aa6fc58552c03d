"""``fedasync calibrate`` of runs on prompts: the simulator's cluster, fitted to what workers and trainer recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from fedasync.report import save
from fedasync.report.rollout_calibration_figure import Panel, calibration_figure
from fedasync.runs.run import Run, write, write_table
from fedasync.studies.build import build_cluster
from fedasync.studies.command import console_for_tables
from fedasync.studies.contention_probe import Probed, probe
from fedasync.studies.predicted_study import study_text
from fedasync.studies.rollout_calibration import (
    Fitted,
    answers_table,
    cluster_tables,
    fitted,
    run_table,
)
from fedasync.studies.rollout_fits import Floats, Line, Mean, line, pooled
from fedasync.studies.run_folders import name_of

PREDICTED, CALIBRATION, ANSWERS, CONTENTION = "predicted.toml", "calibration.json", "answers.parquet", "contention.json"


def calibrate_rollouts(
    runs: Sequence[Run], out: Path | None, command: str, *, probes: bool = False, quiet: bool = False
) -> Path:
    """Fit a cluster to runs that differ in their seeds alone, and write a study that predicts them.

    Writes predicted.toml, answers.parquet (lengths), calibration.json and figures/calibration.png and .svg into ``out``
    (results/calibrated/RUN), and prints what was fitted unless ``quiet``. ``probes``: measures contention on this
    machine first, unless contention.json in ``out`` holds it already. Returns the folder. Raises StudyError.
    """
    folder = out or Path("results") / "calibrated" / Path(name_of(runs[0])).name
    folder.mkdir(parents=True, exist_ok=True)
    found = fitted(runs, _contention(runs[0], folder, probes=probes))
    answers = folder / ANSWERS
    write_table(answers, answers_table(found).lazy())
    tables = study_tables(found, str(answers))
    notes = notes_of(found)
    write(folder / PREDICTED, study_text(tables, [f"Written by {command}", *notes]).encode())
    write(folder / CALIBRATION, (json.dumps(_account(found, tables, notes), indent=1) + "\n").encode())
    title = f"What iterations and steps took, and what was fitted: {runs[0].summary['run_id']}"
    written = save(calibration_figure(panels(found), title, command), folder / "figures", "calibration")
    if not quiet:
        console = console_for_tables()
        console.print(_table(found))
        for note in notes:
            console.print(f"* {note}", markup=False, highlight=False, soft_wrap=True)
        names = [PREDICTED, CALIBRATION, *(str(p.relative_to(folder)) for p in written if p.suffix == ".png")]
        console.print(f"{folder}: {', '.join(names)}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"next: fedasync sim {folder / PREDICTED}", markup=False, highlight=False, soft_wrap=True)
    return folder


def _contention(run: Run, folder: Path, *, probes: bool) -> Probed | None:
    """As it was measured before, or is measured now; None where it is not."""
    file = folder / CONTENTION
    if file.is_file():
        return Probed.read(file)
    if not probes:
        return None
    found = probe(run.config, name_of(run))
    found.write(file)
    return found


def study_tables(found: Fitted, answers_file: str) -> dict[str, Any]:
    """The tables of the study. Raises StudyError where they make no run."""
    run = found.runs[0]
    tables = {
        "study": {"title": f"Predicted: {run.summary['run_id']}", "seeds": sorted({one.seed for one in found.runs})},
        "strategy": dict(run.config["strategy"]),
        "run": run_table(run, found.evaluate.count > 0),
        **cluster_tables(found, answers_file),
        "report": {"figures": []},
    }
    built = {name: tables[name] for name in ("strategy", "run", "cluster", "prompts")}
    build_cluster(built | {"seed": run.seed}, f"{name_of(run)}: as a study")
    return tables


def notes_of(found: Fitted) -> list[str]:
    """What was fitted, and what is not modelled, in sentences."""
    versions = sum(len(each.step_s) for each in found.timings)
    iterations = sum(len(each.decode_s) for each in found.timings)
    several = "s" if len(found.runs) > 1 else ""
    notes = [
        f"fitted to {versions} steps and {iterations} iterations of {len(found.runs)} run{several}, after a warm-up of "
        f"{found.warm_up} versions"
    ]
    decode = found.decode
    if decode.knots:
        notes.append(
            f"iterations lie {decode.off:.1%} off a line in the running sequences, so means at {len(decode.knots)} "
            "numbers of them stand in its place"
        )
    notes.append(_contention_note(found))
    if not found.train["tokens"]:
        notes.append("a step's time does not grow with its tokens here: another batch would cost the same in the study")
    notes.append(
        f"a step's time spreads by {found.step_spread_s:.3g} s within a run ({found.train.spread:.3g} s with what runs "
        f"differ by), which the study draws; an iteration's by {decode.line.spread:.3g} s, which it does not"
    )
    notes.append(_drift_note(found))
    if found.load.count == 0:
        notes.append("no server generated after a publication: loading weights counts as nothing")
    if found.evaluate.count:
        notes.append("evaluations come between two steps in the study, as in the run")
    notes.append("every prompt of the study is a new one: the size of the data set is not carried over")
    early = [run for run in found.runs if run.summary["ended"] not in ("time", "updates", "versions", "target")]
    if early:
        notes.append(f"{name_of(early[0])} ended early ({early[0].summary['ended']}); the prediction does not know it")
    return notes


def _contention_note(found: Fitted) -> str:
    overlapped = sum(float(each.decode_overlapped.sum()) for each in found.timings)
    share = overlapped / max(1, sum(len(each.decode_s) for each in found.timings))
    if found.probed is not None:
        return (
            f"contention was probed on this machine: beside training an iteration takes "
            f"{_plus_minus(found.probed.servers)} times as long, and a step beside generation "
            f"{_plus_minus(found.probed.trainer)} times"
        )
    said = "contention is not modelled: no probe was made (--probe makes one)"
    if share > 0.05:
        said += f"; {share:.0%} of the iterations ran beside training, and what that cost is part of the fit"
    return said


def _drift_note(found: Fitted) -> str:
    said = f"answers have {pooled([each.tokens for each in found.timings]).mean():.4g} tokens on average"
    if found.drift is None or not found.drift["version"]:
        return f"{said}; no drift with the version is told"
    slope, error = found.drift["version"], found.drift.standard_errors.get("version", 0.0)
    sign = "−" if found.fallen else "+"
    if slope < 2 * error:
        return f"{said}; a drift of {sign}{slope:.2g} ± {error:.1g} tokens a version cannot be told from none"
    return (
        f"{said}, and drift by {sign}{slope:.2g} ± {error:.1g} tokens a version; the study takes recorded lengths in "
        "their order, so it drifts alike, whatever the strategy makes of the policy"
    )


def panels(found: Fitted) -> list[Panel]:
    """Iterations by running sequences (at the mean number of resident tokens of each), and steps by tokens."""
    decode = found.decode

    def all_of(name: str) -> Floats:
        return pooled([getattr(each, name) for each in found.timings])

    running, context = all_of("decode_running"), all_of("decode_context")
    resident = line(context, running=running)
    loop = decode.loop

    def iteration_s(b: Floats) -> Floats:
        if decode.knots:
            at, seconds = np.array(decode.knots).T
            base = np.interp(b, at, seconds) - loop["one"] - loop["running"] * b
        else:
            base = decode.line["one"] + decode.line["running"] * b
        found_s: Floats = base + decode.context_s * (resident["one"] + resident["running"] * b)
        return found_s

    def step_s(tokens: Floats) -> Floats:
        found_s: Floats = found.train["one"] + found.train["tokens"] * tokens
        return found_s

    return [
        Panel("running sequences", "iteration (ms)", running, all_of("decode_s"), iteration_s),
        Panel("tokens of the batch", "training step (ms)", all_of("step_tokens"), all_of("step_s"), step_s),
    ]


def parameters(found: Fitted) -> list[tuple[str, str, float, float | None, int]]:
    """Name, unit, value, its standard error, and of how many measurements."""
    decode = found.decode
    rows = [
        _of(decode.line, "iteration: overhead", "s", "one"),
        _of(decode.line, "iteration: a running sequence", "s", "running"),
        _of(decode.line, "iteration: a resident token", "s", "context"),
        _of(decode.loop, "round of a worker: overhead", "s", "one"),
        _of(decode.loop, "round of a worker: a running sequence", "s", "running"),
        _of(found.prefill, "prefill: a call", "s", "one"),
        _of(found.prefill, "prefill: a token", "s", "tokens"),
        _of(found.train, "step: fixed", "s", "one"),
        _of(found.train, "step: a token", "s", "tokens"),
        _mean("weights: writing them", found.publish),
        _mean("weights: until a server goes on", found.load),
        _mean("latency: last token to delivery", found.reward),
        _mean("latency: batch to training", found.latency),
    ]
    if found.evaluate.count:
        rows.append(_mean("evaluation", found.evaluate))
    if found.probed is not None:
        for what, one in (("iterations", found.probed.servers), ("steps", found.probed.trainer)):
            rows.append((f"contention: {what}", "×", one.value, one.standard_error, one.count))
    return rows


def _of(fit: Line, name: str, unit: str, what: str) -> tuple[str, str, float, float | None, int]:
    return name, unit, fit[what], fit.standard_errors.get(what), fit.count


def _mean(name: str, mean: Mean) -> tuple[str, str, float, float | None, int]:
    return name, "s", mean.value, mean.standard_error, mean.count


def _table(found: Fitted) -> Table:
    table = Table("fitted", "value", "standard error", "unit", "measurements")
    for column in table.columns[1:3]:
        column.justify = "right"
    for name, unit, value, error, count in parameters(found):
        table.add_row(name, f"{value:.4g}", "" if error is None else f"{error:.2g}", unit, f"{count:,}")
    return table


def _plus_minus(mean: Mean) -> str:
    return f"{mean.value:.3g}" + ("" if mean.standard_error is None else f" ± {mean.standard_error:.2g}")


def _account(found: Fitted, tables: dict[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    """calibration.json."""
    return {
        "runs": [name_of(run) for run in found.runs],
        "parameters": [
            dict(zip(("name", "unit", "value", "standard_error", "measurements"), row, strict=True))
            for row in parameters(found)
        ],
        "lines": {
            name: asdict(fit)
            for name, fit in (
                ("iteration", found.decode.line),
                ("round", found.decode.loop),
                ("prefill", found.prefill),
                ("step", found.train),
            )
        },
        "off_the_line": found.decode.off,
        "knots": [list(knot) for knot in found.decode.knots],
        "contention": None if found.probed is None else asdict(found.probed),
        "cluster": tables["cluster"],
        "notes": list(notes),
    }
