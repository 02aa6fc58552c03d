"""What a plan leaves: plan.json, the table of its trials, the Pareto figure, and what is printed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Console
from rich.table import Table

from fedasync.report import markdown, save
from fedasync.report.pareto import Axis, Confirmed, front, pareto
from fedasync.report.statistics import Interval
from fedasync.report.table import write_table
from fedasync.runs.run import write
from fedasync.studies.plan_file import Plan
from fedasync.studies.plan_measures import Measure
from fedasync.studies.plan_search import broken, excess
from fedasync.studies.plan_trials import Found, Trial, plain
from fedasync.studies.plan_verdict import Verdict, keys, quantities

PLAN = "plan.json"


def write_plan(
    plan: Plan, trials: Sequence[Trial], confirmed: Sequence[Trial], verdict: Verdict, folder: Path, command: str
) -> list[Path]:
    """Write the plan's files; the same trials give the same bytes."""
    table = trials_table(plan, trials, confirmed, verdict)
    said = "".join(f"* {sentence}\n" for sentence in verdict.said)
    page = f"# {plan.header.title}\n\n{_pasted(plan, verdict)}{said}\n{markdown(_brief(table))}\n`{command}`\n"
    written = write_table(table, folder, "trials", page)
    drawn = _figure(plan, trials, confirmed, verdict, command)
    written += [] if drawn is None else save(drawn, folder, "pareto")
    content = {
        "name": plan.name,
        "title": plan.header.title,
        "command": command,
        "objective": {"measure": plan.objective.name, "better": plan.objective.better},
        "limits": {name: str(limit) for name, limit in plan.header.limits.items()},
        "candidates": len(trials),
        "recommended": _recorded(plan, verdict.best),
        "runner_up": _recorded(plan, verdict.second),
        "difference": verdict.difference
        and {
            "mean": verdict.difference.mean,
            "low": verdict.difference.low,
            "high": verdict.difference.high,
            "pairs": verdict.difference.pairs,
        },
        "said": list(verdict.said),
    }
    write(folder / PLAN, (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
    return [*written, folder / PLAN]


def _recorded(plan: Plan, trial: Trial | None) -> dict[str, Any] | None:
    if trial is None or trial.confirmed is None:
        return None
    found = trial.confirmed
    means: dict[str, Any] = {}
    for name in quantities(plan):
        interval = found.interval(name)
        means[name] = interval and {"mean": interval.mean, "half_width": interval.half_width}
    return {
        "trial": trial.number,
        "keys": keys(plan, trial),
        "measures": means,
        "seeds": sorted(found.by_seed[plan.objective.name]),
        "runs": list(found.folders),
    }


def trials_table(plan: Plan, trials: Sequence[Trial], confirmed: Sequence[Trial], verdict: Verdict) -> pl.DataFrame:
    """A row a candidate: what it sets, how long its longest run of the search was, what that came to, and its fate.

    Measures are means over the search's seeds. ``on_front`` refers to the first rung, which all candidates have run.
    """
    names = quantities(plan)
    edge = {trial.number for trial in _front(plan, trials)}
    places = {trial.number: place for place, trial in enumerate(confirmed)}
    rows = [
        {
            "trial": trial.number,
            **{key: plain(value) if isinstance(value, dict | list) else value for key, value in trial.values.items()},
            "share": trial.last.share,
            **{name: trial.last.mean(name) for name in names},
            "on_front": trial.number in edge,
            "fate": _fate(plan, trial, places, verdict),
        }
        for trial in trials
    ]
    return pl.DataFrame(rows, infer_schema_length=None, schema_overrides=dict.fromkeys(names, pl.Float64), strict=False)


def _brief(table: pl.DataFrame) -> pl.DataFrame:
    """Without columns that are empty."""
    return table.select(name for name in table.columns if table[name].null_count() < table.height)


def _fate(plan: Plan, trial: Trial, places: dict[int, int], verdict: Verdict) -> str:
    if trial.error:
        return f"cannot run: {trial.error}"
    for chosen, what in ((verdict.best, "recommended"), (verdict.second, "runner-up")):
        if chosen is not None and chosen.number == trial.number:
            return what
    if trial.number in places:
        missed = broken(plan, trial.confirmed) if trial.confirmed is not None else {}
        outside = ", ".join(f"{name} {limit}" for name, limit in missed.items())
        return f"confirmed, outside {outside}" if outside else "confirmed"
    if missed := broken(plan, trial.last):
        return f"outside {', '.join(f'{name} {limit}' for name, limit in missed.items())}"
    return "within the limits" if plan.header.limits else "not the best"


def _ran(plan: Plan, trials: Sequence[Trial]) -> list[tuple[Trial, tuple[float, float]]]:
    """Candidates with both quantities at the first rung: (against, objective)."""
    found = []
    for trial in trials:
        x, y = trial.first.mean(plan.against.name), trial.first.mean(plan.objective.name)
        if not trial.first.error and x is not None and y is not None:
            found.append((trial, (x, y)))
    return found


def _front(plan: Plan, trials: Sequence[Trial]) -> list[Trial]:
    ran = [(trial, point) for trial, point in _ran(plan, trials) if not excess(plan, trial.first)]
    places = front([point for _, point in ran], plan.against.better, plan.objective.better)
    return [ran[place][0] for place in places]


def _figure(plan: Plan, trials: Sequence[Trial], confirmed: Sequence[Trial], verdict: Verdict, command: str) -> Any:
    """None where no candidate has both quantities, or they are one."""
    ran = _ran(plan, trials)
    if not ran or plan.against.name == plan.objective.name:
        return None
    chosen = []
    for trial in confirmed:
        if trial.confirmed is None:
            continue
        x, y = trial.confirmed.interval(plan.against.name), trial.confirmed.interval(plan.objective.name)
        if x is not None and y is not None:
            is_best = verdict.best is not None and trial.number == verdict.best.number
            chosen.append(Confirmed(f"{'recommended: ' if is_best else ''}{trial}", x, y))
    share = plan.header.rungs[0]
    seeds = f"{plan.header.seeds} seed{'s' * (plan.header.seeds > 1)}"
    length = "whole runs" if share == 1 else f"runs of {share:g} of the whole length"
    other = f"{plan.header.confirm_seeds} other seeds, 95 % t-intervals"
    note = f"Candidates: {length}, {seeds}. Diamonds: whole runs, {other}."
    return pareto(
        [point for _, point in ran],
        [not excess(plan, trial.first) for trial, _ in ran],
        chosen,
        _axis(plan, plan.against),
        _axis(plan, plan.objective),
        plan.header.title,
        note,
        command,
    )


def _axis(plan: Plan, measure: Measure) -> Axis:
    limit = plan.header.limits.get(measure.name)
    bound = None if limit is None else limit.at_most if limit.at_most is not None else limit.at_least
    return Axis(f"{measure.text}{f' ({measure.unit})' if measure.unit else ''}", measure.better, bound)


def show_plan(plan: Plan, verdict: Verdict, console: Console) -> None:
    """Print the recommendation, what is predicted of it and of its runner-up, and what is to be known."""
    if verdict.best is None:
        console.print("No candidate lies within the limits.", style="bold")
    else:
        console.print(_pasted(plan, verdict, fenced=False), markup=False, highlight=False, end="")
        console.print(_predicted(plan, verdict))
    for sentence in verdict.said:
        console.print(f"  {sentence}", markup=False, highlight=False, soft_wrap=True)


def _pasted(plan: Plan, verdict: Verdict, *, fenced: bool = True) -> str:
    """The recommended keys as a study has them, by table."""
    if verdict.best is None:
        return ""
    tables: dict[str, list[str]] = {}
    for key, value in keys(plan, verdict.best).items():
        table, _, rest = key.partition(".")
        tables.setdefault(table, []).append(f"{rest} = {plain(value)}")
    text = "\n".join(f"[{table}]\n" + "".join(f"{line}\n" for line in lines) for table, lines in tables.items())
    return f"```toml\n{text}```\n\n" if fenced else f"{text}\n"


def _predicted(plan: Plan, verdict: Verdict) -> Table:
    table = Table("predicted", "recommended", title=f"{plan.header.confirm_seeds} seeds, 95 % t-intervals")
    table.title_justify = "left"
    both = [trial.confirmed for trial in (verdict.best, verdict.second) if trial is not None and trial.confirmed]
    if len(both) > 1:
        table.add_column("runner-up")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in quantities(plan):
        cells = list(_cells(both, plan.measures.get(name, plan.objective)))
        if any(cells):
            measure = plan.measures.get(name, plan.objective)
            unit = f" ({measure.unit})" if measure.unit else ""
            limit = plan.header.limits.get(name)
            table.add_row(f"{measure.text}{unit}{f', {limit}' if limit else ''}", *(cell or "–" for cell in cells))
    return table


def _cells(founds: Sequence[Found], measure: Measure) -> Iterator[str]:
    for found in founds:
        interval = found.interval(measure.name)
        yield "" if interval is None else _told(interval, measure)


def _told(interval: Interval, measure: Measure) -> str:
    if measure.name.endswith("_share"):
        half = "" if interval.half_width is None else f" ± {interval.half_width:.1%}"
        return f"{interval.mean:.1%}{half}"
    half = "" if interval.half_width is None else f" ± {interval.half_width:.2g}"
    return f"{interval.mean:,.4g}{half}" if interval.mean < 1e4 else f"{interval.mean:,.0f}{_large(interval)}"


def _large(interval: Interval) -> str:
    return "" if interval.half_width is None else f" ± {interval.half_width:,.0f}"
