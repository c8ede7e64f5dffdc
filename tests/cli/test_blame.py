"""`midstream blame` as a user meets it, on files as jobs write them."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.records import Group, Member
from midstream.buffers.rollout import Status
from midstream.cli.blame_of_run import with_index
from midstream.cli.blame_text import print_list, print_workspaces
from midstream.cli.main import main
from midstream.hooks.credit.kept import KeptRollout, described, keep
from midstream.hooks.credit.lines import FOLDER
from tests.buffers.made import played

HOSTILE = "\x1b[2Jgone\nrollout 9 \udcff [red]"


def made(step: int, index: int, **fields: Any) -> KeptRollout:
    rollout = played((3, {HOSTILE: "x" * 300}), (5, {"kept.py": "y" * 700, "a": ""}))
    rollout.status, rollout.reward = Status.COMPLETED, 0.5
    return replace(described(rollout, version=6, index=index, step=step), **fields)


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["blame", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run_dir = tmp_path / "run"
    for step in range(3):
        keep(run_dir, step, [made(step, index) for index in range(4 * step, 4 * step + 4)])
    return run_dir


def test_a_rollout_is_told_in_columns(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    code, out, err = said(capsys, run, 6)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{run}: rollout 6"
    assert "trained in step 1, reward 0.50, completed, 6 tokens in 2 turns, 0 resumes" in lines[1]
    assert "version 3  3 versions old  30 %  #########" in lines
    assert "version 5   1 version old  70 %  #####################" in lines
    rows = [line.split() for line in lines]
    assert ["5", "1", "created", "700", "B", "70", "%", "kept.py"] in rows
    assert any(row[:3] == ["5", "1", "deleted"] for row in rows)
    assert r"\x1b[2Jgone\nrollout 9 \udcff [red]" in out
    assert out.isprintable() or all(c.isprintable() or c == "\n" for c in out)


def test_json_has_all_of_it(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    code, out, _ = said(capsys, run, 6, "--json")
    [found] = json.loads(out)["runs"]
    [rollout] = found["rollouts"]
    assert code == 0 and found["damaged"] == []
    assert rollout["blame"]["writes"][0] == {
        "path": "kept.py",
        "kind": "created",
        "bytes": 700,
        "version": 5,
        "turn": 1,
    }
    assert [write["path"] for write in rollout["blame"]["writes"]] == ["kept.py", HOSTILE, "a"]
    assert [(part["version"], round(part["share"], 4)) for part in rollout["shares"]] == [
        (3, 0.2997),
        (5, 0.7003),
    ]


def test_the_list_has_the_newest_first_and_ends_at_its_limit(
    capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    code, out, _ = said(capsys, run, "--limit", 5)
    lines = [line.split() for line in out.splitlines() if line]
    assert code == 0
    assert lines[1][:4] == ["rollout", "step", "reward", "status"]
    assert [line[:4] for line in lines[2:]] == [
        [index, step, "0.50", "completed"]
        for index, step in (("8", "2"), ("9", "2"), ("10", "2"), ("11", "2"), ("4", "1"))
    ]


def test_of_a_comparison_all_strategies_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for strategy, indices in (("wait", (0, 1)), ("continue", (1, 2))):
        keep(tmp_path / strategy, 0, [made(0, index) for index in indices])
    code, out, _ = said(capsys, tmp_path, 1)
    assert code == 0
    assert [line for line in out.splitlines() if ": rollout" in line] == [
        f"{tmp_path}/continue: rollout 1",
        f"{tmp_path}/wait: rollout 1",
    ]
    code, out, _ = said(capsys, tmp_path, 2)
    assert code == 0 and "wait" not in out


def test_without_such_a_rollout_those_that_there_are_are_named(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path
) -> None:
    code, out, err = said(capsys, run, 12)
    assert code == 1 and out == ""
    assert f"there is no rollout 12: {run} trained on 12, numbered 0 to 11" in err
    code, _, err = said(capsys, tmp_path / "run" / FOLDER)
    assert code == 1 and "holds no rollouts" in err and "keep_rollouts" in err
    run.rename(tmp_path / "mine")
    (tmp_path / "one").mkdir()
    (tmp_path / "mine").rename(tmp_path / "one" / "mine")
    code, _, err = said(capsys, tmp_path)
    assert code == 1 and f"there are some in {tmp_path}/one/mine: name it" in err


def test_a_damaged_file_is_said_and_the_others_told(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    newest = run / FOLDER / "000002.jsonl.zst"
    newest.write_bytes(newest.read_bytes()[:-30])
    code, out, err = said(capsys, run, 6)
    assert code == 3 and f"{run}: rollout 6" in out and f"{newest} is damaged" in err
    code, out, err = said(capsys, run, 9)
    assert code == 1 and out == "" and f"{newest} is damaged" in err and "numbered 0 to 7" in err


def test_what_a_step_measured_is_read_once_for_all_its_rollouts(
    capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    path = run / FOLDER / "000002.ratios-0.json.zst"
    path.write_bytes(b"torn")
    code, out, err = said(capsys, run, "--json")
    [found] = json.loads(out)["runs"]
    assert (code, len(found["rollouts"])) == (3, 12)
    [damage] = found["damaged"]
    assert str(path) in damage and err.count(str(path)) == 1


def test_who_wrote_what_is_not_known_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rollout = played((3, {"a": "x"}), (5, {"b": "y"}))
    rollout.forget("s1")
    rollout.fault = "more than 3 files\x1b"
    keep(tmp_path, 0, [described(rollout, version=6, index=0, step=0)])
    code, out, _ = said(capsys, tmp_path, 0)
    assert code == 0
    assert "Who wrote what is not known: snapshot s1 is not recorded, so who made s2 is unknown." in out
    assert r"more than 3 files\x1b" in out
    assert said(capsys, tmp_path)[1].splitlines()[-2].split()[-1] == "–"


def test_what_cannot_be_read_of_the_buffer_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with Journal(tmp_path / "buffer") as journal:
        journal.buffered([Group("0", (Member(b"not a pickle"),))])
    code, out, err = said(capsys, tmp_path, "--waiting")
    assert code == 3 and "no rollouts" in out and "cannot be unpacked" in err
    code, out, err = said(capsys, tmp_path, 0)
    assert code == 1 and out == "" and "cannot be unpacked" in err
    (tmp_path / "buffer" / "journal.sqlite").write_bytes(b"no journal" * 1000)
    code, out, err = said(capsys, tmp_path, "--waiting")
    assert code == 3 and "is damaged" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["/absent"], "/absent"), ([], "RUN"), (["/", "one"], "one"), (["/", "--limit", "0"], "--limit")],
)
def test_wrong_usage_is_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    code, out, err = said(capsys, *arguments)
    assert code == 2 and out == "" and expected in err


def shown(run: Path, **terminal: Any) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=60, highlight=False, **terminal)
    print_workspaces(with_index(run, 6), console)
    print_list(with_index(run, 6), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_ages_are_coloured_where_a_terminal_has_colours(run: Path) -> None:
    assert "\x1b[35m" in shown(run, color_system="standard")
    assert "\x1b[3" not in shown(run, color_system=None)
    for text in (shown(run, color_system="standard"), shown(run, color_system=None)):
        assert "\x1b[2J" not in text and "\udcff" not in text
        assert "[red]" in text


def test_what_is_kept_reaches_a_pipe_of_any_encoding(run: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "midstream.cli.main", "blame", str(run), "6"],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert r"\udcff" in done.stdout
