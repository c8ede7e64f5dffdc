"""When the generator and the trainer were busy, strategy under strategy on one clock."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from midstream.local.events import RunEvents
from midstream.local.report import words
from midstream.local.report.palette import INK, MUTED, Mark
from midstream.local.report.plots.figure import Plot, drawn, stacked_axes
from midstream.local.summary import (
    Interval,
    covered_s,
    intervals,
    number,
    trainer_wait_fraction,
    wall_s,
)

ZOOM_S = 30.0
ZOOM_FROM_S = 45.0
"""A zoom is drawn where the longest run is longer than this."""
BINS, NARROW_BINS = 400, 200
"""A curve is averaged over this many bins: more would be narrower than a pixel."""


def timeline(runs: Sequence[RunEvents], marks: dict[str, Mark]) -> Plot | None:
    shown = [run for run in runs if run.steps]
    if not shown:
        return None
    return _timeline_plot(
        "timeline",
        "Who worked when",
        shown,
        marks,
        window=(0.0, max(map(wall_s, shown))),
        reading=(
            "Filled: requests in flight at the generator. Bar below: trainer busy (dark), weights being "
            "pushed (grey), nothing to train on (gap). A long tail is the wait for the slowest rollouts."
        ),
        finding=_finding(shown),
    )


def timeline_zoom(runs: Sequence[RunEvents], marks: dict[str, Mark]) -> Plot | None:
    shown = [run for run in runs if run.steps]
    if not shown or max(map(wall_s, shown)) < ZOOM_FROM_S:
        return None
    starts = [start for run in shown for start, _ in intervals(run.steps[:1], "rollout_start", "rollout_end")]
    begin = min(starts, default=0.0)
    steps = words.listed(
        [f"{_steps_within(run, begin + ZOOM_S)} in {run.strategy}" for run in shown],
    )
    return _timeline_plot(
        "timeline-zoom",
        f"The same, first {ZOOM_S:.0f} seconds",
        shown,
        marks,
        window=(begin, begin + ZOOM_S),
        reading="The start of the timeline above, wide enough to see single steps.",
        finding=f"Steps finished in this window: {steps}.",
    )


def requests_in_flight(run: RunEvents) -> list[tuple[float, float]]:
    """(time, requests) samples in order of time; none are from a rollout's end to the next sample."""
    samples: list[tuple[float, float]] = []
    for step in run.steps:
        for sample in step.get("occupancy") or ():
            time, requests = map(number, sample)
            if time is not None and requests is not None:
                samples.append((time, requests))
        if (end := number(step.get("rollout_end"))) is not None:
            samples.append((end, 0.0))
    return sorted(samples, key=lambda sample: sample[0])


def binned(samples: Sequence[tuple[float, float]], window: Interval, bins: int) -> list[float]:
    """Time-weighted mean of the samples, each valid until the next, in `bins` equal parts of the window.

    Nothing is in flight before the first sample; the last one holds until the window's end.
    """
    edges = np.linspace(*window, bins + 1)
    if not samples:
        return [0.0] * bins
    times, values = np.array(samples, dtype=float).T
    until_end = np.append(times, max(window[1], times[-1]))
    areas = np.concatenate([[0.0], np.cumsum(values * np.diff(until_end))])
    return list(np.diff(np.interp(edges, until_end, areas)) / np.diff(edges))


def _timeline_plot(
    name: str,
    title: str,
    runs: Sequence[RunEvents],
    marks: dict[str, Mark],
    *,
    window: Interval,
    reading: str,
    finding: str,
) -> Plot:
    curves = {run.strategy: requests_in_flight(run) for run in runs}
    peak = max((value for samples in curves.values() for _, value in samples), default=0.0) or 1.0

    def paint(figure: Figure, narrow: bool) -> None:
        rows = stacked_axes(figure, len(runs))
        for axes, run in zip(rows, runs, strict=True):
            colour = marks[run.strategy].colour
            bins = NARROW_BINS if narrow else BINS
            edges = [window[0] + (window[1] - window[0]) * index / bins for index in range(bins + 1)]
            axes.stairs(
                binned(curves[run.strategy], window, bins), edges, fill=True, color=colour, linewidth=0
            )
            _trainer_bars(axes, run, peak)
            _end_of_run(axes, run, window)
            axes.set_title(run.strategy, color=colour, pad=3)
            axes.set_ylim(-0.34 * peak, 1.05 * peak)
            axes.set_yticks([0, peak], ["0", f"{peak:.0f}"])
            axes.grid(axis="y", visible=False)
            axes.spines["left"].set_visible(False)
            axes.tick_params(length=0)
        rows[-1].set_xlim(*window)
        rows[-1].set_xlabel("seconds since the run's start")
        rows[-1].xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")

    return drawn(
        name,
        title,
        paint,
        reading=reading,
        finding=finding,
        height_px=45 + 82 * len(runs),
        full_width=True,
    )


def _trainer_bars(axes: Axes, run: RunEvents, peak: float) -> None:
    strip = (-0.30 * peak, 0.18 * peak)
    training = intervals(run.steps, "train_start", "train_end")
    pushing = intervals(run.steps, "train_end", "push_end")
    axes.broken_barh([(start, end - start) for start, end in training], strip, facecolor=INK, linewidth=0)
    axes.broken_barh([(start, end - start) for start, end in pushing], strip, facecolor=MUTED, linewidth=0)


def _end_of_run(axes: Axes, run: RunEvents, window: Interval) -> None:
    end = wall_s(run)
    if end >= window[1]:
        return
    axes.axvline(end, color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
    axes.annotate(
        f" {words.seconds(end)}" if run.status == "ok" else f" {run.status} at {words.seconds(end)}",
        (end, 0),
        xytext=(3, 4),
        textcoords="offset points",
        color=MUTED,
        fontsize=10,
    )


def _steps_within(run: RunEvents, until_s: float) -> int:
    return sum(1 for _, end in intervals(run.steps, "rollout_start", "push_end") if end <= until_s)


def _finding(runs: Sequence[RunEvents]) -> str:
    waits = sorted(
        (fraction, run.strategy) for run in runs if (fraction := trainer_wait_fraction(run)) is not None
    )
    parts = [f"{words.percent(fraction)} of the time with {strategy}" for fraction, strategy in waits]
    sentence = f"The trainer waited for rollouts {words.listed(parts)}." if parts else ""
    fills = [(fill, run.strategy) for run in runs if (fill := _mean_fill(run)) is not None]
    if fills:
        means = words.listed(
            [f"{words.percent(fill)} ({strategy})" for fill, strategy in sorted(fills, reverse=True)]
        )
        sentence += f" Mean load of the generator during rollouts, of its peak: {means}."
    return sentence.strip()


def _mean_fill(run: RunEvents) -> float | None:
    """Mean requests in flight during rollout steps, as a share of the run's peak."""
    samples = requests_in_flight(run)
    peak = max((value for _, value in samples), default=0.0)
    rollout_s = covered_s(intervals(run.steps, "rollout_start", "rollout_end"))
    if not peak or not rollout_s:
        return None
    area = sum(value * (until - time) for (time, value), (until, _) in pairwise(samples))
    return area / rollout_s / peak
