"""A cluster fitted to recorded runs on prompts: what its parts take, and the tables of a study that has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from fedasync.report.rollout_numbers import servers_of
from fedasync.runs.run import Run
from fedasync.simulation.cluster import ClusterSettings
from fedasync.studies.errors import StudyError
from fedasync.studies.rollout_fits import Decode, Floats, Line, Mean, decode, line, pooled, prefill
from fedasync.studies.rollout_timings import Timings, timings
from fedasync.studies.run_folders import name_of

if TYPE_CHECKING:
    import polars as pl

    from fedasync.studies.contention_probe import Probed

MOST_PROMPTS = 5_000
"""Lengths of prompts that a study's file lists."""
ALIKE = (
    *("strategy", "prompts", "processes", "cluster", "run"),
    *("task", "policy", "sampling", "objective", "optimiser"),
)
"""Tables in which runs that are fitted together do not differ."""
MACHINE = {
    "name": "processes of a machine",
    "memory_bytes": 1.0,
    "memory_bytes_per_second": 1.0,
    "flops_per_second": 1.0,
    "network_bytes_per_second": 1.0,
    "usd_per_hour": 0.0,
}
"""A GPU that nothing depends on: all times are measured."""


@dataclass(frozen=True)
class Fitted:
    """What was fitted to runs: means in seconds, lines, and the answers of whole groups."""

    runs: Sequence[Run]
    timings: Sequence[Timings]
    decode: Decode
    prefill: Line
    train: Line
    publish: Mean
    load: Mean
    latency: Mean
    reward: Mean
    evaluate: Mean
    drift: Line | None
    """Tokens of an answer by its version; None where there are too few."""
    fallen: bool
    """They became fewer: the line is of their number taken negatively."""
    probed: Probed | None
    step_spread_s: float
    """Standard deviation of a step's time within a run, around the line of that run."""

    @property
    def warm_up(self) -> int:
        return _warm_up(self.runs[0])


def _warm_up(run: Run) -> int:
    return int((run.config.get("run") or {}).get("warm_up_versions") or 0)


def fitted(runs: Sequence[Run], probed: Probed | None) -> Fitted:
    """Fit runs that differ in their seeds alone. Where contention was ``probed``, it is taken out of what overlapped.

    Raises StudyError.
    """
    demand_alike(runs)
    found = []
    for run in runs:
        try:
            found.append(timings(run, _warm_up(run)))
        except ValueError as error:
            raise StudyError(f"{name_of(run)}: {error}") from None
    servers, trainer = (1.0, 1.0) if probed is None else (probed.servers.value, probed.trainer.value)

    def alone(seconds: Floats, overlapped: Any) -> Floats:
        return seconds / np.where(overlapped, servers, 1.0)

    def all_of(name: str) -> Floats:
        return pooled([getattr(each, name) for each in found])

    iterations = [alone(each.decode_s, each.decode_overlapped) for each in found]
    prefills = [alone(each.prefill_s, each.prefill_overlapped) for each in found]
    steps = [each.step_s * (1 - each.step_overlap * (1 - 1 / trainer)) for each in found]
    if not sum(map(len, iterations)):
        raise StudyError(f"{name_of(runs[0])}: no iteration after the warm-up, so nothing says how long decoding took")
    late = all_of("version") >= _warm_up(runs[0])
    version, tokens = all_of("version")[late], all_of("tokens")[late]
    drift = line(tokens, version=version) if len(version) and np.ptp(version) > 0 else None
    fallen = drift is not None and not drift["version"]
    if fallen:
        drift = line(tokens.max() - tokens, version=version)
    speed = decode(pooled(iterations), *map(all_of, ("decode_running", "decode_context", "loop_s", "loop_running")))
    own = [line(seconds, tokens=each.step_tokens) for seconds, each in zip(steps, found, strict=True)]
    return Fitted(
        runs,
        found,
        speed,
        prefill(pooled(prefills), all_of("prefill_tokens"), speed.line),
        line(pooled(steps), tokens=all_of("step_tokens")),
        Mean.of(all_of("sync_s")),
        Mean.of(all_of("load_s")),
        Mean.of(all_of("latency_s")),
        Mean.of(all_of("reward_s")),
        Mean.of(all_of("evaluate_s")),
        drift,
        fallen,
        probed,
        float(np.sqrt(np.mean([each.spread**2 for each in own]))),
    )


def demand_alike(runs: Sequence[Run]) -> None:
    """Raise StudyError for a run without a [strategy] with a name, and where two differ in more than their seeds."""
    first = runs[0]
    for run in runs:
        strategy = run.config.get("strategy")
        if not isinstance(strategy, Mapping) or "name" not in strategy:
            raise StudyError(
                f"{name_of(run)}: its configuration has no [strategy] with a name (it was not made from a file), so no "
                "study can be written around it; a run of `fedasync run` or `fedasync sim` would do"
            )
        for table in ALIKE:
            if run.config.get(table) != first.config.get(table):
                raise StudyError(
                    f"{name_of(run)}: its [{table}] is not that of {name_of(first)}; runs that differ in nothing but "
                    "their seed would do"
                )


def answers_table(found: Fitted) -> pl.DataFrame:
    """prompt, generated_tokens, prompt_tokens, run: a row an answer of a whole group, each group a prompt of its own.

    Runs are numbered so that a simulation of a run's seed takes its answers, as far as that goes.
    """
    import polars as pl

    parts, offset = [], 0
    places = [run.seed % len(found.runs) for run in found.runs]
    if len(set(places)) < len(places):
        places = list(range(len(found.runs)))
    for place, each in zip(places, found.timings, strict=True):
        columns = {"prompt": each.lease + offset, "generated_tokens": each.tokens, "prompt_tokens": each.prompt_tokens}
        parts.append(pl.DataFrame(columns).with_columns(run=pl.lit(place, pl.Int64)))
        offset += int(each.lease.max(initial=0)) + 1
    return pl.concat(parts).filter(pl.col("generated_tokens") >= 1).sort("prompt", maintain_order=True)


def cluster_tables(found: Fitted, answers_file: str) -> dict[str, dict[str, Any]]:
    """[cluster] and [prompts] of the fitted runs; ``answers_file`` is where `answers_table` was written."""
    config, decoding = found.runs[0].config, found.decode
    own = config.get("processes") or config.get("cluster") or {}
    asked = config.get("prompts") or {}
    speed: dict[str, Any] = {"kind": "measured", "context_s": decoding.context_s}
    if decoding.knots:
        speed |= {"running": [b for b, _ in decoding.knots], "running_s": [seconds for _, seconds in decoding.knots]}
    else:
        speed |= {"overhead_s": decoding.overhead_s, "per_sequence_s": decoding.per_sequence_s}
    speed |= {
        "prefill_call_s": found.prefill["one"],
        "prefill_token_s": found.prefill["tokens"],
        "max_running": _max_running(found.runs[0]),
        # Workers compute a prompt once for all answers that begin together.
        "shared_prompts": "processes" in config or bool((own.get("decoding") or {}).get("shared_prompts")),
    }
    trainer: dict[str, Any] = {"seconds_per_token": found.train["tokens"], "fixed_s": found.train["one"]}
    trainer |= {"latency_s": found.latency.value, "evaluate_s": found.evaluate.value}
    trainer["spread_s"] = found.step_spread_s
    count = servers_of(found.runs[0])
    kv = own.get("kv") or (own.get("weights") or {}).get("kv") or "recompute"
    cluster: dict[str, Any] = {
        "generation_gpus": count,
        "training_gpus": 1,
        "gpu": dict(MACHINE),
        "decoding": speed,
        "trainer": trainer,
        "weights": {
            "order": "each",
            "publish_s": found.publish.value,
            "load_s": found.load.value,
            "kv": kv,
            "transfer": False,
        },
        "reward": {"latency_s": {"kind": "constant", "value": found.reward.value}},
    }
    cluster |= {name: own[name] for name in ("partial_groups", "dropped", "most_attempts") if name in own}
    if found.probed is not None:
        cluster["contention"] = {
            "servers": max(1.0, found.probed.servers.value),
            "trainer": max(1.0, found.probed.trainer.value),
        }
    prompts: dict[str, Any] = {"answers": asked.get("answers", 16), "prompt_tokens": _prompt_tokens(found)}
    prompts["answer_tokens"] = {"kind": "recorded", "file": answers_file, "in_order": True}
    return {"cluster": cluster, "prompts": prompts}


def _max_running(run: Run) -> int:
    config = run.config
    if "processes" in config:
        return int(config["processes"].get("max_running", 64))
    return int(((config.get("cluster") or {}).get("decoding") or {}).get("max_running", 1024))


def _prompt_tokens(found: Fitted) -> dict[str, Any]:
    """One length, or those of the recorded groups in their order, of the first run alone."""
    every = {float(tokens) for each in found.timings for tokens in np.unique(each.prompt_tokens)}
    if len(every) == 1:
        return {"kind": "constant", "value": every.pop()}
    first = min(zip(found.runs, found.timings, strict=True), key=lambda pair: pair[0].seed)[1]
    _, firsts = np.unique(first.lease, return_index=True)
    return {"kind": "values", "values": first.prompt_tokens[firsts].tolist()[:MOST_PROMPTS]}


def run_table(run: Run, evaluates: bool) -> dict[str, Any]:
    """[run] of a simulated run that ends as a recorded one did."""
    known = {field.name for field in fields(ClusterSettings)} - {"evaluate_every"}
    found = {key: value for key, value in run.config["run"].items() if key in known and value is not None}
    if evaluates and run.config["run"].get("evaluate_every") is not None:
        found["evaluate_every"] = run.config["run"]["evaluate_every"]
    return found
