"""What happens beside a change: an interruption between commit and return, the copying of the log, a fork."""

import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from midstream.buffers.journal import database
from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.records import Group, Member, Summary

ROOT = Path(__file__).parents[3]
# Forks while the log is copied; each child uses SQLite, which no lock of its parent's must prevent.
FORKS = """
import os, sys
from pathlib import Path
from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.records import Group, Member
from midstream.buffers.journal.status import status_of
directory = Path(sys.argv[1])
with Journal(directory) as journal:
    journal.buffered([Group("g", (Member(b""),))])
    for number in range(30):
        for n in range(16):
            journal.updated("g", {0: Member(bytes([n]) * 300_000)})
        if not (child := os.fork()):
            os._exit(0 if status_of(directory).buffered.groups == 1 else 1)
        assert os.waitpid(child, 0)[1] == 0
"""


def test_a_checkpoint_that_is_interrupted_after_its_commit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def interrupted(connection: sqlite3.Connection) -> Iterator[None]:
        with committed(connection):
            yield
        raise KeyboardInterrupt

    committed = database.transaction
    first, second = (
        Member(payload, Summary(snapshots=(payload.decode(),))) for payload in (b"first", b"second")
    )
    with Journal(tmp_path) as journal:
        journal.buffered([Group("g", (first,))])
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(database, "transaction", interrupted)
            journal.checkpoint(1)
        journal.updated("g", {0: second})
        assert journal.snapshots_in_use() == {"first", "second"}
        journal.dropped(["g"], "stale")
        assert [waiting.key for waiting in journal.roll_back(1).waiting] == ["g"]
        assert journal.load("g") == (first,)


def test_the_log_is_copied_beside_the_job(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.buffered([Group("g", (Member(b""),))])
        written = 0
        deadline_s = time.monotonic() + 60
        # Far less than the log may grow to.
        while (tmp_path / "journal.sqlite").stat().st_size < 300_000 and time.monotonic() < deadline_s:
            journal.updated("g", {0: Member(bytes([written % 250]) * 400_000)})
            written += 1
            time.sleep(0.01)
        assert (tmp_path / "journal.sqlite").stat().st_size >= 300_000


def test_a_fork_meets_no_lock_of_the_copying(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
