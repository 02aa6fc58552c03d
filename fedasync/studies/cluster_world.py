"""``fedasync world`` of a cluster, before any run: how fast its servers and trainer are, how long its answers."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedasync.simulation.cluster import Cluster, Prompts
from fedasync.simulation.cluster.prompts import PromptStream
from fedasync.strategies.bounds import told_of_bounds
from fedasync.studies.build import build_cluster, build_cluster_world
from fedasync.studies.store import learns
from fedasync.studies.study import Study

DRAWN_GROUPS = 2048
"""Groups of a seed whose lengths are looked at."""
SHARES = (0.5, 0.9, 0.99)


def show_cluster(study: Study, varied: Sequence[str], most_seeds: int) -> None:
    """Print the cluster of a study's base: servers and their speed by batch, a step of the trainer, lengths of answers.

    ``varied`` are the keys that axes change, which are left aside. Raises StudyError.
    """
    config = {**study.base, "seed": 0}
    cluster, prompts, _ = build_cluster_world(config, str(study.path))
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    console.print(f"[bold]{escape(study.header.title)}[/bold]")
    if varied:
        console.print(f"Axes vary {', '.join(varied)}: shown is the base (--set shows another point).", highlight=False)
    console.print(_machines(cluster))
    if learns(config):
        console.print(_speeds(cluster, 0.0))
        console.print("How long answers are is what the policy says, as it learns.", highlight=False)
        return
    seeds = study.header.seed_list[:most_seeds]
    lengths = [answer for seed in seeds for answer in _lengths(prompts, seed)]
    console.print(_speeds(cluster, float(np.mean([tokens for _, tokens in lengths]))))
    console.print(_answers(lengths, len(seeds)))
    batch = study.base.get("strategy", {}).get("batch")
    if isinstance(batch, int) and not isinstance(batch, bool) and batch > 0:
        whole = np.array([prompt + tokens for prompt, tokens in lengths], np.float64)
        count = batch * prompts.answers
        step_s = cluster.trainer_cost.seconds(float(whole.mean()) * count, float((whole**2).mean()) * count, count)
        console.print(
            f"A step on {batch} prompts: {whole.mean() * count:,.0f} tokens, {step_s:.4g} s of training; new weights "
            f"take a server {cluster.sync_s:.4g} s, apart from the delay until it learns of them.",
            highlight=False,
        )
    changes = {key for axis in study.axes for point in axis for key in point.values}
    if "name" in study.base.get("strategy", {}) and not any(key.startswith("strategy") for key in changes):
        told = told_of_bounds(build_cluster({**config, "run": {"versions": 1}}, str(study.path)).strategy)
        console.print(f"Staleness: {told}.", markup=False, highlight=False, soft_wrap=True)


def _lengths(prompts: Prompts, seed: int) -> list[tuple[int, int]]:
    """Tokens of prompt and answer, an answer each."""
    stream = PromptStream(prompts, seed)
    found: list[tuple[int, int]] = []
    for position in range(DRAWN_GROUPS):
        place = stream.order.prompt_at(position)
        if place is None:
            break
        group = stream.group(*place)
        found += [(group.prompt_tokens, tokens) for tokens in group.tokens]
    return found


def _machines(cluster: Cluster) -> Table:
    gpu, model, cost = cluster.hardware, cluster.language_model, cluster.server_cost
    table = Table(
        "GPUs", "servers", "GPUs a server", "model", "weights", "KV cache of a server", "most at once", "price"
    )
    capacity = f"{cost.capacity_tokens:,.0f} tokens" if isfinite(cost.capacity_tokens) else "no limit"
    divided = "in turns" if cluster.colocated else f"{cluster.generation_gpus} + {cluster.training_gpus}"
    table.add_row(
        f"{cluster.gpus} {gpu.name} ({divided})",
        str(cluster.servers),
        str(cluster.tensor_parallel),
        model.name,
        f"{model.weight_bytes / 1e9:.3g} GB",
        capacity,
        f"{cost.max_running:,} answers",
        f"{gpu.usd_per_hour * cluster.gpus:,.4g} USD/h (assumed)",
    )
    return table


def _speeds(cluster: Cluster, mean_tokens: float) -> Table:
    """Decoding with so many answers on a server, each half done."""
    cost = cluster.server_cost
    table = Table("answers on a server", "each (tokens/s)", "server (tokens/s)", "all servers (tokens/s)")
    for column in table.columns:
        column.justify = "right"
    running = [1 << power for power in range(0, 17, 2) if 1 << power <= cost.max_running]
    for number in dict.fromkeys([*running, cost.max_running]):
        context = number * mean_tokens / 2
        if context > cost.capacity_tokens:
            table.add_row(f"{number:,}", "–", "beyond the KV cache", "–")
            break
        rate = cost.tokens_per_second(number, context)
        cells = (rate / number, rate, rate * cluster.servers)
        table.add_row(f"{number:,}", *(f"{cell:,.4g}" if cell < 1e4 else f"{cell:,.0f}" for cell in cells))
    table.title = f"decoding, answers half done at {mean_tokens:,.0f} tokens"
    table.title_justify = "left"
    return table


def _answers(lengths: list[tuple[int, int]], seeds: int) -> Table:
    table = Table("tokens", "mean", *(f"p{share * 100:g}" for share in SHARES), "longest")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, values in zip(("prompt", "answer"), np.array(lengths).T, strict=True):
        cells = (values.mean(), *np.quantile(values, SHARES, method="inverted_cdf"), values.max())
        table.add_row(name, *(f"{cell:,.0f}" for cell in cells))
    table.title = f"lengths of {len(lengths):,} answers ({seeds} seed{'s' * (seeds > 1)})"
    table.title_justify = "left"
    return table
