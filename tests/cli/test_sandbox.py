"""`midstream sandbox` as a user meets it."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from midstream.cli.main import main
from midstream.envs.ownership import claims
from midstream.envs.ownership.owners import this_process

GONE = replace(this_process("old-job"), start=this_process().start - 1)


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    temp = tmp_path / "temp"
    temp.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temp))
    return temp


@pytest.fixture
def root(tmp_path: Path, temp: Path) -> Iterator[Path]:
    """Two sandboxes, of a job that lives, with a process in it, and of one that does not."""
    root = tmp_path / "sandboxes"
    for name, owner in (("lives", this_process("new-job")), ("left", GONE)):
        (root).mkdir(exist_ok=True)
        claims.claim(root / name, owner.label)
        (root / name).mkdir()
        (root / name / "file").write_bytes(b"x" * 100_000)
    with subprocess.Popen(["bash", "-c", "sleep 60; :"], cwd=root / "lives", start_new_session=True) as shell:
        yield root
        os.killpg(shell.pid, 9)


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["sandbox", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def listed(capsys: pytest.CaptureFixture[str], root: Path) -> dict[str, Any]:
    code, out, _ = said(capsys, "list", "--root", root, "--json")
    assert code == 0
    return {Path(each["path"]).name: each for each in json.loads(out)["sandboxes"]}


def test_list_shows_owners_states_sizes_and_processes(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    found = listed(capsys, root)
    lives, left = found["lives"], found["left"]
    assert (lives["state"], left["state"]) == ("alive", "gone")
    assert lives["pid"] == os.getpid() and lives["job"] == "new-job" and left["owner"] == GONE.label
    assert 100_000 <= lives["bytes"] < 200_000 and not lives["bytes_are_a_lower_bound"]
    assert lives["processes"] == 2 and left["processes"] == 0
    assert 0 <= lives["age_s"] < 600


def test_list_is_a_table_for_people(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    code, out, err = said(capsys, "list", "--root", root)
    header, *rows = out.splitlines()
    assert code == 0 and header.split() == [
        "what",
        "state",
        "owner",
        "job",
        "age",
        "size",
        "processes",
        "path",
    ]
    [row] = [row for row in rows if row.endswith(str(root / "left"))]
    assert row.split()[:2] == ["sandbox", "gone"] and "old-job" in row
    assert "1 of 2 have lost their owner: `midstream sandbox prune` removes them" in err


def test_list_finds_sandboxes_in_temporary_folders(capsys: pytest.CaptureFixture[str], temp: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix=claims.temp_prefix()))
    claims.claim(folder / "inside", this_process().label)
    (folder / "inside").mkdir()
    (temp / "midstream-odd\x1b[31m\udcff").mkdir()
    code, out, _ = said(capsys, "list")
    assert code == 0 and f"{folder}/inside" in out
    assert "\x1b" not in out and "midstream-odd\\x1b[31m\\udcff" in out


def test_with_nothing_there_it_says_so(capsys: pytest.CaptureFixture[str], temp: Path) -> None:
    assert said(capsys, "list") == (0, "no sandboxes\n", "")
    assert said(capsys, "list", "--json") == (0, '{"sandboxes": []}\n', "")
    code, out, _ = said(capsys, "prune")
    assert code == 0 and out.splitlines()[-1].startswith("removed ")


def test_prune_removes_what_nobody_owns_and_says_what(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    code, out, _ = said(capsys, "prune", "--root", root, "--dry-run")
    assert code == 0 and f"would remove {root}/left\n" in out and "would remove 1 sandbox" in out
    assert set(listed(capsys, root)) == {"lives", "left"}
    code, out, _ = said(capsys, "prune", "--root", root)
    assert code == 0 and f"removed {root}/left\n" in out and "removed 1 sandbox" in out
    assert set(listed(capsys, root)) == {"lives"}


def test_prune_as_json(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    code, out, _ = said(capsys, "prune", "--root", root, "--json")
    answer = json.loads(out)
    assert code == 0 and answer["sandboxes"] == 1 and f"{root}/left" in answer["removed"]
    assert not answer["dry_run"] and answer["failed"] == []


def test_what_cannot_be_removed_is_said_and_degraded(
    capsys: pytest.CaptureFixture[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr("midstream.envs.pool.reaper.remove_tree", refuse)
    code, out, err = said(capsys, "prune", "--root", root)
    assert code == 3 and f"removed {root}" not in out
    assert f"could not remove {root}/left: Operation not permitted" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["list", "--root", "/absent"], "/absent"), (["prune", "--older"], "--older"), (["lst"], "lst")],
)
def test_wrong_usage_is_named(
    capsys: pytest.CaptureFixture[str], temp: Path, arguments: list[str], expected: str
) -> None:
    code, out, err = said(capsys, *arguments)
    assert code == 2 and out == "" and expected in err


@pytest.mark.parametrize("command", ["list", "prune"])
def test_help_has_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = said(capsys, command, "--help")
    assert code == 0 and f"midstream sandbox {command} " in out and "--root" in out and "--json" in out
