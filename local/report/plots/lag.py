"""How old the training data was, in policy versions."""

from collections import Counter
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from midstream.local.events import RunEvents
from midstream.local.report import words
from midstream.local.report.palette import Mark
from midstream.local.report.plots.figure import Plot, drawn, stacked_axes
from midstream.local.summary import number

LAGS_SHOWN = 5
"""Lags from this one on share a bar."""

Histogram = Mapping[int, float]
"""Lag in policy versions → rollouts or tokens."""


def trajectory_lags(run: RunEvents) -> Histogram:
    """Trained rollouts by how many versions ago their first span was made."""
    lags: Counter[int] = Counter()
    for step in run.steps:
        lags.update(int(lag) for lag in step.get("lag_trajectory") or () if number(lag) is not None)
    return lags


def token_lags(run: RunEvents) -> Histogram:
    """Trained model tokens by how many versions ago they were made."""
    lags: Counter[int] = Counter()
    for step in run.steps:
        for lag, tokens in (step.get("lag_token") or {}).items():
            lags[int(lag)] += int(number(tokens) or 0)
    return +lags  # without lags of no tokens


def mean_lag(histogram: Histogram) -> float:
    return sum(lag * weight for lag, weight in histogram.items()) / sum(histogram.values())


def shares(histogram: Histogram) -> list[float]:
    """Share of each lag from 0 to LAGS_SHOWN, the last one with all that follow; negative lags count as 0."""
    parts = [0.0] * (LAGS_SHOWN + 1)
    for lag, weight in histogram.items():
        parts[min(max(lag, 0), LAGS_SHOWN)] += weight
    whole = sum(parts)
    return [part / whole for part in parts]


def lag_plot(runs: Sequence[RunEvents], marks: dict[str, Mark]) -> Plot | None:
    by_level = {
        "per rollout, by its first token": {r.strategy: h for r in runs if (h := trajectory_lags(r))},
        "per token": {r.strategy: h for r in runs if (h := token_lags(r))},
    }
    by_level = {level: found for level, found in by_level.items() if found}
    if not by_level:
        return None

    def paint(figure: Figure, narrow: bool) -> None:
        rows = stacked_axes(figure, len(by_level))
        for axes, (level, histograms) in zip(rows, by_level.items(), strict=True):
            width = 0.8 / len(histograms)
            for index, (strategy, histogram) in enumerate(histograms.items()):
                offset = (index - (len(histograms) - 1) / 2) * width
                axes.bar(
                    [lag + offset for lag in range(LAGS_SHOWN + 1)],
                    [100 * share for share in shares(histogram)],
                    width=0.88 * width,
                    color=marks[strategy].colour,
                    label=strategy,
                )
            axes.set_title(level, fontweight="normal", pad=4)
            axes.set_ylim(0, 104)
            axes.set_yticks([0, 50, 100])
            axes.set_ylabel("%")
            axes.grid(axis="x", visible=False)
            axes.tick_params(length=0)
        ticks = [str(lag) for lag in range(LAGS_SHOWN)] + [f"{LAGS_SHOWN}+"]
        rows[-1].set_xticks(range(LAGS_SHOWN + 1), ticks)
        rows[-1].set_xlabel("lag, policy versions")
        handles, names = rows[0].get_legend_handles_labels()
        figure.legend(
            handles,
            names,
            loc="outside upper left",
            ncols=3 if narrow else 5,
            handlelength=1,
            columnspacing=1.2,
        )

    return drawn(
        "lag",
        "How old the training data was",
        paint,
        reading="Share of trained rollouts and tokens by lag: version trained minus version that wrote them.",
        finding=_finding(*list(by_level.values())),
        height_px=380,
        narrow_height_px=400,
    )


def _finding(first: Mapping[str, Histogram], *rest: Mapping[str, Histogram]) -> str:
    tokens = rest[0] if rest else {}
    by_lag: dict[str, list[str]] = {}
    for strategy, histogram in first.items():
        lag = words.decimal(mean_lag(histogram))
        if strategy in tokens:
            lag += f" by rollout and {words.decimal(mean_lag(tokens[strategy]))} by token"
        by_lag.setdefault(lag, []).append(strategy)
    parts = [f"{lag} for {words.listed(strategies)}" for lag, strategies in by_lag.items()]
    return f"Mean lag in policy versions: {'; '.join(parts)}."
