"""``fedasync compare``: a recorded run beside its prediction."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedasync.report.agreement import lease_means_s, order_agreement, total_variation, wasserstein
from fedasync.report.statistics import pooled_staleness
from fedasync.runs.run import Run, write
from fedasync.studies.command import console_for_tables
from fedasync.studies.run_folders import name_of, one_strategy, opened, rollout_runs

COMPARISON = "compare.json"
MOST_ROWS = 40
"""Clients printed one by one; compare.json has all."""


@dataclass(frozen=True)
class Compared:
    """A number of the recorded runs beside that of the predicted ones: means over runs, and their standard deviations.

    None stands for what there is not: a spread of one run, a number of no run.
    """

    name: str
    unit: str
    real: float | None
    predicted: float | None
    real_spread: float | None = None
    predicted_spread: float | None = None
    why_not: str = ""
    """Why it cannot be compared; empty where it can."""

    @property
    def error(self) -> float | None:
        """predicted/real − 1."""
        if self.real is None or self.predicted is None or self.why_not:
            return None
        return self.predicted / self.real - 1 if self.real else None


def compare(real: Sequence[Path], sim: Sequence[Path], out: Path | None) -> int:
    """Print and write (compare.json in ``out``, or the working directory) how far predictions were from runs.

    Folders are runs' or studies'; runs are matched by seed where any seed is in both. A simulation named before what
    was measured changes places with it, and that is said. Runs on prompts are compared by other numbers
    (`compare_rollouts`). Returns the exit status 0. Raises StudyError.
    """
    recorded, predicted = opened(real), opened(sim)
    if not any(map(_measured, recorded)) and all(map(_measured, predicted)):
        recorded, predicted = predicted, recorded
        console_for_tables().print(
            f"{name_of(recorded[0])} was measured and {name_of(predicted[0])} simulated: they change places, as in "
            f"`fedasync compare {shlex.join(map(str, sim))} {shlex.join(map(str, real))}`",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if rollout_runs([*recorded, *predicted]):
        from fedasync.studies.compare_rollouts import compare_rollouts

        return compare_rollouts(recorded, predicted, out)
    strategy = one_strategy([*recorded, *predicted])
    pairs, how = _pairs(recorded, predicted)
    notes = [how, *_differences(recorded[0], predicted[0])]
    numbers = _numbers(recorded, predicted)
    order = _orders(pairs)
    among = _orders([(a, b) for i, a in enumerate(recorded) for b in recorded[i + 1 :]])
    staleness = _staleness(recorded, predicted)
    told = {
        "strategy": strategy,
        "real": [str(name_of(run)) for run in recorded],
        "predicted": [str(name_of(run)) for run in predicted],
        "notes": notes,
        "order": order,
        "order_among_real_runs": among,
        "staleness": staleness,
        "numbers": [{**asdict(one), "error": one.error} for one in numbers],
    }
    folder = out or Path()
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / COMPARISON, (json.dumps(told, indent=1, ensure_ascii=False) + "\n").encode())
    _show(strategy, notes, numbers, order, among, staleness, folder)
    return 0


def _measured(run: Run) -> bool:
    """Made under a real clock."""
    return bool(run.summary.get("runtime"))


def _pairs(real: Sequence[Run], sim: Sequence[Run]) -> tuple[list[tuple[Run, Run]], str]:
    """Which runs are held against each other event by event, and how they were chosen."""
    matched = [(a, b) for a in real for b in sim if a.seed == b.seed]
    if matched:
        used = {id(run) for pair in matched for run in pair}
        alone = [name_of(run) for run in (*real, *sim) if id(run) not in used]
        said = f"{len(matched)} pair{'s' * (len(matched) > 1)} of runs, matched by seed"
        return matched, said + (f"; no run of the other kind has the seed of {', '.join(alone)}" if alone else "")
    return [(a, b) for a in real for b in sim], "no seed is in both kinds of runs: each is held against each"


def _differences(real: Run, sim: Run) -> list[str]:
    """Settings that differ, which the reader should know of: the strategy's, and when a run ends."""
    found = []
    for table in ("strategy", "run", "workload"):
        one, other = real.config.get(table), sim.config.get(table)
        if table == "run" and real.summary.get("runtime") == "flower" and isinstance(one, Mapping):
            one = {"cancelled_clients": "finish", **one}  # as Flower's clients do
        if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
            if one != other:
                found.append(f"[{table}] differs: {one!r} in the run, {other!r} in the prediction")
            continue
        for key in sorted({*one, *other}):
            if one.get(key) != other.get(key):
                found.append(
                    f"{table}.{key} differs: {one.get(key)!r} in the run, {other.get(key)!r} in the prediction"
                )
    return found


def _numbers(real: Sequence[Run], sim: Sequence[Run]) -> list[Compared]:
    return [
        _rate("updates a second", real, sim, "consumed"),
        _rate("versions a second", real, sim, "versions"),
        _of_all("mean staleness", "versions", real, sim, lambda run: run.summary["staleness"].get("mean")),
        *_targets(real, sim),
        *_finals(real, sim),
        *_lease_times(real, sim),
    ]


def _rate(name: str, real: Sequence[Run], sim: Sequence[Run], key: str) -> Compared:
    def per_second(run: Run) -> float | None:
        return run.summary[key] / run.summary["time_s"] if run.summary["time_s"] > 0 else None

    return _of_all(name, "1/s", real, sim, per_second)


def _of_all(
    name: str,
    unit: str,
    real: Sequence[Run],
    sim: Sequence[Run],
    value: Callable[[Run], float | None],
    verb: str = "has",
) -> Compared:
    """Mean and spread of a number over the runs that have it; compared where all have."""
    sides = [[x for run in runs if (x := value(run)) is not None] for runs in (real, sim)]
    return _beside(name, unit, sides, (len(real), len(sim)), verb)


def _beside(name: str, unit: str, sides: Sequence[Sequence[float]], runs: Sequence[int], verb: str = "has") -> Compared:
    """The values of each side's runs, of which there are so many."""
    means = [fmean(found) if found else None for found in sides]
    spreads = [stdev(found) if len(found) > 1 else None for found in sides]
    missing = []
    for what, found, count in zip(("real run", "predicted run"), sides, runs, strict=True):
        if not found:
            missing.append(f"no {what} {verb} it")
        elif len(found) < count:
            missing.append(f"only {len(found)} of {count} {what}s {verb} it")
    why = f"cannot be compared: {'; '.join(missing)}" if missing else ""
    return Compared(name, unit, means[0], means[1], spreads[0], spreads[1], why)


def _targets(real: Sequence[Run], sim: Sequence[Run]) -> list[Compared]:
    """Time to each target. A mean over only those runs that reached it would flatter: it is not compared then."""
    wanted = {(t["metric"], t["value"]): None for run in (*real, *sim) for t in run.summary.get("targets", [])}

    def reached(metric: str, value: float) -> Callable[[Run], float | None]:
        def of(run: Run) -> float | None:
            entries = run.summary.get("targets", [])
            return next((t["reached_s"] for t in entries if (t["metric"], t["value"]) == (metric, value)), None)

        return of

    return [_of_all(f"time to {m} ≥ {v:g}", "s", real, sim, reached(m, v), "reached") for m, v in wanted]


def _finals(real: Sequence[Run], sim: Sequence[Run]) -> list[Compared]:
    names = dict.fromkeys(name for run in (*real, *sim) for name in run.summary.get("final", {}))
    return [_of_all(f"final {n}", "", real, sim, lambda run, n=n: run.summary["final"].get(n)) for n in names]  # type: ignore[misc]


def _lease_times(real: Sequence[Run], sim: Sequence[Run]) -> list[Compared]:
    """Of each client, over the runs in which it delivered."""
    sides = []
    for runs in (real, sim):
        by_client: dict[int, list[float]] = {}
        for run in runs:
            for client, mean_s in lease_means_s(run).items():
                by_client.setdefault(client, []).append(mean_s)
        sides.append(by_client)
    clients = sorted({*sides[0], *sides[1]})
    return [_lease(client, [side.get(client, []) for side in sides]) for client in clients]


def _lease(client: int, values: Sequence[Sequence[float]]) -> Compared:
    return _beside(f"lease of client {client}", "s", values, [len(found) for found in values])


def _orders(pairs: Sequence[tuple[Run, Run]]) -> dict[str, Any] | None:
    """Kendall's τ and the share of pairs in the same order, over pairs of runs; None where nothing matches."""
    found = [order for a, b in pairs if (order := order_agreement(a.events, b.events)) is not None]
    if not found:
        return None
    taus = [order.tau for order in found]
    near = [order.neighbours for order in found if order.neighbours is not None]
    return {
        "tau": fmean(taus),
        "tau_spread": stdev(taus) if len(taus) > 1 else None,
        "same_order": fmean(order.same_order for order in found),
        "neighbours_same_order": fmean(near) if near else None,
        "pairs_of_runs": len(found),
        "matched": sum(order.matched for order in found),
        "deliveries": [sum(order.first for order in found), sum(order.second for order in found)],
    }


def _staleness(real: Sequence[Run], sim: Sequence[Run]) -> dict[str, float] | None:
    """Distances of the pooled histograms; None where nobody consumed anything."""
    one, other = (pooled_staleness(run.summary["staleness"]["histogram"] for run in runs) for runs in (real, sim))
    if not one or not other:
        return None
    return {"total_variation": total_variation(one, other), "wasserstein": wasserstein(one, other)}


def _show(
    strategy: str,
    notes: Sequence[str],
    numbers: Sequence[Compared],
    order: Mapping[str, Any] | None,
    among: Mapping[str, Any] | None,
    staleness: Mapping[str, float] | None,
    folder: Path,
) -> None:
    console = console_for_tables()
    table = Table("number", "real", "predicted", "error", title=f"{strategy}: predicted beside real")
    leases = [one for one in numbers if one.name.startswith("lease of client")]
    for one in [*(one for one in numbers if one not in leases), *leases[:MOST_ROWS]]:
        error = f"{one.error:+.2%}" if one.error is not None else one.why_not or "real is 0"
        name = f"{one.name} ({one.unit})" if one.unit else one.name
        cells = (_number(one.real, one.real_spread), _number(one.predicted, one.predicted_spread), error)
        table.add_row(escape(name), *map(escape, cells))
    if len(leases) > MOST_ROWS:
        table.caption = f"and {len(leases) - MOST_ROWS} more clients in {COMPARISON}"
    console.print(table)
    lines = [_said_of_order("order of deliveries", order)]
    if among is not None:
        lines.append(_said_of_order("the same among the real runs", among))
    lines.append(
        "staleness: cannot be compared, no contribution was applied in one of them"
        if staleness is None
        else f"staleness: total variation {staleness['total_variation']:.3f}, Wasserstein-1 "
        f"{staleness['wasserstein']:.3f} versions"
    )
    for line in [*lines, *notes, str(folder / COMPARISON)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _said_of_order(what: str, order: Mapping[str, Any] | None) -> str:
    if order is None:
        return f"{what}: cannot be compared, fewer than two deliveries match by client"
    spread = "" if order["tau_spread"] is None else f" ± {order['tau_spread']:.3f}"
    real, sim = order["deliveries"]
    near = order["neighbours_same_order"]
    next_to = "" if near is None else f", of neighbours {near:.1%}"
    return (
        f"{what}: τ = {order['tau']:.3f}{spread}, {order['same_order']:.1%} of pairs in the same order{next_to} "
        f"({order['matched']} deliveries matched, of {real} and {sim})"
    )


def _number(value: float | None, spread: float | None) -> str:
    return "" if value is None else f"{value:.4g}" + ("" if spread is None else f" ± {spread:.2g}")
