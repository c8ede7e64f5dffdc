"""Ways to keep the states of a plain folder: our store, git's command line, and copies."""

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Mapping
from pathlib import Path

import zstandard
from trees import Turn

from midstream.envs.protocol import Snapshot
from midstream.envs.store.store import Baseline, SnapshotStore

ZSTD_LEVEL = 3


class StoredFolder:
    """A folder whose states go into a snapshot store."""

    def __init__(self, folder: Path, store_dir: Path) -> None:
        self.folder = folder
        self.store = SnapshotStore(store_dir)
        self.baseline = Baseline()
        self.last = self.store.put(folder, baseline=self.baseline)
        self.before = self.last

    def snapshot(self) -> None:
        self.before, self.last = self.last, self.store.put(self.folder, self.last, baseline=self.baseline)

    def roll_back(self) -> None:
        """From the last snapshot to the one before, in place."""
        self._restore_in_place(self.before)

    def roll_forward(self) -> None:
        self._restore_in_place(self.last)

    def restore_whole(self, into: Path) -> None:
        _check(self.last, self.store.restore(self.last, into))

    def diff(self) -> int:
        return len(self.store.diff(self.before, self.last))

    def disk_bytes(self) -> int:
        """All of the store on disk; the database's log, whose size does not grow with it, is written back first."""
        with sqlite3.connect(self.store.path / "index.sqlite") as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        return sum(path.stat().st_size for path in self.store.path.rglob("*") if path.is_file())

    def _restore_in_place(self, snapshot: Snapshot) -> None:
        _check(snapshot, self.store.restore_in_place(snapshot, self.folder, baseline=self.baseline))


class GitFolder:
    """A folder whose states are commits in a git directory beside it, through an index of its own.

    As installed, but for what would run beside it at some time of its own: no automatic collection.
    """

    def __init__(self, folder: Path, git_dir: Path) -> None:
        self.folder = folder
        self._git_dir = git_dir
        who = {
            f"GIT_{role}_{what}": "benchmark"
            for role in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        self._environment: Mapping[str, str] = {
            "PATH": os.environ["PATH"],
            "GIT_INDEX_FILE": str(git_dir / "snapshot-index"),
            "GIT_CONFIG_NOSYSTEM": "1",
            "HOME": str(git_dir),
            **who,
        }
        git_dir.mkdir()
        self._git("init", "--quiet")
        self._git("config", "gc.auto", "0")
        self.last = ""
        self.before = ""
        self.snapshot()
        self._git("gc", "--quiet")

    def snapshot(self) -> None:
        self._git("add", "-A")
        parent = ("-p", self.last) if self.last else ()
        commit = self._git("commit-tree", self._git("write-tree"), *parent, "-m", "snapshot")
        self.before, self.last = self.last, commit

    def roll_back(self) -> None:
        """From the last snapshot to the one before, in place."""
        self._git("read-tree", "--reset", "-u", self.before)

    def roll_forward(self) -> None:
        self._git("read-tree", "--reset", "-u", self.last)

    def restore_whole(self, into: Path) -> None:
        into.mkdir()
        index = {"GIT_INDEX_FILE": str(into.parent / "whole-index")}
        self._git("read-tree", self.last, more=index)
        self._git("checkout-index", "--all", f"--prefix={into}/", more=index)

    def diff(self) -> int:
        return len(self._git("diff-tree", "-r", "--name-status", self.before, self.last).splitlines())

    def disk_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._git_dir.rglob("*") if path.is_file())

    def _git(self, *arguments: str, more: Mapping[str, str] | None = None) -> str:
        command = ["git", f"--git-dir={self._git_dir}", f"--work-tree={self.folder}", *arguments]
        environment = {**self._environment, **(more or {})}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout.strip()


class CopiedFolder:
    """A folder whose states are copies of it; the last one alone is kept."""

    def __init__(self, folder: Path, copy: Path) -> None:
        self.folder = folder
        self._copy = copy

    def snapshot(self) -> None:
        copy_tree(self.folder, self._copy)

    def restore_whole(self, into: Path) -> None:
        copy_tree(self._copy, into)

    def drop(self) -> None:
        shutil.rmtree(self._copy)


def copy_tree(source: Path, target: Path) -> None:
    """`cp -a` into a folder that is not there yet."""
    subprocess.run(["cp", "-a", "--", source, target], check=True)


def compressed_bytes(folder: Path, turn: Turn) -> int:
    """What the changed files take as one zstd stream: below that no store of whole files can get."""
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    return len(compressor.compress(b"".join((folder / path).read_bytes() for path in turn.written())))


def _check(snapshot: Snapshot, digest: str) -> None:
    if digest != snapshot.digest:
        raise RuntimeError(f"the restored folder has digest {digest}, its snapshot {snapshot.digest}")
