"""`midstream status` as a user meets it, on real journals and snapshots."""

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.records import Group, Member, Summary
from midstream.cli.main import main
from midstream.envs.store.store import SnapshotStore

ROOT = Path(__file__).parents[2]
NOW_S = 1_000_000.0

# A job that has a journal open and writes to it without a pause, until its input ends.
WRITE = """
import sys, threading
from pathlib import Path
from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.records import Group, Member
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
with Journal(Path(sys.argv[1])) as journal:
    number = 0
    while not ended.is_set():
        keys = [f"{number}-{n}" for n in range(4)]
        journal.taken(Group(key, (Member(bytes(20_000)), Member(b"x"))) for key in keys)
        journal.buffered(Group(key) for key in keys)
        if number == 5:
            print("writes", flush=True)
        if number >= 5:
            journal.handed([f"{number - 5}-{n}" for n in range(4)], number)
            journal.trained(number)
            journal.checkpoint(number)
        number += 1
"""


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["status", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[dict[str, Any]]]:
    code, out, _ = said(capsys, *arguments, "--json")
    return code, json.loads(out)["runs"]


def contents(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose job has ended: groups in all states, and their snapshots in its store."""
    run_dir = tmp_path / "run"
    tree = tmp_path / "tree"
    tree.mkdir()
    store = SnapshotStore(run_dir / "snapshots")
    ids = []
    for number in range(3):
        (tree / "file").write_text(str(number))
        ids.append(store.put(tree).id)
    now_s = [NOW_S]
    with Journal(run_dir / "buffer", clock=lambda: now_s[0]) as journal:

        def take(key: str, *summaries: Summary) -> None:
            journal.taken([Group(key, tuple(Member(b"x" * 600, summary) for summary in summaries))])

        take("waits", Summary(100, 2, 3, 5, (ids[0],)), Summary(300, 4, 4, 5, (ids[1],)))
        journal.buffered([Group("waits")])
        now_s[0] += 60
        take("waits too", Summary(2000, 9, 6, 6, (ids[1],)))
        journal.buffered([Group("waits too")])
        take("flies", Summary())
        take("trains", Summary(7, 1, 8, 9, (ids[2],)))
        take("trained", Summary(5, 1))
        take("stale", Summary(1, 1))
        take("stuck", Summary(2, 1))
        journal.handed(["trained"], 1)
        journal.checkpoint(1)
        journal.trained(1)
        journal.handed(["trains"], 2)
        journal.dropped(["stale"], "policy")
        journal.dropped(["stuck"], "deadline\x1b")
        journal.checkpoint(2)
    return run_dir


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[Path]:
    """The run directory of a job that writes to its journal now."""
    run_dir = tmp_path / "busy" / "continue"
    command = [sys.executable, "-c", WRITE, str(run_dir / "buffer")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdin is not None
        assert job.stdout.readline() == "writes\n"
        (run_dir / "pid").write_text(str(job.pid))
        yield run_dir
        job.stdin.close()
        assert job.wait() == 0


def test_the_buffer_is_told_in_numbers(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    code, [found] = told(capsys, run)
    assert code == 0 and found["run_dir"] == str(run) and found["held_by"] is None
    assert found["waiting"] == {
        "groups": 2,
        "rollouts": 3,
        "tokens": 2400,
        "turns": 15,
        "payload_bytes": 1800,
    }
    assert found["in_flight"]["groups"] == 1 and found["in_training"]["tokens"] == 7
    assert found["trained"]["tokens"] == 5 and found["dropped"]["groups"] == 2
    assert found["dropped_by_reason"]["policy"]["tokens"] == 1
    assert found["waiting_tokens"] == {"median": 300, "most": 2000}
    assert found["waiting_turns"] == {"median": 4, "most": 9}
    assert found["waiting_versions"] == [3, 6] and found["newest_version"] == 9
    assert found["waiting_lag_versions"] == {"median": 4.5, "most": 6}
    age_s = found["waiting_age_s"]
    assert age_s["most"] - age_s["median"] == pytest.approx(30) and age_s["most"] > 60
    assert found["checkpoints"] == [1, 2]
    assert len(found["snapshots"]["waiting"]) == 2 and found["snapshots"]["in_use"] == 3
    assert found["snapshots"]["missing"] == []
    assert found["journal_bytes"] > 1800 and found["snapshots_bytes"] > 0
    assert found["damaged_rows"] == 0 and found["damaged_groups"] == []
    group = found["groups"][0]
    assert (group["key"], group["state"]) == ("waits", "waiting")
    assert (group["rollouts"], group["lag_versions"]) == (2, 6)
    assert [each["step"] for each in found["groups"]] == [None, None, None, 2]


def test_the_buffer_is_told_to_people(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    code, out, err = said(capsys, run)
    lines = {line.strip().partition("  ")[0]: line.split() for line in out.splitlines()}
    assert code == 0 and err == ""
    assert out.startswith(f"{run}: no job has it open\n")
    assert lines["waiting"] == ["waiting", "2", "3", "2,400", "15", "1.8", "KiB"]
    assert lines["dropped"][1] == "2" and lines["policy"][1] == "1"
    assert "deadline\\x1b" in lines and "\x1b" not in out
    assert "median 300, most 2,000 per rollout" in out
    assert "3 to 6, newest seen 9" in out and "median 4, most 6 per group" in out
    assert "2 of what waits, 3 in use, all in the store" in out
    assert lines["checkpoints"] == ["checkpoints", "1,", "2"]
    assert "damaged" not in out


def test_groups_and_snapshots_are_listed_on_request(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    _, [found] = told(capsys, run)
    code, out, _ = said(capsys, run, "--groups", "--snapshots")
    assert code == 0
    [trains] = [line for line in out.splitlines() if line.startswith("trains ")]
    assert trains.split()[1:8] == ["in", "training", "2", "1", "7", "1", "8-9"]
    assert set(found["snapshots"]["waiting"]) < set(out.split())


def test_nothing_is_changed(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    before = contents(run)
    assert said(capsys, run, "--groups")[0] == 0
    assert contents(run) == before


def test_the_journal_of_a_killed_job_is_read_with_its_log(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with Journal(tmp_path / "ran") as journal:
        journal.buffered([Group("g", (Member(b"x"),))])
        shutil.copytree(tmp_path / "ran", tmp_path / "killed" / "buffer")
    before = contents(tmp_path / "killed")
    code, [found] = told(capsys, tmp_path / "killed")
    assert code == 0 and found["waiting"]["groups"] == 1 and found["held_by"] is None
    # The index of the log belongs to whoever reads it.
    assert {path for path, was in contents(tmp_path / "killed").items() if before[path] != was} <= {
        str(tmp_path / "killed" / "buffer" / "journal.sqlite-shm")
    }


def test_beside_a_job_that_writes_every_look_is_whole(
    capsys: pytest.CaptureFixture[str], writing: Path
) -> None:
    pid = int((writing / "pid").read_text())
    for _ in range(30):
        code, [found] = told(capsys, writing)
        assert code == 0 and found["held_by"] == {"pid": pid, "host": socket.gethostname()}
        # Four groups of two rollouts change hands in each transaction.
        for state in ("waiting", "in_flight", "in_training", "trained"):
            assert found[state]["groups"] % 4 == 0 and found[state]["rollouts"] == 2 * found[state]["groups"]
        assert 0 < found["waiting"]["groups"] + found["in_flight"]["groups"] <= 28
        assert [group["key"] for group in found["groups"]] == sorted(
            (group["key"] for group in found["groups"]),
            key=lambda key: [int(part) for part in key.split("-")],
        )


def test_a_job_can_begin_while_others_look(tmp_path: Path) -> None:
    Journal(tmp_path / "buffer").close()
    code = (
        "import sys; from pathlib import Path; from midstream.buffers.journal.lock import holder_of\n"
        "print('looks', flush=True)\nwhile True: holder_of(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "buffer")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as looking:
        assert looking.stdout is not None and looking.stdout.readline()
        for _ in range(30):
            Journal(tmp_path / "buffer").close()
        looking.kill()


def test_strategies_stand_side_by_side(capsys: pytest.CaptureFixture[str], run: Path, writing: Path) -> None:
    shutil.copytree(run, writing.parent / "rewind")
    (writing.parent / "wait").mkdir()
    code, out, _ = said(capsys, writing.parent)
    header, busy, ended = out.splitlines()[:3]
    assert code == 0 and header.split()[:4] == ["waiting", "in", "flight", "in"]
    assert busy.split()[0] == "continue" and busy.endswith(f"@{socket.gethostname()}")
    assert ended.split()[:6] == ["rewind", "2", "1", "1", "1", "2"] and ended.endswith("-")
    assert f"\n{writing}: open in process " in out and f"\n{writing.parent / 'rewind'}: no job" in out
    _, runs = told(capsys, writing.parent)
    assert [Path(each["run_dir"]).name for each in runs] == ["continue", "rewind"]


def test_a_snapshot_that_is_missing_is_named_and_degraded(
    capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    _, [found] = told(capsys, run)
    gone = found["snapshots"]["waiting"][0]
    SnapshotStore(run / "snapshots").delete([gone])
    code, out, _ = said(capsys, run, "--snapshots")
    assert code == 3 and f"1 NOT IN {run / 'snapshots'} ({gone})" in out and f"{gone}  missing" in out
    code, [found] = told(capsys, run)
    assert code == 3 and found["snapshots"]["missing"] == [gone]


def test_contents_that_somebody_removed_are_said_and_degraded(
    capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    packs = sorted((run / "snapshots" / "packs").glob("*.pack"))
    packs[0].unlink()
    code, out, _ = said(capsys, run)
    assert code == 3
    assert "1 files of contents are GONE from" in out
    code, [found] = told(capsys, run)
    assert (code, found["snapshots"]["lost_packs"]) == (3, [packs[0].stem])


def test_a_store_elsewhere_is_named(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    elsewhere = run.parent / "elsewhere"
    (run / "snapshots").rename(elsewhere)
    code, out, _ = said(capsys, run)
    assert code == 0 and f"no store at {run / 'snapshots'}: name it with --store" in out
    assert told(capsys, run)[1][0]["snapshots"]["missing"] is None
    assert "all in the store" in said(capsys, run, "--store", elsewhere)[1]


def test_damaged_rows_are_counted_and_degraded(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    with closing(sqlite3.connect(run / "buffer" / "journal.sqlite")) as connection, connection:
        connection.execute("UPDATE members SET tokens = 9 WHERE key = 'waits' AND position = 1")
    code, out, _ = said(capsys, run)
    assert code == 3 and "1 rows, groups that are not whole: waits; start the job again" in out
    code, [found] = told(capsys, run)
    assert code == 3 and found["damaged_rows"] == 1 and found["damaged_groups"] == ["waits"]
    assert found["waiting"]["rollouts"] == 2


def test_a_journal_that_cannot_be_read_at_all_fails(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    path = run / "buffer" / "journal.sqlite"
    path.write_bytes(bytes(1000) + path.read_bytes()[1000:])
    code, out, err = said(capsys, run)
    assert code == 1 and out == "" and f"{path} is damaged" in err and "start it again" in err


def test_a_journal_of_another_version_fails(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    with closing(sqlite3.connect(run / "buffer" / "journal.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 7")
        connection.execute("PRAGMA application_id = 7")
    code, _, err = said(capsys, run)
    assert code == 1 and "format 7" in err and "go on with the version that wrote it" in err


def test_a_journal_that_may_not_be_read_fails(run: Path) -> None:
    (run / "buffer" / "journal.sqlite").chmod(0)
    command = [sys.executable, "-m", "midstream.cli.main", "status", str(run)]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may read everything, and there is no setpriv to take that from it")
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Permission denied" in done.stderr and "look as the user of the job" in done.stderr


def test_where_no_journal_is_those_below_are_named(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    code, out, err = said(capsys, tmp_path / "empty")
    assert code == 1 and out == "" and "its job has not begun, or midstream.run_dir is not set" in err
    (tmp_path / "many" / "runs").mkdir(parents=True)
    run.rename(tmp_path / "many" / "runs" / "mine")
    code, _, err = said(capsys, tmp_path)
    assert code == 1 and f"there is one in {tmp_path}/many/runs/mine: name it" in err
    # The folder of the journal itself will do.
    assert told(capsys, tmp_path / "many" / "runs" / "mine" / "buffer")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "expected"), [(["/absent"], "/absent"), ([], "RUN"), (["/", "--watch", "0"], "--watch")]
)
def test_wrong_usage_is_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    code, out, err = said(capsys, *arguments)
    assert code == 2 and out == "" and expected in err


def test_watch_prints_again_until_it_is_interrupted(run: Path) -> None:
    command = [sys.executable, "-m", "midstream.cli.main", "status", str(run), "--json", "--watch", "0.1"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watch:
        assert watch.stdout is not None
        lines = [watch.stdout.readline() for _ in range(3)]
        watch.terminate()
        assert watch.wait() == 130
    assert all(json.loads(line)["runs"][0]["waiting"]["groups"] == 2 for line in lines)
