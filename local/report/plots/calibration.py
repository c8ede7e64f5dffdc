"""Whether what the curriculum predicted of prompts came true."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from midstream.buffers.curriculum.tally import BINS
from midstream.local.report import words
from midstream.local.report.history import History, calibration_error, merged, of_source
from midstream.local.report.palette import INK, MUTED, SOURCES, SURFACE
from midstream.local.report.plots.figure import Plot, drawn, plain, stacked_axes

LARGEST_PX2, SMALLEST_PX2 = 170.0, 14.0
"""Areas of the markers: their size grows with the groups behind them."""

Bins = tuple[tuple[float, float, float], ...]


def calibration_plot(name: str, history: History) -> Plot | None:
    bins = total_bins(history, None)
    if not points(bins):
        return None
    by_source = {source: total_bins(history, source) for source in history.sources}

    def paint(figure: Figure, narrow: bool) -> None:
        above, below = stacked_axes(figure, 2, heights=(3.0, 1.0))
        above.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        for colour, found in zip(SOURCES, by_source.values(), strict=False):
            shown = points(found)
            above.plot([x for x, _, _ in shown], [y for _, y, _ in shown], color=colour.light, linewidth=1.2)
        most = max(groups for _, _, groups in points(bins))
        for x, y, groups in points(bins):
            area_px2 = SMALLEST_PX2 + (LARGEST_PX2 - SMALLEST_PX2) * groups / most
            above.scatter([x], [y], s=area_px2, color=INK, edgecolors=SURFACE, alpha=0.85, zorder=3)
        above.set_ylim(-0.04, 1.04)
        above.set_ylabel("observed pass rate")
        floor = [0.0] * BINS
        for colour, (source, found) in zip(SOURCES, by_source.items(), strict=False):
            heights = [groups for _, _, groups in found]
            centres = [(bin_ + 0.5) / BINS for bin_ in range(BINS)]
            below.bar(centres, heights, 0.9 / BINS, bottom=floor, color=colour.light, label=plain(source))
            floor = [low + height for low, height in zip(floor, heights, strict=True)]
        below.set_ylabel("groups")
        below.yaxis.set_major_locator(MaxNLocator(2, integer=True))
        below.set_xlim(-0.02, 1.02)
        below.set_xlabel("predicted pass rate")
        handles, names = below.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=2 if narrow else 4, handlelength=1)

    return drawn(
        name,
        f"{history.strategy}: predicted against observed pass rates",
        paint,
        reading=(
            "Dots: groups by the pass rate that was predicted of their prompts, the larger the more; lines: the same "
            "by source. On the dashed line it came true. Below, how many groups each dot stands for."
        ),
        finding=_finding(bins),
        height_px=400,
        narrow_height_px=430,
    )


def total_bins(history: History, source: str | None) -> Bins:
    """Sums over all steps of one source, None: of all."""
    return merged(of_source(history, source).values()).calibration


def points(bins: Bins) -> list[tuple[float, float, float]]:
    """(mean predicted, mean observed, groups) of the bins that have groups."""
    return [(predicted / n, observed / n, n) for predicted, observed, n in bins if n]


def _finding(bins: Bins) -> str:
    groups = sum(n for _, _, n in bins)
    difference = sum(observed - predicted for predicted, observed, _ in bins) / groups
    way = "above" if difference > 0 else "below"
    return (
        f"Predicted and observed pass rates are {words.decimal(calibration_error(bins))} apart in the mean over "
        f"{words.count(groups)} groups, by bins; all together, the observed are {words.decimal(abs(difference))} {way}."
    )
