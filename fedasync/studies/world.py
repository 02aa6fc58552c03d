"""``fedasync world``: the population of a study, looked at before any run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedasync.core.bounds import check_real
from fedasync.federated.arrays import WorkloadError
from fedasync.report import save
from fedasync.report.world import EVERYBODY, Tier, World, horizon_s, look, times
from fedasync.report.world_figures import figures
from fedasync.simulation.population import Clients
from fedasync.simulation.refusals import check_turns, instant_refusal, realise
from fedasync.studies.build import CLUSTER, build_world, is_cluster
from fedasync.studies.cluster_world import show_cluster
from fedasync.studies.errors import StudyError
from fedasync.studies.shipped import find
from fedasync.studies.study import apply_changes, load

MOST_SEEDS = 5
"""Of a study that names more: a few show what the world is like."""
WORLD = ("population", "workload")
"""The tables that are drawn."""


def show_world(name: str, changes: Sequence[str], seeds: int | None, out: Path | None) -> None:
    """Draw a study's population, and print a table of it; of a cluster only print what it is.

    Axes are left aside: the base configuration is what is drawn, with ``changes``. Only [population] is needed, and
    [workload] read where there is one. Raises StudyError.
    """
    path = find(name, "sims", "study")
    study = load(path, (), seeds)
    base = study.base
    apply_changes(base, (), changes)
    on_cluster = is_cluster(base, str(path))
    drawn = CLUSTER if on_cluster else WORLD
    varied = sorted({key for axis in study.axes for point in axis for key in point.values if key.startswith(drawn)})
    if on_cluster:
        try:
            show_cluster(study, varied, seeds or MOST_SEEDS)
        except StudyError as error:
            raise StudyError(f"{error}{_of_axes(base, varied)}") from error
        return
    chosen = study.header.seed_list[: seeds or MOST_SEEDS]
    try:
        by_seed = {seed: _realised({**base, "seed": seed}, str(path)) for seed in chosen}
    except StudyError as error:
        raise StudyError(f"{error}{_of_axes(base, varied)}") from error
    run_s = _run_s(base, str(path))
    first = next(iter(by_seed.values()))
    try:
        _check_that_time_passes(first, base.get("run", {}))
        check_turns(first, run_s)
        world = look(study.header.title, by_seed, horizon_s(run_s, first.population))
    except ValueError as error:
        raise StudyError(f"{path}: population: {error}") from error
    folder = out or Path("results") / study.name / "world"
    written = [
        path
        for name, figure in figures(world, _command(path, changes, seeds)).items()
        for path in save(figure, folder, name)
    ]
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    console.print(f"[bold]{escape(study.header.title)}[/bold]  ({len(chosen)} seed{'s' * (len(chosen) > 1)})")
    if varied:
        console.print(f"Axes vary {', '.join(varied)}: drawn is the base (--set shows another point).", highlight=False)
    console.print(_table(world))
    for n, ceiling in world.ceilings.items():
        console.print(f"E[max of {n}] / E[t] = {times(ceiling)}", markup=False, highlight=False)
    names = ", ".join(str(path.relative_to(folder)) for path in written if path.suffix != ".svg")
    console.print(f"{folder}: {names}", markup=False, highlight=False, soft_wrap=True)


def _realised(config: dict[str, object], where: str) -> Clients:
    parts = build_world(config, where)
    try:
        workload = None if parts.workload is None else parts.workload()
        return realise(parts.population, workload, int(str(config["seed"])))
    except StudyError:
        raise
    except (ValueError, WorkloadError) as error:
        raise StudyError(f"{where}: population: {error}") from error


def _check_that_time_passes(clients: Clients, run: Mapping[str, Any]) -> None:
    """Refuse what a run is refused for whatever its strategy: nobody's work takes time, and only time ends it."""
    instant = clients.instant
    if len(instant) == clients.count and "time_s" in run and not run.keys() & {"updates", "versions", "server_step_s"}:
        raise ValueError(instant_refusal(instant[0]))


def _run_s(base: Mapping[str, Any], where: str) -> float | None:
    """How long a run of the base lasts; None where that is not said in seconds."""
    time_s: float | None = base.get("run", {}).get("time_s")
    if time_s is not None:
        try:
            check_real(f"{where}: run.time_s", time_s, 0, above=True)
        except ValueError as error:
            raise StudyError(str(error)) from None
    return time_s


def _of_axes(base: Mapping[str, Any], varied: Sequence[str]) -> str:
    """That the base lacks what the axes give, when it does."""
    missing = [key for key in varied if not _has(base, key)]
    if not missing:
        return ""
    return f" (axes give {', '.join(missing)}, and the base is drawn; --set {missing[0]}=... would give it to the base)"


def _has(tables: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(tables, Mapping) or part not in tables:
            return False
        tables = tables[part]
    return True


def _table(world: World) -> Table:
    table = Table(
        "tier",
        *(
            "clients",
            "mean",
            "median",
            "p90",
            "p99",
            "downlink (median)",
            "uplink (median)",
            "online",
        ),
        title="leases (seconds), bandwidth, share of time online",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for tier in world.tiers:
        table.add_row(escape(tier.name), *_row(tier))
    if len(world.tiers) > 1:
        table.add_section()
        table.add_row(EVERYBODY, *_everybody(world))
    return table


def _row(tier: Tier) -> list[str]:
    quantiles = np.quantile(tier.durations_s, [0.5, 0.9, 0.99])
    return [
        f"{tier.clients:,}",
        *(f"{value:.4g}" for value in (tier.durations_s.mean(), *quantiles)),
        _rate(tier.downlink),
        _rate(tier.uplink),
        f"{tier.online.mean():.1%}",
    ]


def _everybody(world: World) -> list[str]:
    values = np.concatenate([tier.durations_s for tier in world.tiers])
    weights = np.concatenate(
        [np.full(len(tier.durations_s), tier.share / len(tier.durations_s)) for tier in world.tiers]
    )
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[order])
    quantiles = [values[order][min(int(np.searchsorted(below, q)), len(values) - 1)] for q in (0.5, 0.9, 0.99)]
    online = sum(float(tier.online.mean()) * tier.share for tier in world.tiers)
    return [
        f"{sum(tier.clients for tier in world.tiers):,}",
        *(f"{value:.4g}" for value in (float((values * weights).sum()), *quantiles)),
        "",
        "",
        f"{online:.1%}",
    ]


def _rate(rates: np.ndarray | None) -> str:
    if rates is None:
        return "–"
    value = float(np.median(rates))
    for size, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} B/s"


def _command(path: Path, changes: Sequence[str], seeds: int | None) -> str:
    words = ["fedasync", "world", str(path)]
    for change in changes:
        words += ["--set", change]
    return shlex.join([*words, *(["--seeds", str(seeds)] if seeds is not None else [])])
