"""``fedasync show``: what one run says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedasync.runs.privacy import MOST, MissingAccountantError, epsilon
from fedasync.runs.run import Run
from fedasync.studies.errors import StudyError
from fedasync.studies.show_cluster import cluster_tables


def show_run(folder: Path) -> None:
    """Print ledger, verdicts, staleness, utilisation, targets, closed forms and privacy of a finished run.

    Of a cluster's run: shares of time, staleness by definition, length bias and prompts in place of utilisation.
    """
    try:
        summary = Run.load(folder).summary
    except OSError as error:
        raise StudyError(f"{folder}: no finished run here: {error.strerror}") from None
    except ValueError as error:
        raise StudyError(str(error)) from None
    console = Console()
    labels = ", ".join(f"{axis} = {label}" for axis, label in summary["labels"].items())
    console.print(f"[bold]{escape(summary['run_id'])}[/bold]  {escape(labels)}")
    ended = "at its time limit" if summary["ended"] == "time" else f"by {summary['ended']}"
    console.print(
        f"strategy {summary['strategy']}, seed {summary['seed']}: ended {escape(ended)} at {summary['time_s']:g} s, "
        f"version {summary['versions']}, {summary['consumed']} contributions applied"
    )
    for table in _tables(summary):
        console.print(table)


def _tables(summary: dict[str, Any]) -> list[Table]:
    tables = [_ledger(summary["ledger"]), _verdicts(summary["verdicts"])]
    if summary["staleness"]["histogram"]:
        tables.append(_staleness(summary["staleness"]))
    if "rollouts" in summary:
        tables.extend(cluster_tables(summary))
    else:
        tables.append(
            _pairs("utilisation (share of slots × time)", {k: f"{v:.1%}" for k, v in summary["utilisation"].items()})
        )
    if summary["targets"]:
        tables.append(_targets(summary["targets"], summary["best"]))
    if summary["final"]:
        tables.append(_metrics(summary["final"]))
    if summary.get("closed_forms"):
        tables.append(_closed_forms(summary["closed_forms"]))
    if "privacy" in summary:
        tables.extend(_privacy(summary["privacy"]))
    if summary["unfit"]:
        tables.append(_unfit(summary["unfit"], summary["unfit_total"]))
    return tables


def _ledger(ledger: dict[str, Any]) -> Table:
    table = Table("where", "leases", title="conservation ledger")
    for place in ("in_flight", "buffered", "consumed"):
        table.add_row(place.replace("_", " "), str(ledger[place]))
    for place in ("rejected", "failed", "cancelled"):
        for reason, count in ledger[place].items():
            table.add_row(f"{place}: {reason}", str(count))
    table.add_section()
    table.add_row("admitted", str(ledger["admitted"]))
    if ledger["ignored"]:
        table.add_section()
        table.add_row("late or duplicate, ignored", str(ledger["ignored"]))
    return table


def _verdicts(verdicts: list[dict[str, Any]]) -> Table:
    table = Table("law", "holds", "numbers", title="verdicts")
    for verdict in verdicts:
        table.add_row(verdict["name"], "yes" if verdict["holds"] else "[red]NO[/red]", escape(verdict["detail"]))
    return table


def _staleness(staleness: dict[str, Any]) -> Table:
    table = Table("τ (versions)", "contributions", "share", title="staleness of applied contributions")
    total = sum(staleness["histogram"].values())
    for tau, count in staleness["histogram"].items():
        table.add_row(tau, str(count), f"{count / total:.1%}")
    table.caption = (
        f"mean {staleness['mean']:.3g}, median {staleness['p50']:g}, p90 {staleness['p90']:g}, max {staleness['max']}"
    )
    return table


def _pairs(title: str, values: dict[str, str]) -> Table:
    table = Table(*values, title=title)
    table.add_row(*values.values())
    return table


def _metrics(final: dict[str, float | None]) -> Table:
    """A row each: a run on prompts has some fifty."""
    table = Table("metric", "value", title="final metrics")
    for name, value in final.items():
        table.add_row(name, _number(value))
    return table


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _targets(targets: list[dict[str, Any]], best: dict[str, float]) -> Table:
    table = Table("target", "reached at (s)", "after updates", title="targets")
    for target in targets:
        reached = target["reached_s"]
        best_value = best.get(target["metric"])
        missed = "not reached" if best_value is None else f"not reached (best {best_value:.4g})"
        updates = target["reached_updates"]
        table.add_row(
            f"{target['metric']} ≥ {target['value']:g}",
            missed if reached is None else f"{reached:g}",
            "" if updates is None else str(updates),
        )
    return table


def _closed_forms(forms: list[dict[str, Any]]) -> Table:
    table = Table(
        "quantity", "closed form", "predicted", "measured", "relative error", title="theory beside measurement"
    )
    for form in forms:
        error = form["measured"] / form["predicted"] - 1 if form["predicted"] else form["measured"]
        table.add_row(
            form["name"],
            escape(form["formula"]),
            f"{form['predicted']:.5g}",
            f"{form['measured']:.5g}",
            f"{error:+.2%}",
        )
    return table


def _privacy(privacy: dict[str, Any]) -> list[Table]:
    z, delta = privacy["noise_multiplier"], privacy["delta"]
    asked = {"noise multiplier": f"{z:g}", "clip norm": f"{privacy['clip_norm']:g}"}
    table = Table("client", "contributions", "Σk²", f"ε at δ = {delta:g}", title="privacy spent", min_width=64)
    for who in ("worst", "median"):
        if (client := privacy[who]) is None:
            continue
        try:
            found = epsilon(client["squares"], z, delta)
            told = f"{found:.4g}" if found <= MOST else f"> {MOST:g}"
        except MissingAccountantError as error:
            table.caption, told = escape(str(error)), "?"
        table.add_row(f"{who}: {client['client']}", str(client["contributions"]), str(client["squares"]), told)
    return [_pairs("noise", {**asked, **{name: str(privacy[name]) for name in ("releases", "clients")}}), table]


def _unfit(unfit: list[dict[str, Any]], total: int) -> Table:
    table = Table("client", "lease", "time (s)", "reason", "found", title=f"contributions not fit for use: {total}")
    for one in unfit[:20]:
        table.add_row(str(one["client"]), str(one["lease"]), f"{one['time_s']:g}", one["reason"], escape(one["detail"]))
    return table
