"""Shows how a comparison gets on, on stderr: a live bar per strategy on a terminal, lines elsewhere."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from midstream.cli.table import STYLES
from midstream.local.progress import Progress
from midstream.local.report import words

SPARKS = "▁▂▃▄▅▆▇█"
SPARKS_SHOWN = 12
WIDTH_WITH_SPARKS = 110
"""Columns from which on a terminal has room for the reward's course."""


def progress_on_stderr() -> Progress:
    console = Console(stderr=True, highlight=False)
    return LiveProgress(console) if console.is_terminal else LineProgress(console)


class LiveProgress:
    """A bar per strategy: step, reward, tokens per second, share of the step in which the trainer waited."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = [
            TextColumn("{task.description}"),
            BarColumn(bar_width=18),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("reward {task.fields[reward]}"),
            TextColumn("{task.fields[tokens_per_s]} tokens/s"),
            TextColumn("waiting {task.fields[waiting]}"),
            TimeElapsedColumn(),
        ]
        if console.width >= WIDTH_WITH_SPARKS:
            columns.insert(4, TextColumn("{task.fields[course]}"))
        self._bars = Bars(*columns, console=console)
        self._tasks: dict[str, TaskID] = {}
        self._rewards: dict[str, list[float]] = {}

    def strategy_started(self, name: str, steps: int) -> None:
        self._bars.start()
        self._tasks[name] = self._bars.add_task(
            f"[bold {STYLES.get(name, 'cyan')}]{name:<8}[/]",
            total=steps,
            reward=words.MISSING,
            tokens_per_s=words.MISSING,
            waiting=words.MISSING,
            course="",
        )
        self._rewards[name] = []

    def step_finished(
        self,
        name: str,
        step: int,
        reward: float | None,
        tokens_per_s: float | None,
        trainer_wait_fraction: float | None,
    ) -> None:
        if reward is not None:
            self._rewards[name].append(reward)
        self._bars.update(
            self._tasks[name],
            completed=step + 1,
            reward=words.decimal(reward),
            tokens_per_s=words.count(tokens_per_s),
            waiting=words.percent(trainer_wait_fraction),
            course=sparks(self._rewards[name]),
        )

    def alarm(self, message: str) -> None:
        self._console.print(f"warning: {message}", style="yellow", markup=False)

    def note(self, message: str) -> None:
        self._console.print(message, style="dim", markup=False)

    def strategy_finished(self, name: str, run: Mapping[str, Any]) -> None:
        """The bar stays, its clock stopped, with the reward of the last fifth and the whole run's waiting."""
        task = self._tasks[name]
        self._bars.update(
            task,
            reward=words.decimal(run.get("reward_last")),
            waiting=words.percent(run.get("trainer_wait_fraction")),
        )
        self._bars.stop_task(task)

    def close(self) -> None:
        self._bars.stop()


class LineProgress:
    """A line per event, for log files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps: dict[str, int] = {}

    def strategy_started(self, name: str, steps: int) -> None:
        self._steps[name] = steps
        self._say(f"{name}: {steps} steps")

    def step_finished(
        self,
        name: str,
        step: int,
        reward: float | None,
        tokens_per_s: float | None,
        trainer_wait_fraction: float | None,
    ) -> None:
        self._say(
            f"{name}: step {step + 1}/{self._steps[name]}, reward {words.decimal(reward)}, "
            f"{words.count(tokens_per_s)} tokens/s, trainer waiting {words.percent(trainer_wait_fraction)}"
        )

    def alarm(self, message: str) -> None:
        self._say(f"warning: {message}")

    def note(self, message: str) -> None:
        self._say(message)

    def strategy_finished(self, name: str, run: Mapping[str, Any]) -> None:
        self._say(
            f"{name}: {run.get('status', 'finished')} in {words.seconds(run.get('wall_s'))}, reward "
            f"{words.decimal(run.get('reward_first'))} to {words.decimal(run.get('reward_last'))}, "
            f"{words.percent(run.get('wasted_fraction'))} of the tokens wasted"
        )

    def close(self) -> None:
        pass

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


def sparks(values: list[float]) -> str:
    """The last values as bars between 0 and 1 (or the largest of them, where that is more)."""
    if not values:
        return ""
    top = max(1.0, *values)
    levels = [int(max(0.0, value) / top * (len(SPARKS) - 1) + 0.5) for value in values[-SPARKS_SHOWN:]]
    return "".join(SPARKS[level] for level in levels)
