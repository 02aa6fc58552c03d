"""What theory says of a run: closed forms beside which measured values stand.

They hold for clients of one law that are always there, or for always-on clients of different speed; where no closed
form is known, none is given. Derivations: docs/validation.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import exp, lgamma
from typing import TYPE_CHECKING, Any

import numpy as np

from fedasync.aggregation.area import MeanOfLast
from fedasync.aggregation.ca2fl import CachedCalibration
from fedasync.aggregation.fedasync import Mixing
from fedasync.aggregation.fedavg import SampleWeightedMean
from fedasync.aggregation.fedbuff import DeltaMean
from fedasync.aggregation.fedfa import WindowMean
from fedasync.aggregation.mifa import LatestMean
from fedasync.core import Cohort, Concurrency, EveryVersion, Sliding, Strategy, Tumbling
from fedasync.core import staleness as core_staleness
from fedasync.simulation.laws import Law, Pareto, steps
from fedasync.simulation.population import Clients
from fedasync.simulation.settings import Settings
from fedasync.workloads import Quadratic

if TYPE_CHECKING:
    import polars as pl

    from fedasync.workloads.protocol import Workload


@dataclass(frozen=True)
class ClosedForm:
    """A predicted value and the measured one."""

    name: str
    formula: str
    predicted: float
    measured: float


@lru_cache(maxsize=256)
def expected_order_statistic(law: Law, k: int, n: int) -> float:
    """E[T₍ₖ₎], the k-th smallest of n independent draws: ∫ Q(B⁻¹(p)) dp with B the Beta(k, n − k + 1) distribution.

    k = n is the time of a synchronous round of n, k < n that of one with over-selection.
    """
    from scipy.integrate import quad
    from scipy.special import betainc, betaincinv

    if not 1 <= k <= n:
        raise ValueError(f"order statistic: k must lie in 1 … n = {n}, got {k}")
    if isinstance(law, Pareto) and law.cap is None:  # near α = 1 most of the mean lies beyond what a float u can reach
        a = 1 / law.alpha
        return law.minimum * exp(lgamma(n + 1) - lgamma(n + 1 - a) + lgamma(n - k + 1 - a) - lgamma(n - k + 1))
    if (finitely_many := steps(law)) is not None:
        values, at_most = finitely_many
        chances = np.diff(betainc(k, n - k + 1, np.asarray(at_most)), prepend=0.0)
        return float(np.asarray(values) @ chances)
    below_one = float(np.nextafter(1.0, 0.0))

    def value(p: float) -> float:
        return law.quantile(min(float(betaincinv(k, n - k + 1, p)), below_one))

    cuts = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.99999, 1.0)  # heavy tails live near 1
    return float(sum(quad(value, low, high, limit=200)[0] for low, high in pairwise(cuts)))


def speedup_ceiling(law: Law, n: int) -> float:
    """E[max of n] / E[T]: contributions a second without waiting, over those of synchronous rounds of as many clients.

    More than this no asynchronous strategy can gain over waiting for everybody, update for update.
    """
    return expected_order_statistic(law, n, n) / law.mean


def closed_forms(
    strategy: Strategy,
    clients: Clients,
    settings: Settings,
    workload: Workload | None,
    summary: dict[str, Any],
    metrics: pl.DataFrame,
) -> list[ClosedForm]:
    """Every closed form that applies to this run, beside what it measured (nothing for a run too short to measure)."""
    if summary["versions"] < 2 or summary["unfit_total"] or not is_plain(strategy, clients, settings):
        return []
    match strategy.admission:
        case Concurrency(redispatch="after_step" | "before_step") if isinstance(strategy.buffer, (Tumbling, Sliding)):
            found = _asynchronous(strategy, strategy.admission, clients, settings, summary)
        case Cohort():
            found = _synchronous(strategy.admission, clients, summary)
        case _:
            return []
    if isinstance(workload, Quadratic):
        found += _quadratic(strategy, workload, clients, summary, metrics)
    return found


def is_plain(strategy: Strategy, clients: Clients, settings: Settings) -> bool:
    """Nobody leaves, nothing is lost or dropped, arrivals count one by one, and a step takes no time."""
    population = clients.population
    return (
        clients.presence is None
        and not population.shares_link
        and population.dropout_probability == population.crash_probability == 0
        and strategy.max_staleness is strategy.clip_norm is strategy.max_norm is None
        and strategy.lease_timeout_s is None
        and settings.server_step_s == 0
        and isinstance(strategy.publication, EveryVersion)
        and (not isinstance(strategy.admission, Concurrency) or strategy.admission.simultaneous == "one_by_one")
    )


def _asynchronous(
    strategy: Strategy, admission: Concurrency, clients: Clients, settings: Settings, summary: dict[str, Any]
) -> list[ClosedForm]:
    n = admission.limit
    k = strategy.buffer.size if isinstance(strategy.buffer, Tumbling) else 1
    early = admission.redispatch == "before_step"
    found = []
    if summary["staleness"]["mean"] is not None:
        formula, value = ("n / K", n / k) if early else ("(n − 1) / K", (n - 1) / k)
        found.append(ClosedForm("mean staleness", formula, value, summary["staleness"]["mean"]))
    arrivals_per_s = (summary["ledger"]["buffered"] + summary["consumed"]) / summary["time_s"]
    if clients.are_alike:
        mean_s = clients.mean_work_s(0)
        found.append(ClosedForm("contributions per second", "n / E[t]", n / mean_s, arrivals_per_s))
    elif settings.selection == "same_client" and n <= clients.count:
        rate = sum(1 / clients.mean_work_s(client) for client in range(n))
        found.append(ClosedForm("contributions per second", "Σ 1 / E[tᵢ]", rate, arrivals_per_s))
    return found


def _synchronous(admission: Cohort, clients: Clients, summary: dict[str, Any]) -> list[ClosedForm]:
    law = clients.law
    if not clients.are_alike or law is None:
        return []
    n, g = admission.size, admission.target
    formula = "E[max of n]" if g == n else "E[g-th of n]"
    one_s = clients.slowness[0] * expected_order_statistic(law, g, n) + clients.fixed_s[0]
    measured_s = summary["last_version_s"] / summary["versions"]
    return [ClosedForm("round time (s)", formula, one_s, measured_s)]


def _quadratic(
    strategy: Strategy, workload: Quadratic, clients: Clients, summary: dict[str, Any], metrics: pl.DataFrame
) -> list[ClosedForm]:
    import polars as pl

    w = metrics.filter(pl.col("name") == "w")
    if len(w) < 3:
        return []
    if workload.contraction == 1 and workload.drift != 0 and strategy.proximal_mu == 0:
        predicted = _drift_per_arrival(strategy, workload.drift)
        half = len(w) // 2
        moved = float(w["value"][-1] - w["value"][half])
        arrivals = (w["version"][-1] - w["version"][half]) * _arrivals_a_version(strategy)
        if predicted is None or arrivals == 0:
            return []
        return [ClosedForm("drift per contribution", predicted[0], predicted[1], moved / arrivals)]
    if (expected := _expected_mean(strategy, workload, clients)) is not None:
        late = w["value"][len(w) // 2 :].mean()
        return [ClosedForm("model, mean of the later half", *expected, float(late))]  # type: ignore[arg-type]
    everyone = isinstance(strategy.admission, Cohort) and strategy.admission.target == clients.count
    alike = len(set(workload.client_samples())) == 1 and strategy.proximal_mu == 0
    if everyone and alike and workload.drift == 0 and isinstance(strategy.update, SampleWeightedMean):
        distance = metrics.filter(pl.col("name") == "distance")
        shrunk = float(distance["value"][0]) * workload.contraction ** int(distance["version"][-1])
        return [ClosedForm("distance to the optimum", "ρᵛ·‖w₀ − c̄‖", shrunk, float(distance["value"][-1]))]
    return []


def _expected_mean(strategy: Strategy, workload: Quadratic, clients: Clients) -> tuple[str, float] | None:
    """Where the model comes to rest when all clients are always at work, each at its own speed.

    Client i's work pulls the model by (1 − ρ)(cᵢ − w): what counts every arrival alike weighs cᵢ by the share of
    arrivals pᵢ ∝ 1/E[tᵢ]; what remembers every client weighs all cᵢ alike.
    """
    admission, update = strategy.admission, strategy.update
    if not isinstance(admission, Concurrency) or admission.limit != clients.count or workload.contraction == 1:
        return None
    if workload.drift or strategy.proximal_mu or not all(clients.mean_work_s(i) > 0 for i in range(clients.count)):
        return None
    centres = workload.centres.astype(np.float64).mean(axis=1)
    if isinstance(update, (MeanOfLast, LatestMean, CachedCalibration)):
        return "Σ cᵢ / N", float(centres.mean())
    constant = isinstance(getattr(update, "staleness", None), core_staleness.Constant)
    counted = isinstance(update, DeltaMean) and update.divide_by == "count"
    if isinstance(update, WindowMean) or (constant and (counted or isinstance(update, Mixing))):
        rates = np.array([1 / clients.mean_work_s(client) for client in range(clients.count)])
        return "Σ pᵢ·cᵢ", float((rates * centres).sum() / rates.sum())
    return None


def _arrivals_a_version(strategy: Strategy) -> int:
    match strategy.admission, strategy.buffer:
        case Cohort() as cohort, _:
            return cohort.target
        case _, Tumbling(size=size):
            return size
    return 1


def _drift_per_arrival(strategy: Strategy, d: float) -> tuple[str, float] | None:
    """How far one contribution moves the model when every client returns w + d."""
    admission, buffer, update = strategy.admission, strategy.buffer, strategy.update
    if isinstance(admission, Cohort) and isinstance(update, SampleWeightedMean):
        return "d / g", d / admission.target
    if not isinstance(admission, Concurrency) or admission.redispatch != "after_step":
        return None
    n = admission.limit
    if isinstance(update, WindowMean):
        k = getattr(buffer, "size", 1)
        return "d / (n + (K − 1)/2)", d / (n + (k - 1) / 2)
    constant = isinstance(getattr(update, "staleness", None), core_staleness.Constant)
    if isinstance(update, Mixing) and constant:
        a = update.alpha
        return "α·d / (1 + α·(n − 1))", a * d / (1 + a * (n - 1))
    if isinstance(update, DeltaMean) and constant and update.divide_by == "count":
        k = getattr(buffer, "size", 1)
        return "η·d / K", update.server_learning_rate * d / k
    return None
