"""How long the trained responses were, and whether a strategy preferred short ones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from midstream.local.events import RunEvents
from midstream.local.report import words
from midstream.local.report.palette import INK, Mark
from midstream.local.report.plots.figure import Plot, drawn, stacked_axes
from midstream.local.summary import response_tokens

UNBIASED = "wait"
"""It trains on every rollout that it starts, so its lengths are those of the workload."""
LONGEST_BINS = 28
TAIL = 0.9
"""The long responses are those beyond this quantile of the unbiased strategy's lengths."""


@dataclass(frozen=True)
class LengthRatio:
    """Ratio of mean lengths to the unbiased strategy's, with a 95 % interval, and what became of its tail."""

    ratio: float
    low: float
    high: float
    tail_share: float
    """Share of this strategy's responses that is longer than the TAIL quantile of the unbiased one."""
    unbiased_tail_share: float


def length_ratio(lengths: Sequence[float], unbiased: Sequence[float]) -> LengthRatio | None:
    """None where a mean or its error cannot be known (fewer than two responses, or empty ones).

    The interval treats rollouts as independent (delta method); rollouts of one prompt are less than that, so
    it is rather too narrow than too wide.
    """
    if min(len(lengths), len(unbiased)) < 2 or not np.mean(unbiased) or not np.mean(lengths):
        return None
    ratio = float(np.mean(lengths) / np.mean(unbiased))
    relative = [float(np.var(v, ddof=1)) / len(v) / float(np.mean(v)) ** 2 for v in (lengths, unbiased)]
    margin = 1.96 * ratio * math.sqrt(sum(relative))
    limit = np.quantile(unbiased, TAIL)
    return LengthRatio(
        ratio,
        ratio - margin,
        ratio + margin,
        float(np.mean(np.asarray(lengths) > limit)),
        float(np.mean(np.asarray(unbiased) > limit)),
    )


def length_plot(runs: Sequence[RunEvents], marks: dict[str, Mark]) -> Plot | None:
    lengths = {run.strategy: found for run in runs if (found := response_tokens(run))}
    if not lengths:
        return None
    edges = _bin_edges([value for found in lengths.values() for value in found])
    reference = float(np.mean(lengths[UNBIASED])) if UNBIASED in lengths else None

    def paint(figure: Figure, _: bool) -> None:
        rows = stacked_axes(figure, len(lengths), sharey=True)
        for axes, (strategy, found) in zip(rows, lengths.items(), strict=True):
            colour, own_mean = marks[strategy].colour, float(np.mean(found))
            share = np.histogram(found, edges)[0] / len(found)
            axes.stairs(100 * share, edges, fill=True, color=colour, alpha=0.35, linewidth=0)
            axes.stairs(100 * share, edges, color=colour, linewidth=1.4)
            if reference is not None:
                axes.axvline(reference, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
            axes.axvline(own_mean, color=colour, linewidth=2.2)
            text = f"mean {words.decimal(own_mean)}"
            if reference and strategy != UNBIASED:
                text += f" = {words.ratio(own_mean / reference)} {UNBIASED}"
            axes.annotate(
                text, (1, 0.9), xycoords="axes fraction", ha="right", va="top", fontsize=10.5, color=INK
            )
            axes.set_title(strategy, color=colour, pad=3)
            axes.set_yticks([])
            axes.spines["left"].set_visible(False)
            axes.tick_params(length=0)
        rows[-1].set_xlabel("model tokens per trained rollout")
        rows[-1].set_xlim(edges[0], edges[-1])

    dashed = f", dashed the mean of {UNBIASED}" if reference is not None else ""
    return drawn(
        "length",
        "Which lengths were trained on",
        paint,
        reading=f"Share of trained rollouts by length; solid line: mean{dashed}.",
        finding=_finding(lengths),
        height_px=45 + 84 * len(lengths),
        full_width=True,
    )


def _bin_edges(values: Sequence[float]) -> np.ndarray:
    """Equal bins, each a whole number of tokens wide."""
    low, high = math.floor(min(values)), math.ceil(max(values)) + 1
    width = max(1, math.ceil((high - low) / LONGEST_BINS))
    return np.arange(low, high + width, width, dtype=float)


def _finding(lengths: Mapping[str, Sequence[float]]) -> str:
    if UNBIASED not in lengths:
        means = [f"{words.decimal(float(np.mean(v)))} tokens for {s}" for s, v in lengths.items()]
        return f"Mean length: {words.listed(means)}; there is no {UNBIASED} to compare with."
    sentences = [
        _verdict(strategy, found)
        for strategy, values in lengths.items()
        if strategy != UNBIASED and (found := length_ratio(values, lengths[UNBIASED])) is not None
    ]
    if not sentences:
        return f"Mean length with {UNBIASED}: {words.decimal(float(np.mean(lengths[UNBIASED])))} tokens."
    return f"{' '.join(sentences)} Lengths also change as a policy learns."


def _verdict(strategy: str, found: LengthRatio) -> str:
    interval = f"{found.ratio:.2f}× {UNBIASED}'s (95 %: {found.low:.2f} to {found.high:.2f})"
    if found.high >= 1 >= found.low:
        return f"{strategy.capitalize()}'s mean length is {interval}: no difference beyond chance."
    kind = "shorter" if found.ratio < 1 else "longer"
    return (
        f"{strategy.capitalize()} trained on {kind} rollouts, mean {interval}; of its rollouts "
        f"{words.percent(found.tail_share)} are as long as {UNBIASED}'s longest "
        f"{words.percent(found.unbiased_tail_share)}."
    )
