"""What the report says of a curriculum, from histories whose sums are known."""

import re
from pathlib import Path

import numpy as np
import pytest

from midstream.buffers.curriculum.book import Cost
from midstream.buffers.curriculum.curriculum import Curriculum, Outcome
from midstream.buffers.curriculum.drawing import Prompts
from midstream.buffers.curriculum.history import FOLDER, HISTORY, keep_step
from midstream.buffers.curriculum.tally import BINS
from midstream.conf.schema import CurriculumConfig
from midstream.local.events import EVENTS_FOLDER, EventWriter, RunEvents, read_run, sort_out
from midstream.local.report.curriculum import COLUMNS, told
from midstream.local.report.history import (
    SourceStep,
    calibration_error,
    gathered,
    merged,
    of_source,
    read_history,
)
from midstream.local.report.page import write_report
from midstream.local.report.palette import marks
from midstream.local.report.plots.beliefs import STEPS_SHOWN, shares, thinned
from midstream.local.report.plots.calibration import points
from midstream.local.report.plots.reward import held_out_curve
from tests.local.synthetic_events import write_run
from tests.local.synthetic_history import append, line, source, write_history


def run_of(*steps: int) -> RunEvents:
    return sort_out(
        [{"kind": "run", "strategy": "curriculum"}, *({"kind": "step", "step": n} for n in steps)]
    )


def test_a_run_without_a_curriculum_has_no_history(tmp_path: Path) -> None:
    assert read_history(tmp_path, run_of(0)) is None


def test_what_a_curriculum_writes_is_what_is_read(tmp_path: Path) -> None:
    prompts = Prompts(np.arange(6, dtype=np.uint64), np.array([0, 0, 0, 0, 1, 1], np.int32), ["easy", "hard"])
    curriculum = Curriculum(
        CurriculumConfig(), prompts, group_size=4, groups_per_step=2, seed=0, shuffle=False
    )
    for step in range(2):
        positions = curriculum.take(6)
        for position in positions:
            curriculum.observe(Outcome(position, [1.0, 1.0, 1.0, float(position < 4)], Cost()))
        tallies = curriculum.end_step()
        keep_step(tmp_path / FOLDER, step, curriculum, tallies, with_state=False)
    history = read_history(tmp_path, run_of(0, 1))
    assert history is not None and not history.damaged and not history.left_out
    assert {name: part.prompts for name, part in history.steps[1].items()} == {"easy": 4, "hard": 2}
    for step in (0, 1):
        parts = history.steps[step]
        assert sum(part.played for part in parts.values()) == sum(part.ended for part in parts.values()) == 6
        assert parts["easy"].informative == 0
        assert parts["hard"].informative == parts["hard"].ended
        for part in parts.values():
            assert part.known == sum(part.pass_rates)
            assert sum(groups for _, _, groups in part.calibration) == part.ended


def test_a_line_is_a_step_with_its_sources(tmp_path: Path) -> None:
    rates, calibration = [1, *[0] * 8, 2], [*[[0.0, 0.0, 0]] * 9, [1.9, 2.0, 2]]
    easy = source(prompts=3, known=2, pass_rates=rates, calibration=calibration, played=2, tokens_saved=1.5)
    append(tmp_path, line(0, easy=easy, hard=source(played=5, informative=4, skipped=7)))
    history = read_history(tmp_path, run_of(0))
    assert history is not None and history.sources == ["hard", "easy"]
    assert history.steps[0]["easy"] == SourceStep(
        prompts=3,
        known=2,
        pass_rates=tuple(rates),
        calibration=tuple((float(p), float(o), float(n)) for p, o, n in calibration),
        played=2,
        tokens_saved=1.5,
    )
    assert (history.left_out, history.damaged) == ((), ())
    assert merged(history.steps[0].values()).played == 7


def test_of_a_step_that_was_done_again_the_last_line_counts(tmp_path: Path) -> None:
    append(tmp_path, *(line(n, easy=source(played=1)) for n in (0, 1, 2, 3)))
    append(tmp_path, *(line(n, easy=source(played=9)) for n in (2,)))
    history = read_history(tmp_path, run_of(0, 1, 2))
    assert history is not None
    assert [part.played for part in of_source(history, "easy").values()] == [1, 1, 9]
    assert history.left_out == (
        "1 line of steps that were done again after a resume",
        "1 line of steps that the run has not finished",
    )


@pytest.mark.parametrize(
    ("damaged", "what"),
    [
        ("{]\n", "line 2: not JSON"),
        ("[]\n", "line 2: no object with 'step' and 'sources'"),
        (line(1, easy=source(played=-1)), "line 2: 'played' is -1, not a number from 0 on"),
        (line(1, easy=source(played="many")), "line 2: 'played' is 'many'"),
        (line(1, easy=source(pass_rates=[1])), "have not 10 entries each"),
        (line(1, easy=source(calibration=[[0.1]] * BINS)), "an entry of 'calibration' has not 3 numbers"),
        (line(1, easy=source(calibration=[[0.1, float("nan"), 1]] * BINS)), "'calibration' is nan"),
        ('{"step": null, "sources": {}}\n', "'step' is None"),
        ('{"step": 1, "sources": {"easy": 3}}\n', "a source is no object"),
        ("\udcff\x00\n", "line 2: not JSON"),
    ],
)
def test_a_line_that_cannot_be_read_is_left_out_and_named(tmp_path: Path, damaged: str, what: str) -> None:
    path = append(tmp_path, line(0, easy=source(played=1)))
    with path.open("ab") as file:
        file.write(damaged.encode(errors="surrogateescape"))
    append(tmp_path, line(2, easy=source(played=3)))
    history = read_history(tmp_path, run_of(0, 1, 2))
    assert history is not None
    assert list(history.steps) == [0, 2]
    assert what in history.damaged[0] and str(path) in history.damaged[0]
    assert history.left_out == ("1 line that cannot be read", "1 of 3 steps, which have no line")


def test_a_torn_end_is_no_damage(tmp_path: Path) -> None:
    append(tmp_path, line(0, easy=source()), line(1, easy=source())[:30])
    history = read_history(tmp_path, run_of(0, 1))
    assert history is not None
    assert (list(history.steps), history.damaged) == ([0], ())
    assert history.left_out == ("1 line torn at the end of the file", "1 of 2 steps, which have no line")


def test_every_cut_of_a_history_can_be_read(tmp_path: Path) -> None:
    whole = write_history(tmp_path, 3).read_bytes()
    for size_bytes in range(0, len(whole), 41):
        (tmp_path / FOLDER / HISTORY).write_bytes(whole[:size_bytes])
        history = read_history(tmp_path, run_of(0, 1, 2))
        assert history is not None and not history.damaged
        assert len(history.steps) == whole[:size_bytes].count(b"\n")


def test_many_sources_become_few_and_nothing_is_lost(tmp_path: Path) -> None:
    parts = {f"s{n}": source(played=n, prompts=10 * n, pass_rates=[n] * BINS) for n in range(1, 9)}
    append(tmp_path, line(0, **parts))
    history = read_history(tmp_path, run_of(0))
    assert history is not None
    few = gathered(history, most=3)
    assert few.sources == ["6 other sources", "s8", "s7"]
    assert merged(few.steps[0].values()) == merged(history.steps[0].values())
    assert gathered(few, most=3) == few


def test_calibration_is_weighted_by_groups() -> None:
    bins = [(0.5, 0.5, 1.0), (3.0, 1.5, 6.0), *[(0.0, 0.0, 0.0)] * 8]
    assert calibration_error(bins) == pytest.approx(1.5 / 7)
    assert calibration_error(bins[2:]) is None
    assert points(tuple(bins)) == [(0.5, 0.5, 1.0), (0.5, 0.25, 6.0)]


def test_prompts_are_counted_by_bands_of_their_pass_rates() -> None:
    steps = {3: SourceStep(prompts=20, pass_rates=(4, 1, 0, 0, 1, 0, 0, 0, 1, 3)), 4: SourceStep(prompts=20)}
    assert shares(steps) == {3: pytest.approx((0.2, 0.05, 0.05, 0.05, 0.15))}, (
        "half of them are not known yet"
    )


def test_a_long_run_is_drawn_with_fewer_steps() -> None:
    assert thinned([2, 5, 7]) == [2, 5, 7]
    many = thinned(range(10_000))
    assert (len(many), many[0], many[-1]) == (STEPS_SHOWN, 0, 9_999)
    assert many == sorted(set(many))


def test_scores_during_a_run_stand_at_what_had_been_generated_before_them() -> None:
    events = [
        {"kind": "run", "strategy": "dapo"},
        *({"kind": "step", "step": step, "generated_tokens": 100} for step in range(3)),
        *({"kind": "evaluation", "version": n, "reward_mean": 0.1 * n} for n in (0, 2, 3)),
        {"kind": "evaluation", "version": 9, "reward_mean": 1.0},
    ]
    assert held_out_curve(sort_out(events))[:2] == ([0.0, 200.0, 300.0], pytest.approx([0.0, 0.2, 0.3]))


def test_the_page_has_a_section_for_each_curriculum(tmp_path: Path) -> None:
    for strategy in ("continue", "curriculum", "my$own$"):
        write_run(tmp_path, strategy, steps=8)
    write_history(tmp_path / "curriculum", 8)
    write_history(tmp_path / "my$own$", 7)
    append(tmp_path / "my$own$", "{}\n")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    section = page[page.index('<h2 id="curriculum">') : page.index("What the numbers mean")]
    for title in (
        "predicted against observed pass rates",
        "groups played and passed over",
        "where prompts moved",
    ):
        assert len(re.findall(f"<h3[^>]*>[^<]*{title}", section)) == 2
    assert section.count("Not counted here") == 1
    assert "1 line that cannot be read and 1 of 8 steps, which have no line" in section
    assert re.search(r"my\$own\$: \S+history.jsonl, line 8: no object with", page[: page.index("In numbers")])
    assert all(f">{column}</th>" in section for column in COLUMNS)
    assert len(re.findall(r'\bid="([^"]+)"', page)) == len(set(re.findall(r'\bid="([^"]+)"', page)))


def test_the_rows_are_sums_over_the_run(tmp_path: Path) -> None:
    bins = [[0.1, 0.3, 1], *[[0.0, 0.0, 0]] * 9]
    first = source(prompts=9, known=1, ended=4, informative=1, skipped=2, calibration=bins, tokens_saved=10.0)
    second = source(prompts=9, known=5, ended=4, informative=3, skipped=30, explored=2, relaxed=1, stopped=1)
    append(tmp_path, line(0, a=first, b=source()), line(1, a=second))
    history = read_history(tmp_path, run_of(0, 1))
    assert history is not None
    (only,) = told([history], marks(["curriculum"]))
    assert {row.source: row.cells for row in only.rows} == {
        "a": ("9", "5", "8", "50 %", "32", "2", "1", "1", "10", "0.20"),
        "b": ("0", "0", "0", "–", "0", "0", "0", "0", "0", "–"),
    }


def test_a_curriculum_that_has_done_nothing_yet_is_not_shown(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "curriculum" / EVENTS_FOLDER) as events:
        events.write("run", strategy="curriculum")
        events.write("step", step=0, reward_mean=0.5, rollout_start=0.0, rollout_end=1.0)
    append(tmp_path / "curriculum", line(0, odd=source()))
    history = read_history(tmp_path / "curriculum", read_run(tmp_path / "curriculum"))
    assert history is not None and told([history], marks(["curriculum"]))[0].plots == ()
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert '<h2 id="curriculum">' in page
    append(tmp_path / "curriculum").write_text("")
    assert '<h2 id="curriculum">' not in write_report(tmp_path).read_text(encoding="utf-8")
