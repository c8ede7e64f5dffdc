"""What snapshots, forks and rollbacks cost beside git, copies and the raw mechanism they rest on.

Every round, each way of keeping states sees the same turn of an agent, in another order: 50 files edited, 12
added, 1 deleted. The first figures are the ratios to git, round by round. Page cache warm, nothing fsynced.

    python benchmarks/snapshots.py [--json] [--quick] [--files N ...] [--rounds R]
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from folders import CopiedFolder, GitFolder, StoredFolder, compressed_bytes, copy_tree
from rawmount import RawOverlay
from result import publish, target
from sandboxes import OverlaySandbox
from trees import SyntheticTree, Turn

from midstream.envs.sandboxes.directories import write_files
from midstream.envs.sandboxes.protocol import SandboxSpec
from midstream.envs.store.removal import remove_tree

SMALL_FILES, LARGE_FILES = 5_000, 100_000
# 50 MB in 5,000 files, 200 MB in 100,000.
SMALL_FILE_BYTES, LARGE_FILE_BYTES = 10_000, 2_000
# Whole copies take seconds: they are made in every so manieth round.
WHOLE_EVERY = 4
# Of each kind, a round.
FORKS = 3

FREEZE_MS, FORK_MOUNT_MS, FORK_MS = 3.0, 1.5, 15.0
SMALL_STORE_MS, LARGE_STORE_MS = 30.0, 250.0
TOP_GIT_RATIO, TOP_DISK_RATIO = 1.0, 2.0

Milliseconds = dict[tuple[str, str], list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a minute's version: 5,000 files, few rounds")
    parser.add_argument("--files", type=int, nargs="+", default=None, help="sizes of the trees")
    parser.add_argument("--rounds", type=int, default=None, help="rounds at each size (default 16, quick 6)")
    options = parser.parse_args()
    sizes = options.files or ([SMALL_FILES] if options.quick else [SMALL_FILES, LARGE_FILES])
    rounds = options.rounds or (6 if options.quick else 16)
    ratios: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for files in sizes:
        # Removed also on Ctrl-C, which cancels the run and lets it close what it opened.
        with tempfile.TemporaryDirectory(prefix="midstream-snapshots-") as scratch:
            measured = asyncio.run(Measurement(Path(scratch), files, rounds).run())
        ratios += measured.ratios()
        times += measured.times()
        rows += measured.rows()
    publish(ratios + times, rows, as_json=options.json)


class Measurement:
    """All ways of keeping one tree, and what they took."""

    def __init__(self, scratch: Path, files: int, rounds: int) -> None:
        self._scratch = scratch
        self._files = files
        self._rounds = rounds
        self._ms: Milliseconds = {}
        # Bytes a turn.
        self._disk: dict[str, float] = {}

    async def run(self) -> "Measurement":
        small = self._files <= SMALL_FILES
        tree = SyntheticTree(self._files, SMALL_FILE_BYTES if small else LARGE_FILE_BYTES)
        folder = self._scratch / "tree"
        write_files(folder, SandboxSpec(files=tree.texts))
        for name in ("stored", "git", "copied"):
            copy_tree(folder, self._scratch / name)
        self._stored = StoredFolder(self._scratch / "stored", self._scratch / "store")
        self._git = GitFolder(self._scratch / "git", self._scratch / "git-dir")
        self._copied = CopiedFolder(self._scratch / "copied", self._scratch / "copy")
        self._sandbox = await OverlaySandbox.start(self._scratch / "overlay", tree.texts)
        try:
            self._raw = RawOverlay(folder, _made(self._scratch / "raw"))
            try:
                await self._play(tree)
            finally:
                self._raw.close()
        finally:
            await self._sandbox.close()
        return self

    async def _play(self, tree: SyntheticTree) -> None:
        """Two rounds to warm up, which count for nothing, then those that do."""
        ways = [self._store_round, self._git_round, self._copy_round, self._overlay_round, self._raw_round]
        for number in range(-2, self._rounds):
            if number == 0:
                self._ms.clear()
                before = {"store": self._stored.disk_bytes(), "git": self._git.disk_bytes(), "zstd": 0}
                compressed = 0
            turn = tree.next_turn()
            first = number % len(ways)
            for way in ways[first:] + ways[:first]:
                await way(number, turn)
            if number >= 0:
                compressed += compressed_bytes(self._stored.folder, turn)
        after = {"store": self._stored.disk_bytes(), "git": self._git.disk_bytes(), "zstd": compressed}
        self._disk = {name: (after[name] - before[name]) / self._rounds for name in after}

    async def _store_round(self, number: int, turn: Turn) -> None:
        self._folder_round("store", self._stored, number, turn)

    async def _git_round(self, number: int, turn: Turn) -> None:
        self._folder_round("git", self._git, number, turn)

    def _folder_round(self, way: str, kept: StoredFolder | GitFolder, number: int, turn: Turn) -> None:
        turn.apply(kept.folder)
        self._timed(way, "snapshot", kept.snapshot)
        self._timed(way, "diff", kept.diff)
        self._timed(way, "roll back one turn in place", kept.roll_back)
        kept.roll_forward()
        if number % WHOLE_EVERY == 0:
            self._restored_whole(way, kept.restore_whole)

    async def _copy_round(self, number: int, turn: Turn) -> None:
        turn.apply(self._copied.folder)
        if number % WHOLE_EVERY == 0:
            self._timed("cp -a", "snapshot", self._copied.snapshot)
            self._restored_whole("cp -a", self._copied.restore_whole)
            self._copied.drop()

    def _restored_whole(self, way: str, restore: Callable[[Path], None]) -> None:
        into = self._scratch / "whole"
        self._timed(way, "restore whole", lambda: restore(into))
        remove_tree(into)

    async def _overlay_round(self, number: int, turn: Turn) -> None:
        sandbox = self._sandbox
        await sandbox.apply(turn)
        if number % 2 == 0:
            frozen_s, harvested_s = await sandbox.freeze_and_harvest()
            self._add("overlay", "snapshot: freeze", frozen_s)
            self._add("overlay", "snapshot: harvest", harvested_s)
        else:
            self._add("overlay", "snapshot: whole", await sandbox.snapshot())
        # One kind after the other: the kernel takes a sandbox's namespaces apart for a while after its end.
        for _ in range(FORKS):
            self._add("overlay", "fork: mount", await sandbox.fork_mount())
        for _ in range(FORKS):
            self._add("overlay", "fork: isolated process", await sandbox.fork())
        if number % WHOLE_EVERY == 0:
            cold = self._scratch / "cold"
            self._add("overlay", "cold restore over a known base", await sandbox.restore_cold(cold))
            remove_tree(cold)

    async def _raw_round(self, number: int, turn: Turn) -> None:
        if not self._raw.missing:
            self._raw.apply(turn)
            self._add("raw overlay", "snapshot", self._raw.snapshot())
            self._add("raw overlay", "fork", self._raw.fork())

    def _timed(self, way: str, what: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        work()
        self._add(way, what, time.perf_counter() - began)

    def _add(self, way: str, what: str, seconds: float) -> None:
        self._ms.setdefault((way, what), []).append(seconds * 1000)

    def ratios(self) -> list[dict[str, Any]]:
        """Of our store to git, round by round, and of its growth to the changed files, compressed."""
        found = []
        for what in ("snapshot", "roll back one turn in place"):
            pairs = zip(self._ms["store", what], self._ms["git", what], strict=True)
            name = self._named(f"store / git: {what}")
            found.append(target(name, [ours / gits for ours, gits in pairs], "ratio", "<=", TOP_GIT_RATIO))
        disk = self._disk["store"] / self._disk["zstd"]
        name = self._named("store: disk a snapshot / changed files as one zstd stream")
        return [*found, target(name, [disk], "ratio", "<=", TOP_DISK_RATIO)]

    def times(self) -> list[dict[str, Any]]:
        store_ms = SMALL_STORE_MS if self._files <= SMALL_FILES else LARGE_STORE_MS
        bounds = {
            ("overlay", "snapshot: freeze"): FREEZE_MS,
            ("overlay", "fork: mount"): FORK_MOUNT_MS,
            ("overlay", "fork: isolated process"): FORK_MS,
            ("store", "snapshot"): store_ms,
            ("store", "roll back one turn in place"): store_ms,
        }
        return [
            target(self._named(": ".join(key)), self._ms[key], "ms", "<=", bound)
            for key, bound in bounds.items()
        ]

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [
            {
                "files": self._files,
                "way": way,
                "what": what,
                "ms": round(statistics.median(ms), 3),
                "min": round(min(ms), 3),
                "max": round(max(ms), 3),
                "runs": len(ms),
            }
            for (way, what), ms in self._ms.items()
        ]
        if self._raw.missing:
            rows.append({"files": self._files, "way": "raw overlay", "missing": self._raw.missing})
        for way, growth in self._disk.items():
            rows.append({"files": self._files, "way": way, "what": "bytes a turn", "bytes": round(growth)})
        return rows

    def _named(self, what: str) -> str:
        return f"{what}, {self._files:,} files"


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
