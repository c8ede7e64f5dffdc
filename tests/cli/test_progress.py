"""Progress and tables on a terminal and in a pipe."""

import io
from typing import Any

import pytest
from rich.console import Console

from midstream.cli.progress import LineProgress, LiveProgress, sparks
from midstream.cli.table import print_comparison
from midstream.local.events import sort_out
from midstream.local.progress import Progress
from midstream.local.summary import summarise

RUN = {
    **summarise(sort_out([{"kind": "run", "strategy": "wait"}])),
    "status": "ok",
    "wall_s": 12.0,
    "steps": 2,
}


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, highlight=False)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def play(progress: Progress) -> None:
    progress.note("loading")
    progress.strategy_started("wait", 2)
    progress.step_finished("wait", 0, 0.25, 321.0, 0.5)
    progress.alarm("the server died [signal 9]")
    progress.step_finished("wait", 1, None, None, None)
    progress.strategy_finished("wait", RUN)
    progress.close()
    progress.close()


def test_lines_tell_the_whole_story() -> None:
    console = Console(file=io.StringIO(), width=20)
    play(LineProgress(console))
    assert text_of(console).splitlines() == [
        "loading",
        "wait: 2 steps",
        "wait: step 1/2, reward 0.25, 321 tokens/s, trainer waiting 50 %",
        "warning: the server died [signal 9]",
        "wait: step 2/2, reward –, – tokens/s, trainer waiting –",
        "wait: ok in 12.0 s, reward – to –, – of the tokens wasted",
    ]


def test_the_live_view_keeps_alarms_and_ends_with_a_full_bar() -> None:
    console = terminal(120)
    play(LiveProgress(console))
    assert "warning: the server died [signal 9]" in text_of(console)
    assert "2/2" in [line for line in text_of(console).splitlines() if "wait" in line][-1]


@pytest.mark.parametrize("width", [80, 120])
def test_a_bar_stays_on_its_line(width: int) -> None:
    console = terminal(width)
    progress = LiveProgress(console)
    progress.strategy_started("continue", 100)
    for step in range(100):
        progress.step_finished("continue", step, 0.99, 12345.0, 0.99)
    progress.close()
    rows = [row for row in text_of(console).splitlines() if "continue" in row]
    assert "12,345 tokens/s" in rows[-1]
    assert "waiting 99 %" in rows[-1]


def test_sparks_rise_with_the_reward() -> None:
    assert sparks([]) == ""
    assert sparks([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparks([-1.0, 2.0, 4.0]) == "▁▅█"


@pytest.mark.parametrize(("width", "ratio_shown"), [(60, False), (120, True)])
def test_a_terminal_gets_ratios_where_there_is_room(width: int, ratio_shown: bool) -> None:
    console = terminal(width)
    runs: list[dict[str, Any]] = [RUN, {**RUN, "strategy": "discard", "wall_s": 6.0}]
    print_comparison(runs, console)
    assert ("2.00×" in text_of(console)) is ratio_shown
    assert "★ 6.00 s" in text_of(console)
