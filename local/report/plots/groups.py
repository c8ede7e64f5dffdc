"""What became of the groups of each step, and what was not spent."""

from collections.abc import Sequence
from itertools import accumulate

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from midstream.local.report import words
from midstream.local.report.history import History, SourceStep, of_source
from midstream.local.report.palette import INK, MUTED, SURFACE
from midstream.local.report.plots.figure import Plot, drawn, stacked_axes


def groups_plot(name: str, history: History, colour: str) -> Plot | None:
    """`colour` is that of the strategy."""
    found = of_source(history, None)
    if not any(part.ended or part.skipped for part in found.values()):
        return None
    steps, parts = list(found), list(found.values())
    saved = list(accumulate(part.tokens_saved for part in parts))
    sums = {"passed over": [float(part.skipped) for part in parts], "tokens saved": saved}
    edges = [*steps, steps[-1] + 1]
    sums = {label: values for label, values in sums.items() if any(values)}

    def paint(figure: Figure, narrow: bool) -> None:
        rows = stacked_axes(figure, 1 + len(sums), heights=[2.0, *[1.0] * len(sums)])
        informative = [float(part.informative) for part in parts]
        ended = [float(part.ended) for part in parts]
        rows[0].stairs(informative, edges, fill=True, color=colour, linewidth=0, label="informed")
        rows[0].stairs(
            ended,
            edges,
            baseline=informative,
            fill=True,
            color=colour,
            alpha=0.35,
            linewidth=0,
            label="did not",
        )
        explored = [(step + 0.5, part.explored) for step, part in found.items() if part.explored]
        if explored:
            xs, ys = zip(*explored, strict=True)
            rows[0].plot(xs, ys, "D", color=INK, markersize=5, markeredgecolor=SURFACE, label="to explore")
        rows[0].set_ylabel("groups ended")
        for axes, (label, values) in zip(rows[1:], sums.items(), strict=True):
            axes.stairs(values, edges, fill=True, color=MUTED, alpha=0.5, linewidth=0)
            axes.stairs(values, edges, color=MUTED, linewidth=1.4)
            axes.set_ylabel(label)
        for axes in rows:
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
            axes.tick_params(length=0)
        rows[-1].set_xlim(edges[0], edges[-1])
        rows[-1].xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, integer=True))
        rows[-1].set_xlabel("step")
        handles, names = rows[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=3, handlelength=1.2, columnspacing=1.2)

    return drawn(
        name,
        f"{history.strategy}: groups played and passed over",
        paint,
        reading=(
            "Groups that ended in each step, solid those whose rewards differed; prompts that came up and were passed "
            "over before they cost anything; and what groups given up on the way would have taken on top, summed up."
        ),
        finding=_finding(parts, saved[-1]),
        height_px=400,
        narrow_height_px=430,
    )


def _finding(parts: Sequence[SourceStep], saved: float) -> str:
    fifth = max(1, len(parts) // 5)
    rates = [
        sum(part.informative for part in some) / ended
        for some in (parts[:fifth], parts[-fifth:])
        if (ended := sum(part.ended for part in some))
    ]
    informed = (
        f"Informed: {' → '.join(map(words.percent, rates))} of the groups, first to last fifth. "
        if rates
        else ""
    )
    given_up = f" Groups that were given up saved {words.count(saved)} tokens." if saved else ""
    skipped = words.count(sum(part.skipped for part in parts))
    return f"{informed}Prompts were passed over {skipped} times.{given_up}"
