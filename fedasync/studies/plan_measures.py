"""What a plan may ask for or bound: the numbers that a run's summary has, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedasync.report.statistics import histogram_quantile
from fedasync.simulation.cluster import Cluster
from fedasync.studies.build import build_cluster_world

Better = Literal["higher", "lower"]
Summary = Mapping[str, Any]
Config = Mapping[str, Any]

OPTIMIZER_BYTES = 16
"""Bytes a parameter that a trainer keeps, spread over its GPUs: bf16 weights and gradients, Adam's three in 32 bits."""


@dataclass(frozen=True)
class Measure:
    """A number of a run, and which of its values are the better ones. ``of`` returns None where a run has none."""

    name: str
    text: str
    unit: str
    better: Better
    of: Callable[[Summary, Config], float | None]

    @property
    def sign(self) -> int:
        """Of a value that is to be smallest."""
        return 1 if self.better == "lower" else -1

    def with_better(self, better: Better) -> Measure:
        return replace(self, better=better)

    @staticmethod
    def final(name: str, better: Better) -> Measure:
        """The last value of a metric that the run evaluates."""
        return Measure(name, f"final {name}", "", better, lambda summary, _: _number(summary["final"].get(name)))


def measures(*, on_cluster: bool, targets: Mapping[str, float]) -> dict[str, Measure]:
    """Those of a run on a cluster, or on federated clients, by name."""
    found = _CLUSTER if on_cluster else _FEDERATED
    if targets and not on_cluster:
        found = (
            *found,
            Measure("time_to_target_s", "time to the target", "s", "lower", _time_to_target_s),
            Measure("updates_to_target", "contributions to the target", "", "lower", _updates_to_target),
        )
    return {measure.name: measure for measure in found}


def shown(*, on_cluster: bool) -> tuple[str, ...]:
    """What is printed of a recommendation, in this order, objective and limits apart."""
    return _SHOWN_CLUSTER if on_cluster else _SHOWN_FEDERATED


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _time_to_target_s(summary: Summary, _: Config) -> float | None:
    """Until the last of the targets is reached; None where one is not."""
    times = [target["reached_s"] for target in summary["targets"]]
    return None if not times or None in times else float(max(times))


def _updates_to_target(summary: Summary, _: Config) -> float | None:
    """Contributions applied until the last of the targets is reached; None where one is not."""
    counts = [target["reached_updates"] for target in summary["targets"]]
    return None if not counts or None in counts else float(max(counts))


def _at(*path: str) -> Callable[[Summary, Config], float | None]:
    """A number of the summary, by the keys that lead to it; None where they lead to none."""

    def of(summary: Summary, _: Config) -> float | None:
        found: Any = summary
        for key in path:
            if not isinstance(found, Mapping) or key not in found:
                return None
            found = found[key]
        return _number(found)

    return of


def _a_second(key: str) -> Callable[[Summary, Config], float | None]:
    return lambda summary, _: float(summary[key]) / summary["time_s"] if summary["time_s"] else None


def _staleness_p99(summary: Summary, _: Config) -> float | None:
    histogram = {int(value): count for value, count in summary["staleness"]["histogram"].items()}
    return float(histogram_quantile(dict(sorted(histogram.items())), 0.99)) if histogram else None


_FEDERATED = (
    Measure("updates_per_second", "contributions applied", "1/s", "higher", _a_second("consumed")),
    Measure("versions_per_second", "versions", "1/s", "higher", _a_second("versions")),
    Measure("staleness_mean", "staleness of what is applied: mean", "versions", "lower", _at("staleness", "mean")),
    Measure("staleness_p90", "staleness of what is applied: p90", "versions", "lower", _at("staleness", "p90")),
    Measure("staleness_p99", "staleness of what is applied: p99", "versions", "lower", _staleness_p99),
    Measure("staleness_max", "staleness of what is applied: max", "versions", "lower", _at("staleness", "max")),
    Measure("useful_share", "slots × time in useful work", "", "higher", _at("utilisation", "useful")),
    Measure("wasted_share", "slots × time in lost work", "", "lower", _at("utilisation", "wasted")),
    Measure("waiting_share", "slots × time that nobody fills", "", "lower", _at("utilisation", "waiting")),
    Measure("server_share", "time in which the server steps", "", "lower", _at("utilisation", "server")),
)
_SHOWN_FEDERATED = (
    "updates_per_second",
    "versions_per_second",
    "useful_share",
    "wasted_share",
    "waiting_share",
    "server_share",
    "staleness_mean",
    "staleness_p99",
    "staleness_max",
)


def _trained(*path: str) -> Callable[[Summary, Config], float | None]:
    """A number of what a run's rollouts came to, its warm-up apart."""
    return _at("rollouts", *path)


def _length_ratio(summary: Summary, _: Config) -> float | None:
    """Trained over generated length; where answers were aborted, no more than with what they had counted as generated.

    What they would have come to nobody knows, so the ratio may be lower still.
    """
    bias = summary.get("rollouts", {}).get("length_bias", {})
    known = [bias[name] for name in ("ratio", "ratio_at_most") if bias.get(name) is not None]
    return _number(min(known, default=None))


def _dispatch(number: str) -> Callable[[Summary, Config], float | None]:
    """Of staleness from dispatch to use, an answer each, its warm-up apart."""

    def of(summary: Summary, _: Config) -> float | None:
        rows = summary.get("rollouts", {}).get("staleness", ())
        return next((_number(row[number]) for row in rows if row["kind"] == "dispatch"), None)

    return of


def _share(whose: str, *what: str) -> Callable[[Summary, Config], float | None]:
    def of(summary: Summary, _: Config) -> float | None:
        found = [summary["shares"][whose][name] for name in what]
        return None if None in found else float(sum(found))

    return of


def _cluster(config: Config) -> Cluster:
    return build_cluster_world(dict(config), "plan")[0]


def _usd_per_hour(_: Summary, config: Config) -> float:
    cluster = _cluster(config)
    return cluster.hardware.usd_per_hour * cluster.gpus


def _usd_per_million_tokens(summary: Summary, config: Config) -> float | None:
    rate = _trained("throughput", "tokens_per_second")(summary, config)
    return _usd_per_hour(summary, config) / 3600 / rate * 1e6 if rate else None


def _trainer_bytes_per_gpu(_: Summary, config: Config) -> float:
    cluster = _cluster(config)
    return OPTIMIZER_BYTES * cluster.language_model.parameters / cluster.training_gpus


_TRAINED = "staleness of trained answers since dispatch"
_CLUSTER = (
    Measure("tokens_per_second", "tokens trained", "1/s", "higher", _trained("throughput", "tokens_per_second")),
    Measure("step_s", "time of a step: mean", "s", "lower", _trained("throughput", "step_s", "mean")),
    Measure("step_p95_s", "time of a step: p95", "s", "lower", _trained("throughput", "step_s", "p95")),
    Measure("trainer_waiting_share", "trainer waits for data", "", "lower", _share("trainer", "waiting")),
    Measure(
        "trainer_syncing_share", "trainer syncs or switches", "", "lower", _share("trainer", "syncing", "switching")
    ),
    Measure("servers_idle_share", "servers idle", "", "lower", _share("servers", "idle")),
    Measure("servers_prefilling_share", "servers prefill", "", "lower", _share("servers", "prefilling")),
    Measure("servers_paused_share", "servers paused for weights", "", "lower", _share("servers", "paused")),
    Measure("staleness_mean", f"{_TRAINED}: mean", "versions", "lower", _dispatch("mean")),
    Measure("staleness_p99", f"{_TRAINED}: p99", "versions", "lower", _dispatch("p99")),
    Measure("staleness_max", f"{_TRAINED}: max", "versions", "lower", _dispatch("max")),
    Measure("length_ratio", "trained over generated length", "", "higher", _length_ratio),
    Measure("wasted_share", "generated tokens that are lost", "", "lower", _trained("waste", "wasted_share")),
    Measure("usd_per_hour", "cost at assumed prices", "USD/h", "lower", _usd_per_hour),
    Measure("usd_per_million_tokens", "cost of 10⁶ trained tokens", "USD", "lower", _usd_per_million_tokens),
    Measure(
        "trainer_bytes_per_gpu",
        f"weights, gradients, Adam at {OPTIMIZER_BYTES} B a parameter",
        "bytes/GPU",
        "lower",
        _trainer_bytes_per_gpu,
    ),
)
_SHOWN_CLUSTER = tuple(
    measure.name for measure in _CLUSTER if measure.name not in ("trainer_bytes_per_gpu", "step_p95_s")
)
