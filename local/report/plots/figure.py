"""What all plots share: size, style, and the way from a matplotlib figure to an inline SVG.

Every plot is drawn twice, for a wide and for a narrow page, because scaling one drawing down to a phone would
leave its letters too small to read.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from midstream.local.report import words
from midstream.local.report.palette import GRID, INK, MUTED, SURFACE, themed

PX_PER_INCH = 72
HALF_PX, FULL_PX, NARROW_PX = 500, 960, 350
ROW_GAP_PX = 10
LONGEST_LABEL = 24
"""Letters of a name that is shown in a plot."""
STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 11,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.linewidth": 1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlecolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "text.color": INK,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "hatch.linewidth": 1.2,
    "hatch.color": SURFACE,
    "lines.linewidth": 2.2,
}

Paint = Callable[[Figure, bool], None]
"""Draws on the figure; the flag is True on a narrow page."""


@dataclass(frozen=True)
class Plot:
    """A drawing with its words: `reading` says how to read it, `finding` what this run's data show in it."""

    name: str
    title: str
    reading: str
    finding: str
    wide: str
    narrow: str
    full_width: bool = False


def drawn(
    name: str,
    title: str,
    paint: Paint,
    *,
    reading: str,
    finding: str,
    height_px: float,
    narrow_height_px: float | None = None,
    full_width: bool = False,
) -> Plot:
    width_px = FULL_PX if full_width else HALF_PX
    return Plot(
        name=name,
        title=title,
        reading=reading,
        finding=finding,
        wide=_svg(f"{name}-wide", paint, False, width_px, height_px),
        narrow=_svg(f"{name}-narrow", paint, True, NARROW_PX, narrow_height_px or height_px),
        full_width=full_width,
    )


def stacked_axes(
    figure: Figure, rows: int, *, sharey: bool = False, heights: Sequence[float] | None = None
) -> list[Axes]:
    """Axes one under the other on a common x axis, with room between them for their titles; `heights` in any unit."""
    axes = figure.subplots(rows, 1, sharex=True, sharey=sharey, squeeze=False, height_ratios=heights)[:, 0]
    engine = figure.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):
        engine.set(h_pad=ROW_GAP_PX / 2 / PX_PER_INCH)
    return list(axes)


def direct_labels(axes: Axes, ends: list[tuple[float, str, str]], gap: float) -> None:
    """Names at the right edge instead of a legend: (y, text, colour), pushed apart to at least `gap` in y."""
    low, high = axes.get_ylim()
    placed: list[float] = []
    for y, _, _ in sorted(ends):
        placed.append(max(y, placed[-1] + gap) if placed else y)
    surplus = max(0.0, placed[-1] - high) if placed else 0.0
    for index in range(len(placed) - 1, -1, -1):
        ceiling = placed[index + 1] - gap if index + 1 < len(placed) else placed[index] - surplus
        placed[index] = max(low, min(placed[index], ceiling))
    for y, (_, text, colour) in zip(placed, sorted(ends), strict=True):
        axes.annotate(
            text,
            (1, y),
            xycoords=("axes fraction", "data"),
            xytext=(5, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            fontsize=10.5,
            fontweight="bold",
            annotation_clip=False,
        )


def plain(text: str) -> str:
    """A name that somebody else chose, as a label: matplotlib reads formulas between dollar signs."""
    text = words.printable(text)
    if len(text) > LONGEST_LABEL:
        text = text[: LONGEST_LABEL - 1] + "…"
    return text.replace("$", r"\$")


def _svg(name: str, paint: Paint, narrow: bool, width_px: float, height_px: float) -> str:
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(width_px / PX_PER_INCH, height_px / PX_PER_INCH), layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure, narrow)
        text = io.StringIO()
        figure.savefig(text, format="svg", dpi=PX_PER_INCH, metadata={"Date": None, "Creator": None})
    return themed(_inline(text.getvalue(), name))


def _inline(document: str, name: str) -> str:
    """The `<svg>` element alone, without a fixed size, with ids that are unique on a page of many."""
    svg = document[document.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\b(?:d|x|y|transform)="[^"]*"', _short_numbers, svg)
    svg = re.sub(r'^(<svg[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r'^(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    return svg.replace("<svg", '<svg aria-hidden="true" focusable="false"', 1)


def _short_numbers(attribute: re.Match[str]) -> str:
    """Coordinates to a hundredth of a pixel: matplotlib's six decimals double the size of the page."""
    return re.sub(r"(\d\.\d\d)\d+", r"\1", attribute[0])
