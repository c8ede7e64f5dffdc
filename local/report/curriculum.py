"""What a run's curriculum did: its plots, and a row of sums for each source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from midstream.local.report import words
from midstream.local.report.history import History, calibration_error, gathered, merged, of_source
from midstream.local.report.palette import SOURCES, Mark
from midstream.local.report.plots.beliefs import beliefs_plot
from midstream.local.report.plots.calibration import calibration_plot
from midstream.local.report.plots.figure import Plot
from midstream.local.report.plots.groups import groups_plot

COLUMNS = (
    "Prompts", "Known", "Groups ended", "Informed", "Passed over", "Explored", "Let through", "Given up",
    "Tokens saved", "Calibration error",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A source by its name and what stands in COLUMNS."""

    source: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Curriculum:
    """As it is told of one strategy; `left_out` says what of its history does not count."""

    strategy: str
    rows: tuple[Row, ...]
    plots: tuple[Plot, ...]
    left_out: str


def told(histories: Sequence[History], marks: Mapping[str, Mark]) -> tuple[Curriculum, ...]:
    """Of each history that has a step."""
    return tuple(
        _told(history, f"curriculum-{n}", marks[history.strategy].colour)
        for n, history in enumerate(histories)
        if history.steps
    )


def _told(history: History, name: str, colour: str) -> Curriculum:
    shown = gathered(history, most=len(SOURCES))
    plots = (
        calibration_plot(f"{name}-calibration", shown),
        groups_plot(f"{name}-groups", shown, colour),
        beliefs_plot(f"{name}-beliefs", shown),
    )
    return Curriculum(
        strategy=history.strategy,
        rows=tuple(_row(history, source) for source in history.sources),
        plots=tuple(plot for plot in plots if plot is not None),
        left_out=words.listed(history.left_out),
    )


def _row(history: History, source: str) -> Row:
    steps = of_source(history, source)
    last, total = steps[max(steps)], merged(steps.values())
    error = calibration_error(total.calibration)
    return Row(
        source=words.printable(source),
        cells=(
            words.count(last.prompts),
            words.count(last.known),
            words.count(total.ended),
            words.percent(total.informative / total.ended if total.ended else None),
            words.count(total.skipped),
            words.count(total.explored),
            words.count(total.relaxed),
            words.count(total.stopped),
            words.count(total.tokens_saved),
            words.decimal(error),
        ),
    )
