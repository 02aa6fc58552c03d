"""Figures along an axis of a study: where its labels stand, and the panels that are left when it is taken out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedasync.report import style
from fedasync.report.arrangement import Arrangement, Facet, spoken

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def panels_along(shown: Arrangement, axis: str) -> tuple[int, list[str], list[Facet]]:
    """The axis' place among the facet axes, its labels, and the facets without it: a panel each."""
    at = shown.facet_axes.index(axis)
    labels = list(dict.fromkeys(facet[at] for facet in shown.facets))
    return at, labels, list(dict.fromkeys((*facet[:at], *facet[at + 1 :]) for facet in shown.facets))


def places(labels: Sequence[str]) -> dict[str, float]:
    """Where labels stand along x: as numbers if all are, else one after the other."""
    try:
        numbers = {label: float(label) for label in labels}
    except ValueError:
        return {label: float(i) for i, label in enumerate(labels)}
    if not all(np.isfinite(x) for x in numbers.values()):
        return {label: float(i) for i, label in enumerate(labels)}
    return numbers


def x_ticks(ax: Axes, labels: Sequence[str], place: Mapping[str, float]) -> None:
    """A tick a label; logarithmic where the largest is more than twelve times the smallest."""
    xs = [place[label] for label in labels]
    if min(xs) > 0 and max(xs) / min(xs) > 12:
        ax.set_xscale("log")
    ax.set_xticks(xs, [style.wrap(label, max(10, 44 // len(labels))) for label in labels])
    ax.set_xticks([], minor=True)
    ax.margins(x=0.1)


def title_without(shown: Arrangement, panel: Facet, at: int) -> str:
    """A panel's facet in words, without the axis at place ``at``."""
    facet = next(facet for facet in shown.facets if (*facet[:at], *facet[at + 1 :]) == panel)
    varying = [
        f"{spoken(axis)} = {label}"
        for i, (axis, label) in enumerate(zip(shown.facet_axes, facet, strict=True))
        if i != at and len({other[i] for other in shown.facets}) > 1
    ]
    return ", ".join(varying)
