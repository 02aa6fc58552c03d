"""How every figure looks: colours, panels, legend and small print."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

P = ParamSpec("P")
R = TypeVar("R")

# Okabe & Ito (2008), "Color Universal Design"; without yellow, which is too light for a line.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))

GOOD, IDLE, INK, FAINT = "#3A7CA5", "#E8E8E8", "#222222", "#777777"
OUTCOMES = {
    "consumed": GOOD,
    "buffered": "#9CC4DA",
    "in flight": "#D0D0D0",
    "rejected": "#D55E00",
    "cancelled": "#E69F00",
    "failed": "#7A1F5C",
}

_RC = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.axisbelow": True,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "hatch.linewidth": 0.5,
    "text.parse_math": False,  # a label with two dollar signs is still a label
    "figure.dpi": 150.0,
    "savefig.dpi": 150.0,
    "svg.hashsalt": "fedasync",
}


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Run ``draw`` under matplotlib's defaults and this style, whatever the reader's own settings are."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> R:
        from matplotlib import rc_context, rcParamsDefault

        settings: dict[Any, Any] = {k: v for k, v in rcParamsDefault.items() if not k.startswith("backend")}
        settings.update(_RC)
        with rc_context(settings):
            return draw(*args, **kwargs)

    return drawn


def colour(series: Sequence[str], label: str) -> str:
    """The colour of a series: by its place in the study, so that it is the same in every figure."""
    return _COLOURS[series.index(label) % len(_COLOURS)]


def line(series: Sequence[str], label: str) -> dict[str, Any]:
    """Colour and dashes of a series, as arguments of ``plot``; either alone tells six series apart."""
    return {"color": colour(series, label), "linestyle": _LINES[series.index(label) % len(_LINES)]}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure (inches) that lays itself out and is drawn by Agg, apart from pyplot's state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def wrap(text: str, width: int) -> str:
    """Break a text at spaces only: ``lognormal(0.5)`` stays whole, and a command can be copied."""
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def columns_for(panels: int, most: int = 3) -> int:
    """Columns of a grid of panels: as square as reads well, ``most`` at most."""
    return 2 if panels == 4 else min(panels, most)


def panels(
    count: int, size: tuple[float, float], *, extra: tuple[float, float] = (0.0, 1.0), sharey: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure of ``count`` panels (``size``: inches of one) with shared axes; ``extra`` is room around them."""
    columns = columns_for(count)
    rows = -(-count // columns)
    figure = new_figure(columns * size[0] + extra[0], rows * size[1] + extra[1])
    grid = figure.subplots(rows, columns, sharex=True, sharey=sharey, squeeze=False)
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.remove()
    for above in axes[max(count - columns, 0) : count]:
        above.tick_params(labelbottom=True)
    return figure, axes[:count]


def bottom(axes: Sequence[Axes]) -> list[Axes]:
    """The panels of a grid that have none below them."""
    return list(axes[max(len(axes) - columns_for(len(axes)), 0) :])


def left(axes: Sequence[Axes]) -> list[Axes]:
    """The panels of a grid that begin a row."""
    return list(axes[:: columns_for(len(axes))])


def title(figure: Figure, text: str) -> None:
    """The figure's title, at its left."""
    wrapped = wrap(text, int(figure.get_figwidth() * 10.5))
    figure.suptitle(wrapped, x=0.01, ha="left", fontsize=11, fontweight="bold")


LEGEND_ROW_INCHES = 0.19


def legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str], heading: str = "") -> None:
    """One legend for all panels, to the right of them; set it after the title, which it stands below."""
    # Matplotlib sets an outside legend at the figure's edge, level with its title; empty lines move it down.
    room = "\n" * (len(figure.get_suptitle().splitlines()) + 1)
    wrapped = [wrap(label, 22) for label in labels]
    rows = sum(label.count("\n") + 1 for label in wrapped)
    figure.set_figheight(max(figure.get_figheight(), LEGEND_ROW_INCHES * (rows + 6)))  # it runs into what is below
    figure.legend(
        handles,
        wrapped,
        title=room + heading,
        loc="outside right upper",
        handlelength=2.6,
        alignment="left",
    )


def reference(ax: Axes, value: float, text: str) -> None:
    """A dotted line to hold curves against, with its words at the left."""
    ax.axhline(value, ls=":", lw=0.9, color=FAINT)
    ax.annotate(
        text,
        (0, value),
        xycoords=("axes fraction", "data"),
        xytext=(3, 2),
        textcoords="offset points",
        ha="left",
        fontsize=7,
        color=FAINT,
    )


def small_print(figure: Figure, *sentences: str, command: str = "") -> Text:
    """What one must know to read and to repeat the figure, under it."""
    width = int(figure.get_figwidth() * 19.5)
    paragraphs = [" ".join(sentence for sentence in sentences if sentence), command]
    wrapped = "\n".join(wrap(text, width) for text in paragraphs if text)
    return figure.supxlabel(wrapped, x=0.01, ha="left", fontsize=6.5, color=FAINT)


def settle(figure: Figure) -> None:
    """Lay the figure out for good, with places of nine digits.

    The solver of the layout can differ in the last digit from call to call, and an SVG has names made of such digits.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for ax in figure.axes:
        left, bottom, width, height = (round(float(edge), 9) for edge in ax.get_position().bounds)
        ax.set_position((left, bottom, width, height))


def seeds_text(seeds: Sequence[int]) -> str:
    """``5 seeds (0–4)`` or ``3 seeds (0, 3, 7)``; one seed is said to give no interval."""
    if len(seeds) == 1:
        return f"One seed\N{NO-BREAK SPACE}({seeds[0]}): no interval."
    in_a_row = len(seeds) > 2 and all(after == before + 1 for before, after in pairwise(seeds))
    named = f"{seeds[0]}–{seeds[-1]}" if in_a_row else ", ".join(map(str, seeds))
    return f"{len(seeds)} seeds\N{NO-BREAK SPACE}({named})."
