"""Laws that are columns of the trace extracts shipped in ``trace_data``; sources and licences stand there."""

from __future__ import annotations

import csv
import difflib
import hashlib
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

FOLDER = Path(__file__).parent / "trace_data"


class Series(NamedTuple):
    """A column of an extract; ``where`` picks the rows whose first columns read so."""

    file: str
    column: str
    unit: str
    where: tuple[str, ...] = ()
    factor: float = 1.0
    by_median: bool = False
    """Ratios to the median: the source has no unit."""


_DIGESTS = {
    "azure/llm_2023_code_quantiles.csv": "ad7a407e1717963c5d0a16fdec8bde1fbb4e50b65ca3b3b6e30eba43fba90c0b",
    "azure/llm_2023_conv_quantiles.csv": "df15d88bfd8dfdabcd0cb62ba050a4346be76d50c71c83c580e9a4eb0dad5595",
    "flash/layer_train_time.csv": "8c07e2c0b3f2b48c5e4e53dd354acfd57b42dbb6768065a671b48165f30cc8be",
    "flash/network_speed.csv": "26268faf59205ccd4cd2ecabd047de120015844fa35db855b87bbe8344f0ef30",
    "mooncake/conversation_quantiles.csv": "736d9f34aab4d71cca29df0cfc7616da3ced6785336604f54876668d18afe062",
    "pai/minibatch_cov.csv": "42389a24272d7fd13d3f12d57e3a63af0e133c7b6554a033a10396618d5a43e3",
    "pai/minibatch_times.csv": "4b40271ad7cac88eb7d3e7c89981dcaff62bb4d7fc0b37963932c68ac9a1f25a",
    "servegen/deepseek_r1_quantiles.csv": "c7dcd40cd580a0831c3944a28c97060640342e7cd1a75ed22821e441de41a305",
}
"""SHA-256 of each file. They stand in the source because a run's identity holds a digest of that."""

_AZURE = "azure/llm_2023_{}_quantiles.csv"
_MOONCAKE = "mooncake/conversation_quantiles.csv"
_SERVEGEN = "servegen/deepseek_r1_quantiles.csv"

SERIES: dict[str, Series] = {
    "flash_downlink": Series("flash/network_speed.csv", "down_mean_kb_s", "bytes/s", factor=1024.0),
    "flash_uplink": Series("flash/network_speed.csv", "up_mean_kb_s", "bytes/s", factor=1024.0),
    **{
        f"flash_{device}_{layer}": Series("flash/layer_train_time.csv", "seconds", "s", (device, layer))
        for device in ("nexus6", "redmi_note8", "samsung_note10")
        for layer in ("embedding", "lstm", "output")
    },
    **{
        f"pai_job{job}": Series("pai/minibatch_times.csv", "batch_time_norm", "ratio", (str(job),), by_median=True)
        for job in (1, 2, 3, 4)
    },
    "pai_cov": Series("pai/minibatch_cov.csv", "cov_mean", "ratio"),
    "servegen_r1_input": Series(_SERVEGEN, "input_tokens", "tokens"),
    "servegen_r1_output": Series(_SERVEGEN, "output_tokens", "tokens"),
    "servegen_r1_reason_ratio": Series(_SERVEGEN, "reason_ratio", "ratio"),
    "azure2023_code_context": Series(_AZURE.format("code"), "context_tokens", "tokens"),
    "azure2023_code_generated": Series(_AZURE.format("code"), "generated_tokens", "tokens"),
    "azure2023_conv_context": Series(_AZURE.format("conv"), "context_tokens", "tokens"),
    "azure2023_conv_generated": Series(_AZURE.format("conv"), "generated_tokens", "tokens"),
    "mooncake_input": Series(_MOONCAKE, "input_tokens", "tokens"),
    "mooncake_output": Series(_MOONCAKE, "output_tokens", "tokens"),
}
"""Name of a trace law → its column."""


@dataclass(frozen=True)
class Trace:
    """A series of a shipped trace by its name (``SERIES``), times ``scale``; every value is as likely as the others.

    Series of PAI are ratios to the job's median, so ``scale`` is the median in the field's unit. All others come in
    their own unit.
    """

    name: str
    scale: float = 1.0
    kind: Literal["trace"] = "trace"

    def __post_init__(self) -> None:
        if self.name not in SERIES:
            close = difflib.get_close_matches(self.name, SERIES, n=1)
            maybe = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"trace: unknown name {self.name!r}; {maybe}(known: {', '.join(SERIES)})")
        if not (isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"trace: scale must be > 0 and finite, got {self.scale}")

    def quantile(self, u: float) -> float:
        values = series(self.name)
        return values[int(u * len(values))] * self.scale

    @property
    def mean(self) -> float:
        """Of the extract."""
        values = series(self.name)
        return sum(values) / len(values) * self.scale


@lru_cache(maxsize=len(SERIES))
def series(name: str) -> tuple[float, ...]:
    """The values of a series in its own unit, in order. Raises ValueError for a file that was changed."""
    wanted = SERIES[name]
    content = (FOLDER / wanted.file).read_bytes()
    if hashlib.sha256(content).hexdigest() != _DIGESTS[wanted.file]:
        raise ValueError(
            f"trace {name!r}: {wanted.file} is not the file that fedasync ships; installing it again would do"
        )
    header, *rows = csv.reader(content.decode().splitlines())
    place, keys = header.index(wanted.column), wanted.where
    values = [float(row[place]) for row in rows if tuple(row[: len(keys)]) == keys]
    unit = median(values) if wanted.by_median else 1.0
    found = tuple(sorted(value / unit * wanted.factor for value in values))
    if not 0 <= found[0] <= found[-1] < inf:
        raise AssertionError(f"trace {name!r} holds values that are no numbers ≥ 0")
    return found
