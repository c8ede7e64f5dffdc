"""What became of the groups of each step, and what was not spent."""

from itertools import accumulate

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from midstream.local.report import words
from midstream.local.report.history import History, SourceStep, of_source
from midstream.local.report.palette import INK, MUTED, SOURCES
from midstream.local.report.plots.figure import Plot, drawn, stacked_axes


def groups_plot(name: str, history: History) -> Plot | None:
    found = of_source(history, None)
    if not any(part.played or part.skipped for part in found.values()):
        return None
    steps = list(found)
    saved = list(accumulate(part.tokens_saved for part in found.values()))

    def paint(figure: Figure, narrow: bool) -> None:
        rows = stacked_axes(figure, 2 if saved[-1] else 1, heights=(2.2, 1.0) if saved[-1] else (1.0,))
        axes = rows[0]
        informative = [part.informative for part in found.values()]
        others = [part.played - part.informative for part in found.values()]
        axes.bar(steps, informative, 0.9, color=SOURCES[0].light, label="played, informed")
        axes.bar(
            steps,
            others,
            0.9,
            bottom=informative,
            color=SOURCES[0].light,
            alpha=0.35,
            label="played, did not",
        )
        axes.plot(
            steps,
            [part.skipped for part in found.values()],
            color=SOURCES[1].light,
            linewidth=1.6,
            label="passed over",
        )
        explored = [(step, part.explored) for step, part in found.items() if part.explored]
        if explored:
            axes.plot(*zip(*explored, strict=True), "D", color=INK, markersize=4, label="played to explore")
        axes.set_ylabel("groups of a step")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        if saved[-1]:
            rows[1].fill_between(steps, saved, step="mid", color=SOURCES[2].light, alpha=0.5, linewidth=0)
            rows[1].set_ylabel("tokens saved")
            rows[1].set_ylim(bottom=0)
            rows[1].yaxis.set_major_locator(MaxNLocator(2))
            rows[1].yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
        rows[-1].set_xlim(min(steps) - 0.5, max(steps) + 0.5)
        rows[-1].xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, integer=True))
        rows[-1].set_xlabel("step")
        rows[-1].tick_params(axis="x", color=MUTED)
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=2, handlelength=1.2, columnspacing=1.2)

    return drawn(
        name,
        f"{history.strategy}: groups played and passed over",
        paint,
        reading=(
            "Bars: groups that were played, solid those with rewards that differ; line: prompts that were passed over "
            "before they cost anything. Saved are the tokens that groups passed over or given up would have taken."
        ),
        finding=_finding(found, saved[-1]),
        height_px=400,
        narrow_height_px=430,
    )


def _finding(found: dict[int, SourceStep], saved: float) -> str:
    parts = list(found.values())
    fifth = max(1, len(parts) // 5)
    rates = [
        sum(part.informative for part in some) / played
        for some in (parts[:fifth], parts[-fifth:])
        if (played := sum(part.played for part in some))
    ]
    passed_over = words.count(sum(part.skipped for part in parts))
    end = f"{passed_over} prompts were passed over, and about {words.count(saved)} tokens saved."
    if not rates:
        return end[0].upper() + end[1:]
    return (
        f"Of the groups played {' → '.join(map(words.percent, rates))} informed, first to last fifth; {end}"
    )
