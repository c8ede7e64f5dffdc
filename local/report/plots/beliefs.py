"""Where prompts moved over a run, from never solved to always solved, source under source."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from midstream.local.report import words
from midstream.local.report.history import History, SourceStep, of_source
from midstream.local.report.palette import RATES, SOURCES
from midstream.local.report.plots.figure import Plot, drawn, plain, stacked_axes

BANDS = {
    "below 0.1": range(1),
    "0.1 to 0.3": range(1, 3),
    "0.3 to 0.7": range(3, 7),
    "0.7 to 0.9": range(7, 9),
    "0.9 and more": range(9, 10),
}
"""The bins of pass rates that share a colour: groups of the first and of the last teach nothing, or nearly."""
STEPS_SHOWN = 200
"""A longer run is drawn with so many of its steps: more would be narrower than a pixel."""

Shares = tuple[float, ...]


def beliefs_plot(name: str, history: History) -> Plot | None:
    by_source = {source: found for source in history.sources if (found := shares(of_source(history, source)))}
    if not by_source:
        return None
    end = max(history.steps) + 1

    def paint(figure: Figure, narrow: bool) -> None:
        rows = stacked_axes(figure, len(by_source))
        for axes, (source, found), named in zip(rows, by_source.items(), SOURCES, strict=False):
            steps = thinned(sorted(found))
            edges = [*steps, end]
            floor = [0.0] * len(edges)
            for band, colour in enumerate(RATES):
                heights = [100 * found[step][band] for step in (*steps, steps[-1])]
                top = [low + height for low, height in zip(floor, heights, strict=True)]
                axes.fill_between(edges, floor, top, step="post", color=colour.light, linewidth=0)
                floor = top
            axes.set_title(plain(source), color=named.light, pad=3)
            axes.set_ylim(0, 100)
            axes.set_yticks([0, 50, 100], ["0", "50", "100 %"])
            axes.grid(visible=False)
            axes.spines["left"].set_visible(False)
            axes.tick_params(length=0)
        rows[-1].set_xlim(min(history.steps), end)
        rows[-1].set_xlabel("step")
        patches = [Patch(color=colour.light, label=band) for band, colour in zip(BANDS, RATES, strict=True)]
        figure.legend(
            handles=patches,
            loc="outside upper left",
            ncols=2 if narrow else 5,
            handlelength=1,
            columnspacing=1.2,
        )

    return drawn(
        name,
        f"{history.strategy}: where prompts moved",
        paint,
        reading=(
            "Share of a source's prompts by the pass rate that is believed of them, after each step; empty: those that "
            "have not been played yet."
        ),
        finding=_finding(by_source),
        height_px=90 + 92 * len(by_source),
        narrow_height_px=140 + 92 * len(by_source),
        full_width=True,
    )


def shares(steps: Mapping[int, SourceStep]) -> dict[int, Shares]:
    """Share of the prompts in each of BANDS by step; what is missing to 1 is not known yet.

    Steps in which nothing is known are left out.
    """
    found = {}
    for step, part in steps.items():
        prompts = max(part.prompts, sum(part.pass_rates))
        if any(part.pass_rates):
            found[step] = tuple(sum(part.pass_rates[b] for b in bins) / prompts for bins in BANDS.values())
    return found


def thinned(steps: Sequence[int]) -> list[int]:
    """At most STEPS_SHOWN of them, the first and the last among them."""
    surplus = len(steps) / STEPS_SHOWN
    if surplus <= 1:
        return list(steps)
    return [*(steps[int(index * surplus)] for index in range(STEPS_SHOWN - 1)), steps[-1]]


def _finding(by_source: Mapping[str, Mapping[int, Shares]]) -> str:
    parts = []
    for source, found in by_source.items():
        last = found[max(found)]
        parts.append(
            f"{words.printable(source)} {words.percent(last[0])} below 0.1, {words.percent(sum(last[1:-1]))} between, "
            f"{words.percent(last[-1])} from 0.9 on"
        )
    return f"Prompts by what is believed after the last step: {'; '.join(parts)}."
