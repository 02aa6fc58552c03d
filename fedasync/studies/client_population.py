"""From measured exchanges to a population of the simulator: who takes how long, and how often a task fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from fedasync.runs import exchanges as words
from fedasync.simulation.devices import Tier, deal_tiers
from fedasync.simulation.laws import Constant, Lognormal, ShiftedExponential
from fedasync.studies.client_laws import FEW, Fit, Fitted, Floats, Slope, fit, slope

if TYPE_CHECKING:
    import polars as pl

SHORTEST_S = 1e-6
NEVER_THERE = 5
"""Tasks a client, on average, from which on one who had none is taken for absent rather than unlucky."""
FOR_EVER_S = 1e9


@dataclass(frozen=True)
class Share:
    """``hits`` of ``count``."""

    hits: int
    count: int

    @property
    def value(self) -> float:
        return self.hits / self.count if self.count else 0.0

    @property
    def standard_error(self) -> float:
        return sqrt(self.value * (1 - self.value) / self.count) if self.count else 0.0


class Measured:
    """What the exchanges of some runs say of ``clients`` clients.

    ``tables`` are one a run, as in docs/log.md, each with the column ``ended_s``: when the lease ended by the log.
    """

    def __init__(self, tables: Sequence[pl.DataFrame], clients: int) -> None:
        import polars as pl

        self.clients = clients
        self.tasks = pl.concat([t.with_columns(in_flight=pl.Series(_in_flight(t))) for t in tables])
        replied = pl.col("returned_s").is_not_null()
        complete = replied & pl.col("outcome").is_in(words.COMPLETE)
        lease_s = pl.col("returned_s") - pl.col("sent_s")
        self.timed = self.tasks.filter(complete).with_columns(
            lease_s=lease_s,
            overhead_s=lease_s - pl.col("work_s"),
            size=pl.col("sent_bytes") + pl.col("returned_bytes").fill_null(pl.col("sent_bytes")),
        )
        """Tasks whose whole time is known; ``work_s`` and ``overhead_s`` are null where the client's clock is not."""
        ours = pl.col("outcome").is_in([words.CANCELLED, words.RESTARTED])
        self.answerable = self.tasks.filter(complete | ~ours)
        """Tasks whose outcome was the client's doing."""
        fate = self.answerable.filter(~complete)
        self._silent = fate.filter(pl.col("outcome") == words.TIMEOUT)
        self._told = fate.filter(pl.col("outcome") != words.TIMEOUT)

    @cached_property
    def seen(self) -> list[int]:
        """Clients that had a task, in order."""
        return sorted(self.tasks["worker"].unique().to_list())

    @cached_property
    def known(self) -> list[int]:
        """Clients of which there is a duration."""
        return sorted(self.timed["worker"].unique().to_list())

    @property
    def dropouts(self) -> Share:
        """Failures that the server heard of."""
        return Share(self._told.height, self.answerable.height)

    @property
    def silences(self) -> Share:
        """Tasks of which nothing was heard until their time was up."""
        return Share(self._silent.height, self.answerable.height)

    @property
    def silent_s(self) -> float | None:
        """How long the server waited for those that stayed silent, on average."""
        waited = (self._silent["ended_s"] - self._silent["sent_s"]).drop_nulls()
        return float(waited.mean()) if len(waited) else None  # type: ignore[arg-type]

    def failures(self, client: int) -> Share:
        """Of one client, told or silent."""
        import polars as pl

        mine = pl.col("worker") == client
        lost = self._told.filter(mine).height + self._silent.filter(mine).height
        return Share(lost, self.answerable.filter(mine).height)

    def of(self, client: int, column: str) -> Floats:
        """A column of a client's timed tasks, where it is known."""
        import polars as pl

        return self.timed.filter(pl.col("worker") == client)[column].drop_nulls().to_numpy().astype(np.float64)

    def overhead_s(self, client: int, per_byte_s: float = 0.0) -> Floats:
        """The overhead of each message of a client that is known, without what its bytes cost."""
        import polars as pl

        mine = self.timed.filter((pl.col("worker") == client) & pl.col("overhead_s").is_not_null())
        return (mine["overhead_s"] - per_byte_s * mine["size"]).to_numpy().astype(np.float64)

    @cached_property
    def per_byte_s(self) -> Slope | None:
        """Overhead by bytes, both ways together; None where messages hardly differ in size."""
        return self._slope("size", "overhead_s")

    def contention(self, column: str) -> Slope | None:
        """Seconds of a column by the number in flight when the task was sent; None where that hardly varied."""
        return self._slope("in_flight", column)

    def _slope(self, x: str, y: str) -> Slope | None:
        known = self.timed.drop_nulls([x, y])
        return slope(known[x], known[y], known["worker"])


def _in_flight(table: pl.DataFrame) -> Floats:
    """Tasks of a run that were on their way when each was sent, itself included."""
    sent = table["sent_s"].to_numpy()
    ended = table["returned_s"].fill_null(table["ended_s"]).fill_null(float("inf")).to_numpy()
    begun = np.searchsorted(np.sort(sent), sent, side="right")
    done = np.searchsorted(np.sort(ended), sent, side="right")
    return (begun - done).astype(np.float64)


@dataclass(frozen=True)
class Choice:
    """How the population is written. A lease of client c takes slowness × (draw of its law) + transfers."""

    shared: bool
    """One law of mean 1 for everybody, times the client's own mean; else a law a client."""
    apart: bool
    """The message's overhead is a constant of each client; else it is in the law."""
    laws: Mapping[int, Fitted]
    """Of each client's lease in seconds, transfers aside."""
    constant_s: Mapping[int, float]
    """Transfers of each client."""
    aic: float

    def quantile_s(self, client: int, u: float) -> float:
        """Of a client's whole lease."""
        return self.laws[client].quantile(u) + self.constant_s[client]

    def mean_s(self, client: int) -> float:
        return self.laws[client].mean + self.constant_s[client]


def choices(measured: Measured) -> list[Choice]:
    """Ways to write the population, the likeliest (AIC) first.

    Raises ValueError where there is no duration to fit.
    """
    if not measured.known:
        raise ValueError("no task came back with a duration, so there is nothing to fit")
    per_byte = _per_byte_s(measured)
    lease_s = {c: measured.of(c, "lease_s") - per_byte * measured.of(c, "size") for c in measured.known}
    rest_s = {c: float(x.mean()) if len(x := measured.overhead_s(c, per_byte)) else 0.0 for c in lease_s}
    found = [_own(lease_s, None), _shared(lease_s, None)]
    apart_s = {c: lease_s[c] - max(rest_s[c], 0.0) for c in lease_s}
    if any(rest > SHORTEST_S for rest in rest_s.values()) and all((x > 0).all() for x in apart_s.values()):
        constant = {c: max(rest, 0.0) for c, rest in rest_s.items()}
        found += [_own(apart_s, constant), _shared(apart_s, constant)]
    size = float(measured.timed["size"].mean())  # type: ignore[arg-type]
    moved = dict.fromkeys(lease_s, per_byte * size)
    with_bytes = [
        Choice(c.shared, c.apart, c.laws, {k: c.constant_s[k] + moved[k] for k in moved}, c.aic) for c in found
    ]
    return sorted(with_bytes, key=lambda choice: choice.aic)


def _per_byte_s(measured: Measured) -> float:
    told = measured.per_byte_s
    return told.value if told is not None and told.is_told and told.value > 0 else 0.0


def _own(values: Mapping[int, Floats], constant: Mapping[int, float] | None) -> Choice:
    fits = {c: fit(x) for c, x in values.items()}
    aic = sum(one.aic for one in fits.values()) + (0 if constant is None else 2 * len(fits))
    laws = {c: one.law for c, one in fits.items()}
    return Choice(False, constant is not None, laws, constant or dict.fromkeys(fits, 0.0), aic)


def _shared(values: Mapping[int, Floats], constant: Mapping[int, float] | None) -> Choice:
    means = {c: max(float(x.mean()), SHORTEST_S) for c, x in values.items()}
    pooled = fit(np.concatenate([x / means[c] for c, x in values.items()]), means=len(means))
    stretched = sum(len(x) * log(means[c]) for c, x in values.items())  # densities of seconds, not of multiples
    parameters = len(means) + pooled.parameters - 1 + (0 if constant is None else len(means))
    aic = 2 * parameters - 2 * (pooled.log_likelihood - stretched)
    laws = {c: scaled(pooled.law, mean) for c, mean in means.items()}
    return Choice(True, constant is not None, laws, constant or dict.fromkeys(means, 0.0), aic)


def scaled(law: Fitted, factor: float) -> Fitted:
    """The law of ``factor`` times a draw."""
    match law:
        case Constant():
            return Constant(law.value * factor)
        case Lognormal():
            return Lognormal(law.mean * factor, law.sigma)
        case ShiftedExponential():
            return ShiftedExponential(law.shift * factor, law.scale * factor)


def work_fits(measured: Measured) -> dict[int, Fit]:
    """The law of each client's work alone, without the message's overhead, of those whose work is known."""
    work_s = {client: measured.of(client, "work_s") for client in measured.known}
    return {client: fit(values) for client, values in work_s.items() if len(values)}


def population_table(measured: Measured, choice: Choice, seed: int) -> dict[str, Any]:
    """``[population]`` as a study has it. Tiers are put so that under ``seed`` each client gets its own law."""
    laws = dict(choice.laws)
    constant_s = dict(choice.constant_s)
    strangers = [c for c in range(measured.clients) if c not in laws]
    mean_s, mean_constant_s = (float(np.mean(x)) for x in ([x.mean for x in laws.values()], list(constant_s.values())))
    for client in strangers:
        laws[client] = scaled(next(iter(laws.values())), mean_s / _mean(laws)) if choice.shared else Constant(mean_s)
        constant_s[client] = mean_constant_s
    table: dict[str, Any] = {"clients": measured.clients}
    if choice.shared:
        first = min(laws)
        table["duration_s"] = _law_table(scaled(laws[first], 1 / max(laws[first].mean, SHORTEST_S)))
        table["slowness"] = {"kind": "values", "values": [_short(laws[c].mean) for c in range(measured.clients)]}
    if any(constant_s.values()):
        size = float(measured.timed["size"].mean()) / 2  # type: ignore[arg-type]
        table["model_bytes"] = max(round(size), 1)
        rates = [_short(table["model_bytes"] / max(constant_s[c], SHORTEST_S)) for c in range(measured.clients)]
        table["downlink_bytes_per_second"] = {"kind": "values", "values": rates}
    if measured.dropouts.hits:
        table["dropout_probability"] = _short(measured.dropouts.value)
    if measured.silences.hits:
        table["crash_probability"] = _short(measured.silences.value)
    if absent(measured):
        there = [[] if c in absent(measured) else [[0.0, FOR_EVER_S]] for c in range(measured.clients)]
        table["availability"] = {"kind": "intervals", "intervals": there}
    if not choice.shared:
        placed = deal_tiers([Tier(str(c), count=1) for c in range(measured.clients)], measured.clients, seed)
        client_at = {place: client for client, place in enumerate(placed)}
        table["tiers"] = [
            {"name": f"client {client_at[p]}", "count": 1, "duration_s": _law_table(laws[client_at[p]])}
            for p in range(measured.clients)
        ]
    return table


def absent(measured: Measured) -> list[int]:
    """Clients that were never given a task, though those who were had many."""
    if measured.tasks.height < NEVER_THERE * len(measured.seen):
        return []
    return [client for client in range(measured.clients) if client not in measured.seen]


def few(measured: Measured) -> list[int]:
    """Clients of whom there are too few durations to tell a law."""
    return [client for client in measured.known if len(measured.of(client, "lease_s")) < FEW]


def _mean(laws: Mapping[int, Fitted]) -> float:
    return max(next(iter(laws.values())).mean, SHORTEST_S)


def _law_table(law: Fitted) -> dict[str, Any]:
    return {"kind": law.kind, **{name: _short(value) for name, value in vars(law).items() if name != "kind"}}


def _short(value: float) -> float:
    """Nine digits: more than any clock has told."""
    return float(f"{value:.9g}")
