"""What the report says and draws, from events whose answers are known."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from midstream.local.events import EVENTS_FOLDER, EventsError, EventWriter, RunEvents, sort_out
from midstream.local.report.findings import chance_difference, findings, warnings
from midstream.local.report.page import read_comparison, render, write_report
from midstream.local.report.palette import marks
from midstream.local.report.plots.lag import shares
from midstream.local.report.plots.length import length_ratio
from midstream.local.report.plots.reward import common_level, first_reach, smoothed
from midstream.local.report.plots.timeline import binned, requests_in_flight
from midstream.local.report.plots.tokens import token_use
from midstream.local.report.table import Cell, comparison
from midstream.local.summary import summarise
from tests.local.synthetic_events import write_run

FOUR = ("wait", "discard", "restart", "continue")


def entry(strategy: str, **others: Any) -> dict[str, Any]:
    return {
        **summarise(sort_out([{"kind": "run", "strategy": strategy}])),
        "status": "ok",
        "steps": 10,
        "trained_rollouts": 100,
        **others,
    }


def cells(runs: list[dict[str, Any]], label: str) -> tuple[Cell, ...]:
    (row,) = (row for row in comparison(runs) if row.label == label)
    return row.cells


def step_events(**fields: Any) -> RunEvents:
    return sort_out([{"kind": "run", "strategy": "wait"}, {"kind": "step", "step": 0, **fields}])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for strategy in FOUR:
        write_run(tmp_path, strategy, steps=6)
    return tmp_path


def test_the_table_shows_ratios_to_discard_and_the_best() -> None:
    runs = [entry("wait", wall_s=200.0), entry("discard", wall_s=100.0), entry("continue", wall_s=80.0)]
    assert cells(runs, "Wall-clock") == (
        Cell("200 s", "2.00×"),
        Cell("100 s"),
        Cell("80.0 s", "0.80×", best=True),
    )
    assert [cell.best for cell in cells(runs, "Trained rollouts per second")] == [False, False, True]


def test_runs_that_look_equal_are_equally_good_and_all_equal_is_nobodys_merit() -> None:
    runs = [entry("wait", wall_s=90.0), entry("discard", wall_s=56.91), entry("continue", wall_s=56.89)]
    assert [cell.best for cell in cells(runs, "Wall-clock")] == [False, True, True]
    assert not any(cell.best for cell in cells(runs[1:], "Wall-clock"))


def test_an_unfinished_run_cannot_be_the_best() -> None:
    runs = [
        entry("wait", wall_s=200.0),
        entry("discard", wall_s=100.0),
        entry("continue", wall_s=8.0, status="interrupted", steps=1),
    ]
    assert [cell.best for cell in cells(runs, "Wall-clock")] == [False, True, False]


def test_what_is_unknown_is_a_dash_without_a_ratio() -> None:
    runs = [
        entry("wait", wasted_tokens=None),
        entry("discard", wasted_tokens=0),
        entry("naive", wasted_tokens=5),
    ]
    assert [(cell.text, cell.ratio) for cell in cells(runs, "Wasted tokens")] == [
        ("–", ""),
        ("0", ""),
        ("5", ""),
    ]


def test_findings_follow_the_numbers() -> None:
    slow = entry("wait", wall_s=100.0, wasted_fraction=0.0, restores_checked=0)
    fast = entry("continue", wall_s=50.0, wasted_fraction=0.25, restores_checked=7)
    text = " ".join(findings([slow, fast]))
    assert "continue trained on 2.00 rollouts a second, 2.00× the pace of wait" in text
    assert "0 % with wait and 25 % with continue" in text
    assert "7; all were equal" in text
    assert "7; 2 differed" in " ".join(findings([slow, {**fast, "restores_bad": 2}]))
    assert "wait trained on 4.00 rollouts a second" in " ".join(findings([{**slow, "wall_s": 25.0}, fast]))


def test_warnings_name_what_went_wrong() -> None:
    events = sort_out(
        [{"kind": "run", "strategy": "restart"}, {"kind": "alarm", "t": 3.0, "message": "server died"}]
    )
    runs = [
        entry("restart", status="interrupted", steps=4),
        entry("continue", restores_checked=9, restores_bad=2),
    ]
    text = "\n".join(warnings([events], runs))
    assert "restart was interrupted after 4 steps" in text
    assert "continue: 2 of 9 restored environments differed" in text
    assert "restart, at 3.00 s: server died" in text
    assert warnings([], [entry("wait"), entry("discard")]) == []


def test_chance_is_the_two_sided_five_per_cent_of_a_coin() -> None:
    assert chance_difference(0.5, 200) == pytest.approx(1.96 * math.sqrt(2 * 0.25 / 200))
    assert chance_difference(1.5, 200) is None


def test_reward_lines() -> None:
    assert smoothed([0.0, 1.0]) == [0.0, 1.0]
    assert smoothed([0, 0, 6, 0, 0, 0])[1:4] == [2, 2, 2]
    curves = {"a": ([1.0, 2.0], [0, 0], [0.1, 0.62]), "b": ([3.0, 4.0], [0, 0], [0.7, 0.9])}
    assert common_level(curves) == 0.6
    assert first_reach(0.6, [1.0, 2.0], [0.1, 0.62]) == 2.0
    assert first_reach(0.7, [1.0, 2.0], [0.1, 0.62]) is None


def test_the_timeline_keeps_the_area_of_its_samples() -> None:
    run = step_events(occupancy=[[1.0, 8], [2.0, 4], [None, 3], [2.5, None]], rollout_end=4.0)
    samples = requests_in_flight(run)
    assert samples == [(1.0, 8.0), (2.0, 4.0), (4.0, 0.0)]
    assert binned(samples, (0.0, 8.0), 4) == pytest.approx([4.0, 4.0, 0.0, 0.0])
    assert sum(binned(samples, (0.0, 8.0), 7)) * 8 / 7 == pytest.approx(8 + 8)
    assert binned(samples, (1.5, 2.5), 2) == pytest.approx([8.0, 4.0])
    assert binned([], (0.0, 1.0), 3) == [0.0] * 3


def test_tokens_that_nothing_accounts_for_are_shown() -> None:
    counts = {"trained_tokens": 60, "wasted_tokens": 20, "buffered_tokens": 10}
    assert token_use(step_events(generated_tokens=90, **counts)).unknown == 0
    use = token_use(step_events(generated_tokens=120, **counts))
    assert (use.unknown, use.generated) == (30, 120)


def test_long_lags_share_a_bar() -> None:
    assert shares({0: 2, 1: 1, 5: 1, 9: 4}) == pytest.approx([0.25, 0.125, 0, 0, 0, 0.625])


def test_a_preference_for_short_rollouts_is_told_from_chance() -> None:
    unbiased = [10, 20, 30, 40] * 50
    shorter = length_ratio([10, 20, 30] * 60, unbiased)
    assert shorter is not None
    assert shorter.ratio == pytest.approx(0.8)
    assert shorter.high < 1
    assert (shorter.tail_share, shorter.unbiased_tail_share) == (0.0, 0.0)
    same = length_ratio([20, 30] * 50, unbiased)
    assert same is not None and same.low < 1 < same.high
    assert length_ratio([5], unbiased) is None


def test_known_strategies_keep_their_colour_and_unknown_ones_get_another() -> None:
    alone, together = marks(["continue"]), marks(["my.own:Policy", "wait", "rewind", "continue"])
    assert alone["continue"] == together["continue"]
    assert len({mark.colour for mark in together.values()}) == 4


def test_the_page_holds_every_plot_and_nothing_from_elsewhere(run_dir: Path) -> None:
    (run_dir / "wait" / "config.yaml").write_text("note: <b>& so on</b>\n")
    page = write_report(run_dir).read_text(encoding="utf-8")
    for title in (
        "wall-clock",
        "generated tokens",
        "Who worked when",
        "tokens went",
        "How old",
        "Which lengths",
    ):
        assert re.search(f"<h3[^>]*>[^<]*{title}", page), title
    assert "note: &lt;b&gt;&amp; so on&lt;/b&gt;" in page
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', page)
    assert len(re.findall(r'\bid="([^"]+)"', page)) == len(set(re.findall(r'\bid="([^"]+)"', page)))
    assert not [path.name for path in run_dir.iterdir() if path.name.startswith(".")]


def test_the_same_events_make_the_same_page(tmp_path: Path) -> None:
    write_run(tmp_path, "continue", steps=2)
    comparison = read_comparison(tmp_path)
    assert render(comparison) == render(comparison)


@pytest.mark.parametrize("end", ["interrupted", "failed", None])
def test_a_page_of_runs_that_did_not_end(tmp_path: Path, end: str | None) -> None:
    write_run(tmp_path, "ladder", steps=1, end=end)
    with EventWriter(tmp_path / "wait" / EVENTS_FOLDER) as events:
        events.write("run", strategy="wait")
    with EventWriter(tmp_path / "continue" / EVENTS_FOLDER) as events:
        events.write("run", strategy="continue", machine=None)
        events.write("step", step=0, reward_mean=math.nan, response_tokens=[0], occupancy=[])
        events.write("step", step=1, reward_mean=0.5, rollout_start=0.0, rollout_end=0.0, lag_token={"0": 0})
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "Before you read on" in page
    assert "ladder" in page
    assert not re.search(r"\bnan\b", page)


def test_a_page_of_nothing_but_a_start_says_so(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "wait" / EVENTS_FOLDER) as events:
        events.write("run", strategy="wait")
    assert "No step has been recorded yet" in write_report(tmp_path).read_text(encoding="utf-8")


def test_a_directory_without_events_is_an_error_that_names_it(tmp_path: Path) -> None:
    for wrong in (tmp_path, tmp_path / "absent"):
        with pytest.raises(EventsError, match=str(wrong)):
            write_report(wrong)
        assert not (wrong / "report.html").exists()
