"""What the report says and draws, from events whose answers are known."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from midstream.hooks.credit.blame import MOST_PATHS
from midstream.hooks.credit.kept import described, keep
from midstream.local.events import EVENTS_FOLDER, EventsError, EventWriter, RunEvents, sort_out
from midstream.local.report import words
from midstream.local.report.findings import chance_difference, findings, warnings
from midstream.local.report.page import read_comparison, render, write_report
from midstream.local.report.palette import marks
from midstream.local.report.plots.lag import shares
from midstream.local.report.plots.length import length_ratio
from midstream.local.report.plots.reward import common_level, first_reach, smoothed
from midstream.local.report.plots.timeline import binned, requests_in_flight
from midstream.local.report.plots.tokens import token_use
from midstream.local.report.table import Cell, comparison
from midstream.local.report.workspaces import PATHS_SHOWN, read_workspaces, workspace
from midstream.local.summary import summarise
from tests.buffers.made import played
from tests.conf.tuned import control_of, tuned
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


def test_the_held_out_reward_is_told_by_source_where_there_are_several() -> None:
    runs = [
        entry("continue", reward_held_out=0.5, reward_held_out_sources={"easy": 1.0, "medium": 0.25}),
        entry("curriculum", reward_held_out=0.6, reward_held_out_sources={"easy": 1.0, "medium": 0.5}),
        entry("wait", reward_held_out_sources={"medium": None}),
    ]
    texts = [cell.text for cell in cells(runs, "Reward, held-out tasks: medium")]
    assert texts == ["0.25", "0.50", "–"]
    assert [cell.best for cell in cells(runs, "Reward, held-out tasks: medium")] == [False, True, False]
    labels = [row.label for row in comparison(runs)]
    assert labels[labels.index("Reward, held-out tasks") + 1].endswith(": easy")
    assert not [row for row in comparison(runs[2:]) if "medium" in row.label]


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


def keep_workspaces(strategy_dir: Path, *turns: tuple[int, dict[str, str]], count: int = 1) -> None:
    """As a step leaves them that the policy at version 9 trains on."""
    keep(
        strategy_dir,
        0,
        [described(played(*turns), version=9, index=index, step=0) for index in range(count)],
    )


def test_the_page_says_who_made_the_oldest_workspaces(run_dir: Path) -> None:
    hostile = "<script>alert(1)</script>\n\udcff"
    keep_workspaces(run_dir / "continue", (5, {hostile: "x" * 30}), (9, {"b": "y" * 70}), count=5)
    keep_workspaces(run_dir / "wait", (9, {"b": "y"}), count=4)
    page = write_report(run_dir).read_text(encoding="utf-8")
    section = page[page.index("Who made the workspaces") : page.index("What the numbers mean")]
    assert section.count("<article") == 3
    assert "version 5, 4 versions old: 30 %" in section and "version 9, current: 70 %" in section
    assert r"&lt;script&gt;alert(1)&lt;/script&gt;\n\udcff" in section
    assert "In none of the 4 workspaces does a write of an older version survive." in section
    assert "<script" not in page
    assert len(re.findall(r'\bid="([^"]+)"', page)) == len(set(re.findall(r'\bid="([^"]+)"', page)))


def test_the_oldest_workspaces_are_those_of_the_oldest_write_and_then_of_the_oldest_bytes(
    tmp_path: Path,
) -> None:
    writes = {0: (6, 50, 50), 1: (4, 1, 99), 2: (9, 50, 50), 3: (4, 60, 40), 4: (8, 90, 10)}
    rollouts = [
        described(
            played((version, {"old": "x" * old_bytes}), (9, {"new": "y" * new_bytes})),
            version=9,
            index=index,
            step=0,
        )
        for index, (version, old_bytes, new_bytes) in writes.items()
    ]
    keep(tmp_path, 0, rollouts)
    found = read_workspaces(tmp_path, "continue")
    assert (found.kept, [told.index for told in found.oldest]) == (5, ["3", "1", "0"])


def test_of_many_paths_the_page_sums_up_what_it_does_not_name() -> None:
    rollout = played((5, {f"{n:03}": "x" * (200 - n) for n in range(200)}))
    told = workspace(described(rollout, version=9, index=0), most_paths=PATHS_SHOWN)
    assert [row.path for row in told.rows] == [f"{n:03}" for n in range(PATHS_SHOWN)] + ["192 more paths"]
    left_bytes = sum(200 - n for n in range(PATHS_SHOWN, 200))
    assert told.rows[-1].size == words.size(left_bytes)
    assert told.rows[-1].share == words.percent(left_bytes / sum(range(1, 201)))
    every = workspace(described(rollout, version=9, index=0))
    assert len(every.rows) == MOST_PATHS + 1 and every.rows[-1].version == "5"


def test_settings_that_were_changed_while_a_run_went_on_are_told(tmp_path: Path) -> None:
    write_run(tmp_path, "continue")
    folder = tmp_path / "continue"
    (folder / "config.yaml").write_text("steps: 3\n")
    control = control_of(folder)
    tuned(folder, "bounds.token=8")
    control.read()
    control.acknowledge(2)
    tuned(folder, "bounds.token=7")
    page = write_report(tmp_path).read_text()
    assert "continue: its settings were changed once while it ran" in page
    # What the job has not taken up was not in force.
    assert "bounds.token 16 → 8" in page and "8 → 7" not in page
    (folder / "control" / "base.json").write_text("{")
    assert "continue: what was changed while it ran is not known" in write_report(tmp_path).read_text()


def test_kept_rollouts_that_are_damaged_are_a_warning(run_dir: Path) -> None:
    keep_workspaces(run_dir / "continue", (5, {"a": "x"}))
    [path] = (run_dir / "continue" / "rollouts").iterdir()
    path.write_bytes(b"")
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert f"continue: {path} is damaged" in page
