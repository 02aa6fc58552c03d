"""Comparisons in words: the same in table, figure and terminal."""

from __future__ import annotations

import math

from fedasync.report.comparisons import Judged
from fedasync.report.paired import Difference, Speedup, Verdict

LEGEND = (
    "[ ]: 95 % interval of the comparison paired by seed, the wider of Student's t and the bootstrap. Within noise: it "
    "contains “no difference”; weak: it does not, but Holm's test, which counts all comparisons of the panel, does not "
    "rule it out."
)
"""What must be known to read a comparison."""

RANKING_LEGEND = (
    "Ranked by the mean at one virtual time, the latest that all runs of the facet saw but for diverged ones, and by "
    "the time to the target: first by the seeds that missed it, then by the geometric mean, in which a missed target "
    "counts as its run's end. A run that diverged never reaches a target, and is in no mean of times; at one virtual "
    "time it stands with its last finite value, and its series ranks behind those that did not diverge. =: tied with "
    f"the best, within noise or weak. The best is the one observed, and partly lucky. {LEGEND}"
)


def times(ratio: float) -> str:
    """A ratio at three significant digits: ``2.00×``, ``0.855×``, ``12.3×``, ``345×``."""
    return f"{ratio:#.3g}".removesuffix(".") + "×"


def remark(verdict: Verdict) -> str:
    """The verdict where it is a reservation; empty for what is clear, and where there is no interval to judge by."""
    return verdict if verdict in ("weak", "within noise") else ""


def diverged_text(diverged: int, seeds: int) -> str:
    """`` (1 of 3 diverged)``; empty for none."""
    return f" ({diverged} of {seeds} diverged)" if diverged else ""


def ratio_text(found: Speedup) -> str:
    """``2.14× [1.80, 2.55]``, ``≥ 3.1× [2.6, ∞)``, ``1.31×`` for one pair, a dash for none."""
    if found.ratio is None:
        return "–"
    sign = "" if found.bound == "=" else f"{found.bound} "
    return f"{sign}{times(found.ratio)}{ratio_range(found)}"


def ratio_range(found: Speedup) -> str:
    """`` [1.80, 2.55]``, open towards where a bound leaves the ratio open; empty without an interval."""
    if found.low is None or found.high is None:
        return ""
    if found.bound == "≥":
        return f" [{times(found.low)}, ∞)".replace("×", "")
    if found.bound == "≤":
        return f" (0, {times(found.high)}]".replace("×", "")
    return f" [{times(found.low)}, {times(found.high)}]".replace("×", "")


def speedup_text(judged: Judged[Speedup]) -> str:
    """Ratio, interval, verdict, and what it leaves out: a table's cell."""
    found = judged.found
    if found.ratio is None:
        return found.note() or "–"
    said = ", ".join(filter(None, [ratio_text(found), remark(judged.verdict)]))
    return f"{said} ({found.note()})" if found.note() else said


def difference_text(judged: Judged[Difference]) -> str:
    """``+0.021 [0.013, 0.029]``, with the verdict and what it leaves out: a table's cell."""
    found = judged.found
    if found.mean is None:
        return found.note() or "–"
    digits = decimals(found)
    spread = "" if found.low is None or found.high is None else f" [{found.low:.{digits}f}, {found.high:.{digits}f}]"
    text = f"{found.mean:+.{digits}f}{spread}".replace("-", "−")
    said = ", ".join(filter(None, [text, remark(judged.verdict)]))
    return f"{said} ({found.note()})" if found.note() else said


def decimals(found: Difference) -> int:
    """Digits after the point that show the interval's width to two places, and on which side of 0 its ends lie."""
    if found.mean is None:
        return 0
    ends = [end for end in (found.low, found.high) if end]
    wide = (found.high - found.low) / 2 if found.low is not None and found.high is not None else abs(found.mean)
    if not (wide > 0 and math.isfinite(wide)):
        return 3
    digits = max(0, 1 - math.floor(math.log10(wide)))
    return next((more for more in range(digits, digits + 3) if all(round(end, more) for end in ends)), digits + 3)
