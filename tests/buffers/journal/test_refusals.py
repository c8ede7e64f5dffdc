"""What a journal refuses, and what it then says to do."""

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from midstream.buffers.journal.errors import JournalError, OwnershipError
from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.records import Group, Member
from midstream.buffers.journal.status import status_of

ROOT = Path(__file__).parents[3]
MEMBERS = (Member(b"record"),)

# What a job of its own does with a journal: opens it, says so, and keeps it until its input ends.
HOLD = """
import sys
from pathlib import Path
from midstream.buffers.journal.journal import Journal
with Journal(Path(sys.argv[1])):
    print("open", flush=True)
    sys.stdin.read()
"""


def run_python(
    code: str, *arguments: object, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_second_job_is_refused_and_told_who_has_the_directory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "open\n"
        with pytest.raises(JournalError, match=f"in use by process {holder.pid} on .*set another run_dir"):
            Journal(tmp_path)
        assert status_of(tmp_path).buffered.groups == 0
        holder.kill()
    Journal(tmp_path).close()


def test_a_second_journal_of_one_process_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(JournalError, match=f"in use by process {os.getpid()}"):
        Journal(tmp_path)
    Journal(tmp_path).close()


def test_a_forked_child_neither_keeps_the_lock_nor_uses_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    ready, told = os.pipe()
    go_on, end = os.pipe()
    if not (child := os.fork()):
        try:
            journal.taken([Group("g", MEMBERS)])
        except JournalError as error:
            os.write(told, str(error).encode())
        os.close(end)
        os.read(go_on, 1)
        os._exit(0)
    message = os.read(ready, 1000).decode()
    journal.close()
    Journal(tmp_path).close()
    os.write(end, b".")
    os.waitpid(child, 0)
    for fd in (ready, told, go_on, end):
        os.close(fd)
    assert "opened by another process" in message


def test_another_version_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 7")
        connection.execute("PRAGMA application_id = 7")
    for opened in (Journal, status_of):
        with pytest.raises(JournalError, match=r"format 7, .* reads 2: .*run_dir"):
            opened(tmp_path)


def test_a_read_only_directory_is_refused_and_its_status_can_be_read(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Urm", "true"], check=False).returncode:
        pytest.skip("needs unprivileged user namespaces, to mount a directory read-only")
    with Journal(tmp_path) as journal:
        journal.buffered([Group("g", MEMBERS)])
        killed = tmp_path / "killed"
        killed.mkdir()
        for suffix in ("", "-wal", "-shm"):
            shutil.copy(tmp_path / f"journal.sqlite{suffix}", killed)
    code = (
        "import sys; from pathlib import Path\n"
        "from midstream.buffers.journal import errors, journal, status\n"
        "for directory in map(Path, sys.argv[1:]):\n"
        "    print(status.status_of(directory).buffered.groups)\n"
        "    try: journal.Journal(directory)\n"
        "    except errors.JournalError as error: print(error)\n"
    )
    mounted = f'mount --bind {tmp_path} {tmp_path} && mount -o remount,bind,ro {tmp_path} && exec "$@"'
    done = run_python(code, tmp_path, killed, before=("unshare", "-Urm", "sh", "-c", mounted, "sh"))
    assert done.returncode == 0, done.stderr
    closed_count, closed_error, killed_count, killed_error = done.stdout.splitlines()
    assert (closed_count, killed_count) == ("1", "1")
    for error in (closed_error, killed_error):
        assert "Read-only file system" in error and "set run_dir to a directory that" in error


def test_a_status_where_no_journal_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="does not exist: .* is not the buffer of a run"):
        status_of(tmp_path)


def test_owners_are_kept_apart(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.taken([Group("g", MEMBERS)])
        with pytest.raises(
            OwnershipError, match="'g' is to be taken, but is taken: each group has one owner"
        ):
            journal.taken([Group("g", MEMBERS)])
        journal.handed(["g"], 3)
        with pytest.raises(OwnershipError, match="'g' is to be handed, but is handed to step 3"):
            journal.handed(["g"], 4)
        with pytest.raises(OwnershipError, match="while it is taken or buffered, but is handed"):
            journal.updated("g", {0: MEMBERS[0]})
        journal.trained(3)
        with pytest.raises(OwnershipError, match="does not have it: it was trained or dropped"):
            journal.dropped(["g"], "stale")
        with pytest.raises(OwnershipError, match="'h' is new to the journal: give its members, too"):
            journal.taken([Group("h")])
        with pytest.raises(ValueError, match="keep_checkpoints: got 1; set it to 2 or more"):
            Journal(tmp_path, keep_checkpoints=1)


def test_a_closed_journal_says_so(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="is closed"):
        journal.waiting()


def test_threads_share_a_journal(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:

        def play(name: int) -> None:
            for number in range(20):
                journal.taken([Group(f"{name}-{number}", MEMBERS)])
                journal.buffered([Group(f"{name}-{number}")])

        threads = [threading.Thread(target=play, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(journal.waiting()) == 80
