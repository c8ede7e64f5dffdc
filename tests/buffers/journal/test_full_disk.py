"""Wherever the disk becomes full, nothing that was written is lost, and the job can go on once there is space."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

HEAD = """
import os, shutil, sqlite3, sys
from contextlib import closing
from pathlib import Path
from midstream.buffers.journal.errors import JournalError
from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.records import Group, Member, Summary

disk, elsewhere = map(Path, sys.argv[1:])
refused = 0

def leave(free_bytes):
    disk.joinpath("ballast").unlink(missing_ok=True)
    there = os.statvfs(disk)
    disk.joinpath("ballast").write_bytes(bytes(max(0, there.f_bavail * there.f_frsize - free_bytes)))
"""
# One change after the other happens on the disk that is full at some point, and then on another that is not.
OPERATE = """
def seen(journal):
    status = journal.status()
    waiting = journal.waiting()
    groups = [(group.key, group.state, group.step, group.members) for group in status.groups]
    loaded = [journal.load(group.key) for group in status.groups]
    return groups, loaded, [w.key for w in waiting], status.trained, status.dropped, status.checkpoints, \
        journal.snapshots_in_use()

def member(n):
    return Member(bytes([n]) * 30_000, Summary(n, snapshots=(f"s{n}",)))

operations = [operation for n in range(1, 60, 5) for operation in (
    lambda journal, n=n: journal.taken([Group(str(n), (member(n), member(n + 1)))]),
    lambda journal, n=n: journal.updated(str(n), {0: member(n + 2)}),
    lambda journal, n=n: journal.buffered([Group(str(n))]),
    lambda journal, n=n: journal.buffered([Group(f"{n} too", (member(n + 3),))]),
    lambda journal, n=n: journal.handed([str(n)], n),
    lambda journal, n=n: journal.dropped([f"{n} too"], "stale") if n % 2 else None,
    lambda journal, n=n: journal.checkpoint(n),
    lambda journal, n=n: journal.trained(n),
    lambda journal, n=n: journal.roll_back(n) if n % 3 == 0 else None,
)]
for number, free_bytes in enumerate(range(0, 300_000, 13_000)):
    twin = Journal(elsewhere / str(number), clock=float)
    leave(free_bytes + 300_000)
    with Journal(disk / "journal", clock=float) as journal:
        leave(free_bytes)
        for operation in operations:
            try:
                answer = operation(journal)
            except JournalError as error:
                assert "No space left on device" in str(error), error
                refused += 1
                assert seen(journal) == seen(twin)
                leave(3_000_000)
                answer = operation(journal)
            assert answer == operation(twin)
        assert seen(journal) == seen(twin)
    leave(3_000_000)
    with Journal(disk / "journal") as journal:
        assert seen(journal) == seen(twin)
    twin.close()
    shutil.rmtree(disk / "journal")
print(refused)
"""
# A file that is damaged is copied into a new one, for which there may be no space.
REBUILD = """
with Journal(elsewhere) as journal:
    journal.buffered(Group(str(n), (Member(bytes([n]) * 50_000),)) for n in range(20))
    journal.checkpoint(1)
with closing(sqlite3.connect(elsewhere / "journal.sqlite")) as connection, connection:
    connection.execute("UPDATE members SET tokens = 9 WHERE key = '7'")
whole = [str(n) for n in range(20) if n != 7]
for free_bytes in range(0, 3_000_000, 90_000):
    shutil.copytree(elsewhere, disk / "journal")
    leave(free_bytes)
    try:
        with Journal(disk / "journal") as journal:
            journal.roll_back(1)
    except JournalError as error:
        assert "No space left on device" in str(error), error
        refused += 1
    leave(5_000_000)
    with Journal(disk / "journal") as journal:
        assert [waiting.key for waiting in journal.roll_back(1).waiting] == whole
        assert all(journal.load(key)[0].payload == bytes([int(key)]) * 50_000 for key in whole)
    shutil.rmtree(disk / "journal")
print(refused)
"""


@pytest.mark.parametrize(("code", "size"), [(OPERATE, "6m"), (REBUILD, "8m")], ids=["operate", "rebuild"])
def test_a_full_disk_is_said_and_costs_nothing_that_was_written(tmp_path: Path, code: str, size: str) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Urm", "true"], check=False).returncode:
        pytest.skip("needs unprivileged user namespaces, to mount a disk that is too small")
    disk, elsewhere = tmp_path / "disk", tmp_path / "elsewhere"
    disk.mkdir()
    elsewhere.mkdir()
    mounted = f'mount -t tmpfs -o size={size} tmpfs {disk} && mount -t tmpfs tmpfs {elsewhere} && exec "$@"'
    before = ("unshare", "-Urm", "sh", "-c", mounted, "sh")
    command = [*before, sys.executable, "-c", HEAD + code, str(disk), str(elsewhere)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5
