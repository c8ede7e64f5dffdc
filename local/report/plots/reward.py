"""How the reward grew, against time and against the tokens that it cost."""

from collections.abc import Callable, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from midstream.local.events import RunEvents
from midstream.local.report import words
from midstream.local.report.palette import INK, MUTED, SURFACE, Mark
from midstream.local.report.plots.figure import Plot, direct_labels, drawn
from midstream.local.summary import number

SMOOTHED_STEPS = 5
"""A line shows the mean over this many steps around each step, fewer at the ends and in short runs."""

READING = (
    "Each point is the mean reward of the rollouts that one step trained on, each line the moving mean; higher and "
    "further left is better. Strategies that choose what they train on move it by their choice as well."
)

Curve = tuple[list[float], list[float], list[float]]
"""x, the reward of each step, and its smoothed line."""


def reward_over_time(runs: Sequence[RunEvents], marks: dict[str, Mark]) -> Plot | None:
    return _reward_plot(
        "reward-time",
        "Reward against wall-clock",
        {run.strategy: curve(run, _rollout_end_s) for run in runs},
        marks,
        xlabel="seconds since the run's start",
        cost=lambda x: f"{words.seconds(x)}",
    )


def reward_over_tokens(runs: Sequence[RunEvents], marks: dict[str, Mark]) -> Plot | None:
    return _reward_plot(
        "reward-tokens",
        "Reward against generated tokens",
        {run.strategy: curve(run, _cumulative_tokens) for run in runs},
        marks,
        xlabel="model tokens generated, wasted ones included",
        cost=lambda x: f"{words.count(x)} tokens",
    )


def held_out_over_tokens(runs: Sequence[RunEvents], marks: dict[str, Mark]) -> Plot | None:
    """Where policies were scored during the run; what strategies choose to train on moves no point of it."""
    curves = {run.strategy: held_out_curve(run) for run in runs if len(run.evaluations) > 1}
    return _reward_plot(
        "held-out-tokens",
        "Reward on held-out tasks against generated tokens",
        curves,
        marks,
        xlabel="model tokens generated, wasted ones included",
        cost=lambda x: f"{words.count(x)} tokens",
        reading=(
            "Each point is the mean reward of one policy on tasks that it was not trained on, the same for all "
            "strategies, each line the moving mean; higher and further left is better."
        ),
    )


def held_out_curve(run: RunEvents) -> Curve:
    """The scored policies whose reward is known, against what was generated before them."""
    cost = {step["step"] + 1: tokens for step, tokens in zip(run.steps, _cumulative_tokens(run), strict=True)}
    cost[0] = 0.0
    pairs = [
        (x, y)
        for score in run.evaluations
        if (x := cost.get(int(score.get("version") or 0))) is not None
        and (y := number(score.get("reward_mean"))) is not None
    ]
    ys = [y for _, y in pairs]
    return [x for x, _ in pairs], ys, smoothed(ys)


def curve(run: RunEvents, xs_of: Callable[[RunEvents], list[float | None]]) -> Curve:
    """The steps for which both x and reward are known."""
    pairs = [
        (x, y)
        for x, y in zip(xs_of(run), (number(step.get("reward_mean")) for step in run.steps), strict=True)
        if x is not None and y is not None
    ]
    ys = [y for _, y in pairs]
    return [x for x, _ in pairs], ys, smoothed(ys)


def smoothed(ys: Sequence[float]) -> list[float]:
    """Centred moving mean over at most SMOOTHED_STEPS values, and over no more than a third of them."""
    reach = min(SMOOTHED_STEPS // 2, len(ys) // 6)
    windows = [ys[max(0, i - reach) : i + reach + 1] for i in range(len(ys))]
    return [sum(window) / len(window) for window in windows]


def common_level(curves: dict[str, Curve]) -> float | None:
    """The highest reward that every strategy's line reached, rounded down to a twentieth."""
    peaks = [max(line) for _, _, line in curves.values() if line]
    if not peaks:
        return None
    return int(min(peaks) * 20 + 1e-9) / 20


def first_reach(level: float, xs: Sequence[float], line: Sequence[float]) -> float | None:
    return next((x for x, y in zip(xs, line, strict=True) if y >= level), None)


def _reward_plot(
    name: str,
    title: str,
    curves: dict[str, Curve],
    marks: dict[str, Mark],
    *,
    xlabel: str,
    cost: Callable[[float], str],
    reading: str = READING,
) -> Plot | None:
    shown = {strategy: curve for strategy, curve in curves.items() if curve[0]}
    if not shown:
        return None
    level = common_level(shown)

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        for strategy, (xs, ys, line) in shown.items():
            mark = marks[strategy]
            axes.plot(
                xs, ys, linestyle="none", marker=mark.marker, markersize=3.5, color=mark.colour, alpha=0.35
            )
            axes.plot(xs, line, color=mark.colour)
            axes.plot(
                xs[-1:],
                line[-1:],
                marker=mark.marker,
                color=mark.colour,
                markersize=7,
                markeredgecolor=SURFACE,
            )
        every_reward = [y for _, ys, _ in shown.values() for y in ys]
        low, high = min(0.0, *every_reward), max(1.0, *every_reward)
        axes.set_ylim(low - 0.02 * (high - low), high + 0.02 * (high - low))
        axes.set_xlim(left=0)
        if level is not None and len(shown) > 1:
            axes.axhline(level, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
            for xs, _, line in shown.values():
                reached = first_reach(level, xs, line)
                if reached is not None:
                    axes.plot([reached], [level], "|", color=INK, markersize=9, markeredgewidth=1.6)
        axes.set_xlabel(xlabel)
        axes.set_ylabel("mean reward")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        if narrow:
            axes.xaxis.set_major_locator(MaxNLocator(4))
        labels = [(line[-1], strategy, marks[strategy].colour) for strategy, (_, _, line) in shown.items()]
        direct_labels(axes, labels, gap=0.075 * (high - low))

    return drawn(name, title, paint, reading=reading, finding=_finding(shown, level, cost), height_px=330)


def _finding(curves: dict[str, Curve], level: float | None, cost: Callable[[float], str]) -> str:
    if len(curves) == 1:
        ((strategy, (xs, _, line)),) = curves.items()
        return f"{strategy} went from {line[0]:.2f} to {line[-1]:.2f} in {cost(xs[-1])}."
    reached = sorted(
        (x, strategy)
        for strategy, (xs, _, line) in curves.items()
        if level is not None and (x := first_reach(level, xs, line)) is not None
    )
    costs = words.listed([f"{strategy} after {cost(x)}" for x, strategy in reached])
    return f"A mean reward of {level:.2f}, the highest that every line reached (dashed): {costs}."


def _rollout_end_s(run: RunEvents) -> list[float | None]:
    return [number(step.get("rollout_end")) for step in run.steps]


def _cumulative_tokens(run: RunEvents) -> list[float | None]:
    totals: list[float | None] = []
    so_far = 0.0
    for step in run.steps:
        so_far += number(step.get("generated_tokens")) or 0.0
        totals.append(so_far)
    return totals
