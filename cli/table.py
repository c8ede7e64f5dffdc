"""The comparison as a table on stdout: with colours on a terminal, as plain columns elsewhere."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from midstream.cli.units import columns
from midstream.local.report.table import REFERENCE, Cell, Row, comparison

STYLES = {
    "wait": "blue",
    "discard": "red",
    "restart": "yellow",
    "continue": "green",
    "rewind": "cyan",
    "naive": "magenta",
}
WIDTH_WITH_RATIOS = 100
"""Columns from which on a terminal has room for the ratios."""


def print_comparison(runs: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """`runs` are the entries of `compare.json`; prints to stdout where no console is given."""
    console = console or Console(highlight=False)
    names = [str(run["strategy"]) for run in runs]
    rows = comparison(runs)
    if console.is_terminal:
        console.print(_coloured(names, rows, with_ratios=console.width >= WIDTH_WITH_RATIOS))
    else:
        console.print(_plain(names, rows), soft_wrap=True)


def _coloured(names: Sequence[str], rows: Sequence[Row], with_ratios: bool) -> Table:
    has_reference = with_ratios and REFERENCE in names
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.caption = f"★ best; small: ratio to {REFERENCE}" if has_reference else "★ best"
    table.add_column("", style="dim")
    for name in names:
        table.add_column(name, justify="right", header_style=f"bold {STYLES.get(name, 'cyan')}")
    for row in rows:
        table.add_row(row.label, *(_coloured_cell(cell, with_ratios) for cell in row.cells))
    return table


def _coloured_cell(cell: Cell, with_ratios: bool) -> Text:
    text = Text(f"★ {cell.text}" if cell.best else cell.text, style="bold green" if cell.best else "")
    if with_ratios and cell.ratio:
        text.append(f" {cell.ratio}", style="dim not bold")
    return text


def _plain(names: Sequence[str], rows: Sequence[Row]) -> str:
    lines = [["", *names], *([row.label, *map(_plain_cell, row.cells)] for row in rows)]
    note = "* best" + (f"; in brackets: ratio to {REFERENCE}" if REFERENCE in names else "")
    return "\n".join([*columns(lines, str.rjust), note])


def _plain_cell(cell: Cell) -> str:
    return ("* " if cell.best else "") + cell.text + (f" ({cell.ratio})" if cell.ratio else "")
