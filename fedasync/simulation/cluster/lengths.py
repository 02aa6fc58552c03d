"""How long answers are: a difficulty of the prompt and luck of the answer, one law for all, or a recorded run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import exp, inf, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedasync.core.bounds import check_real
from fedasync.simulation.cluster.draws import Floats, Integers, quantiles
from fedasync.simulation.laws import Constant, Law, Lognormal, Pareto, Uniform, Values, steps
from fedasync.streams import Draws

if TYPE_CHECKING:
    import polars as pl

Lengths = Callable[[Integers, int, int], Floats]
"""(prompts, epoch, attempt) → tokens of their answers, unrounded and uncut: shape (prompts, answers)."""


@dataclass(frozen=True)
class TwoLevel:
    """Lognormal on two levels: median × exp(``prompt_sigma``·z) for a prompt, × exp(``answer_sigma``·z′) for an answer.

    A hard prompt is long for all of its answers. Near AReaL's 1.5B runs: 6900, 0.70, 0.40, cut at 27,648 tokens (a
    fit of ours to their published mean and share of cut answers; how the spread splits over the levels is free).
    """

    median: float
    prompt_sigma: float
    answer_sigma: float
    kind: Literal["two_level_lognormal"] = "two_level_lognormal"

    def __post_init__(self) -> None:
        check_real("two_level_lognormal: median", self.median, 0, above=True)
        check_real("two_level_lognormal: prompt_sigma", self.prompt_sigma, 0, 10)
        check_real("two_level_lognormal: answer_sigma", self.answer_sigma, 0, 10)

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm of one answer's length."""
        return sqrt(self.prompt_sigma**2 + self.answer_sigma**2)

    @property
    def mean(self) -> float:
        """Of an answer that nothing cuts."""
        return self.median * exp(self.sigma**2 / 2)

    def quantile(self, u: float) -> float:
        """Of one answer, whatever its prompt."""
        return self.median * exp(self.sigma * NormalDist().inv_cdf(u))


@dataclass(frozen=True)
class Recorded:
    """Answer lengths of a recorded run: Parquet, CSV or JSON lines, with columns ``prompt`` and ``generated_tokens``.

    Each prompt is given one of the recorded prompts, all as likely, and its answers the lengths of that one's, in an
    order that depends on the attempt, so groups stay together; more answers than were recorded begin again. Of a
    ``rollouts.parquet`` the answers that were not finished (``end_s`` is null) are left out, which makes the lengths of
    a run that stopped early too short. Raises ValueError for a file that cannot be read so.

    ``in_order``: prompt i is the i-th recorded one, and again from the first at their end: the run's own course, drift
    included, instead of draws. Of a file with a column ``run`` (0, 1, …), seed s takes the prompts of run s, modulo how
    many there are.
    """

    file: str
    scale: float = 1.0
    in_order: bool = False
    kind: Literal["recorded"] = "recorded"

    def __post_init__(self) -> None:
        check_real("recorded: scale", self.scale, 0, above=True)
        read_recorded(self.file)  # an unreadable file is an error now, not in the middle of a run

    @property
    def mean(self) -> float:
        return float(np.mean(read_recorded(self.file)[1])) * self.scale


AnswerTokens = TwoLevel | Recorded | Law


def largest(law: AnswerTokens) -> float:
    """What no draw of a law exceeds; inf where it has no end."""
    if isinstance(law, TwoLevel):
        return inf if law.sigma else law.median
    if isinstance(law, Recorded):
        return float(np.max(read_recorded(law.file)[1])) * law.scale
    if isinstance(law, Lognormal):
        return inf if law.sigma else law.mean
    if isinstance(law, Pareto):
        return inf if law.cap is None else law.cap
    if isinstance(law, Constant | Uniform):
        return law.value if isinstance(law, Constant) else law.high
    found = steps(law)
    return inf if found is None else max(found[0])


def lengths(law: AnswerTokens, answers: int, seed: int) -> Lengths:
    """The draws of a law for groups of ``answers``."""
    if isinstance(law, TwoLevel):
        return _two_level(law, answers, seed)
    if isinstance(law, Recorded):
        return _recorded(law, answers, seed)
    if isinstance(law, Values):
        values = np.array(law.values, np.float64)
        return lambda prompts, epoch, attempt: values[(prompts[:, None] * answers + np.arange(answers)) % len(values)]
    draws, numbers, of = Draws(seed, "answer tokens"), np.arange(answers), quantiles(law)
    return lambda prompts, epoch, attempt: of(draws.uniform(prompts[:, None], epoch, attempt, numbers))


def _two_level(law: TwoLevel, answers: int, seed: int) -> Lengths:
    hard, lucky, numbers = Draws(seed, "prompt difficulty"), Draws(seed, "answer tokens"), np.arange(answers)

    def found(prompts: Integers, epoch: int, attempt: int) -> Floats:
        z = law.answer_sigma * lucky.normal(prompts[:, None], epoch, attempt, numbers)
        return law.median * np.exp(z + law.prompt_sigma * hard.normal(prompts)[:, None])

    return found


def _recorded(law: Recorded, answers: int, seed: int) -> Lengths:
    starts, tokens = read_recorded(law.file)
    firsts, sizes = starts[:-1], np.diff(starts)
    if law.in_order:
        return _in_order(law, answers, seed)
    # A fixed order of each prompt's answers, from a drawn one of them on.
    mixed = np.lexsort((Draws(0, "recorded order").bits(np.arange(len(tokens))), np.repeat(firsts, sizes)))
    scaled = tokens[mixed] * law.scale
    which, turned, numbers = Draws(seed, "recorded prompt"), Draws(seed, "recorded answers"), np.arange(answers)

    def found(prompts: Integers, epoch: int, attempt: int) -> Floats:
        group = (which.uniform(prompts) * len(sizes)).astype(np.int64)
        offset = (turned.uniform(prompts, epoch, attempt) * sizes[group]).astype(np.int64)
        place = (offset[:, None] + numbers) % sizes[group][:, None]
        drawn: Floats = scaled[firsts[group][:, None] + place]
        return drawn

    return found


def _in_order(law: Recorded, answers: int, seed: int) -> Lengths:
    starts, tokens = read_recorded(law.file)
    runs = read_runs(law.file)
    chosen = np.flatnonzero(runs == np.unique(runs)[seed % len(np.unique(runs))])
    firsts, sizes, numbers = starts[:-1][chosen], np.diff(starts)[chosen], np.arange(answers)

    def found(prompts: Integers, epoch: int, attempt: int) -> Floats:
        group = prompts % len(chosen)
        place = firsts[group][:, None] + numbers % sizes[group][:, None]
        drawn: Floats = tokens[place] * law.scale
        return drawn

    return found


# -- files -----------------------------------------------------------------------------------------------------


def read_recorded(file: str) -> tuple[Integers, Floats]:
    """Where each recorded prompt begins (and the end), and the tokens of the answers, prompt by prompt.

    Raises ValueError.
    """
    return _read(file, _changed_ns(file))[:2]


def read_runs(file: str) -> Integers:
    """Of which run each recorded prompt is: 0 where the file does not say. Raises ValueError."""
    return _read(file, _changed_ns(file))[2]


def _changed_ns(file: str) -> int:
    try:
        return Path(file).stat().st_mtime_ns
    except OSError as error:
        raise ValueError(f"recorded: {file} cannot be read: {error.strerror}") from None


@lru_cache(maxsize=4)
def _read(file: str, _changed_ns: int) -> tuple[Integers, Floats, Integers]:
    import polars as pl

    table = _table(file)
    has = ", ".join(table.columns)
    for name in ("prompt", "generated_tokens"):
        if name not in table.columns:
            raise ValueError(f"recorded: {file} has no column {name!r}; it has {has}")
    if "end_s" in table.columns:
        table = table.filter(pl.col("end_s").is_not_null())
    if table.height == 0:
        raise ValueError(f"recorded: {file} has no finished answers")
    tokens = table["generated_tokens"]
    if not tokens.dtype.is_numeric() or tokens.null_count() or not tokens.is_finite().all() or not (tokens >= 1).all():
        raise ValueError(f"recorded: {file}, column 'generated_tokens' does not hold numbers ≥ 1 alone")
    if table["prompt"].null_count():
        raise ValueError(f"recorded: {file}, column 'prompt': a value is missing")
    run = pl.col("run") if "run" in table.columns else pl.lit(0)
    table = table.select("prompt", pl.col("generated_tokens").cast(pl.Float64), run.cast(pl.Int64).alias("run"))
    table = table.sort("prompt", maintain_order=True)
    groups = table.group_by("prompt", maintain_order=True).agg(pl.len(), pl.col("run").first())
    sizes = groups["len"].to_numpy().astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return starts, table["generated_tokens"].to_numpy(), groups["run"].to_numpy()


def _table(file: str) -> pl.DataFrame:
    import polars as pl

    path = Path(file)
    try:
        with path.open("rb") as content:
            start = content.read(4)
        if start == b"PAR1":
            return pl.read_parquet(path)
        return pl.read_ndjson(path) if start[:1] == b"{" else pl.read_csv(path)
    except OSError as error:
        raise ValueError(f"recorded: {file} cannot be read: {error.strerror or error}") from None
    except pl.exceptions.PolarsError as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"recorded: {file} is neither Parquet, CSV nor JSON lines: {why}") from None
