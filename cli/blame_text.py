"""Rollouts and their blame on stdout: with a colour for each age on a terminal, as plain columns elsewhere."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from midstream.cli.blame_of_run import FoundRun
from midstream.cli.units import columns
from midstream.hooks.credit.blame import Blame
from midstream.hooks.credit.kept import KeptRollout
from midstream.hooks.credit.measured import Measured
from midstream.local.report import words
from midstream.local.report.workspaces import Part, Workspace, lag_text, workspace

STYLES = ("green", "cyan", "yellow", "magenta", "red")
"""Of what the current version wrote, of the one before, and so on; the last is for all older ones."""
BAR_CHARACTERS = 30
LIST_HEADER = (
    "rollout",
    "step",
    "reward",
    "status",
    "tokens",
    "turns",
    "resumes",
    "first token",
    "oldest token",
    "oldest write",
    "paths",
    "versions",
)
ROW_HEADER = ("version", "turn", "change", "size", "share", "path")
RIGHT = {"version", "turn", "size", "share"}


def print_list(runs: Sequence[FoundRun], console: Console | None = None) -> None:
    """A line for each rollout, its lags in policy versions; to stdout where no console is given."""
    console = console or _console()
    for run in runs:
        console.print(Text(words.printable(str(run.run_dir)), style="bold"), soft_wrap=True)
        lines = [LIST_HEADER, *map(_line, run.rollouts)]
        text = "\n".join(columns(lines, str.rjust)) if run.rollouts else "no rollouts"
        console.print(Text(text), soft_wrap=True)
        console.print()


def print_workspaces(runs: Sequence[FoundRun], console: Console | None = None) -> None:
    """The blame of each rollout; to stdout where no console is given."""
    console = console or _console()
    for run in runs:
        for rollout in run.rollouts:
            told = workspace(rollout)
            head = f"{words.printable(str(run.run_dir))}: rollout {told.index}"
            console.print(Text(head, style="bold"), soft_wrap=True)
            console.print(Text(told.facts), soft_wrap=not console.is_terminal)
            console.print()
            if told.parts:
                _print_parts(told.parts, console)
                _print_rows(told, console)
            for remark in (*told.remarks, *_ratios(run.measured(rollout))):
                console.print(Text(remark), soft_wrap=not console.is_terminal)
            console.print()


def _line(rollout: KeptRollout) -> tuple[str, ...]:
    lags = rollout.lags
    return (
        _number(rollout.index),
        _number(rollout.step),
        words.decimal(rollout.reward),
        rollout.status,
        words.count(rollout.tokens),
        words.count(rollout.turns),
        words.count(rollout.resumes),
        words.count(lags.trajectory),
        words.count(lags.token),
        words.count(lags.environment),
        *_written(rollout.blame),
    )


def _written(blame: Blame) -> tuple[str, str]:
    """How many paths differ from the task's start, and how many versions wrote them."""
    if blame.unknown is not None:
        return words.MISSING, words.MISSING
    return words.count(blame.paths), words.count(len(blame.shares))


def _print_parts(parts: Sequence[Part], console: Console) -> None:
    lines = [(f"version {part.version}", lag_text(part.lag), words.percent(part.share)) for part in parts]
    for part, line in zip(parts, columns(lines, str.rjust), strict=True):
        bar = ("█" if console.is_terminal else "#") * round(BAR_CHARACTERS * part.share)
        console.print(Text(f"{line}  ").append(bar, style=_style(part.lag)), soft_wrap=True)
    console.print()


def _print_rows(told: Workspace, console: Console) -> None:
    cells = [(row.version, row.turn, row.change, row.size, row.share, row.path) for row in told.rows]
    if not console.is_terminal:
        console.print(Text("\n".join(columns([ROW_HEADER, *cells]))), soft_wrap=True)
        console.print()
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ROW_HEADER:
        table.add_column(name, justify="right" if name in RIGHT else "left", overflow="fold")
    for row, line in zip(told.rows, cells, strict=True):
        table.add_row(*(Text(cell, style=_style(row.lag)) for cell in line))
    console.print(table)


def _ratios(measured: Measured | None) -> list[str]:
    if measured is None or not measured.older_tokens:
        return []
    text = (
        f"{measured.older_tokens:,} tokens are older than its newest version; their mean squared log-ratio is "
        f"{measured.prefix_log_ratio_sq:.2g}"
    )
    if measured.products:
        at, log = measured.products[-1]
        text += (
            f", and the log of the prefix product at token {at:,}, its last state with a snapshot, {log:+.2f}"
        )
    return [text]


def _style(lag: int | None) -> str:
    return "dim" if lag is None else STYLES[max(0, min(lag, len(STYLES) - 1))]


def _number(value: int | None) -> str:
    return words.MISSING if value is None else str(value)


def _console() -> Console:
    return Console(highlight=False)
