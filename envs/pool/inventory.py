"""What there is of sandboxes and temporary folders on this host, whoever owns it."""

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from midstream.envs.ownership import claims
from midstream.envs.ownership.owners import Owner
from midstream.envs.pool.instances import layer_instances
from midstream.envs.sandboxes.marks import place_of

# A tree with more entries than this is measured no further.
MOST_ENTRIES = 200_000
BLOCK_BYTES = 512

Kind = Literal["sandbox", "layers", "folder"]
Noted = tuple[Kind, Path, Owner | None, claims.OwnerState]


@dataclass(frozen=True)
class Found:
    """A sandbox's directory, the layers that those of one backend share, or a temporary folder.

    `bytes` is what it takes on disk, a lower bound where `is_more`; `processes` were started for it, have it in
    their command line or work in it, or are below one that does. `age_s` counts from the last change of the
    directory itself.
    """

    kind: Kind
    path: Path
    owner: Owner | None
    state: claims.OwnerState
    age_s: float
    bytes: int
    is_more: bool
    processes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "path": str(self.path),
            "owner": self.owner.label if self.owner is not None else None,
            "pid": self.owner.pid if self.owner is not None else None,
            "host": self.owner.host if self.owner is not None else None,
            "job": self.owner.job if self.owner is not None else None,
            "state": self.state,
            "age_s": round(self.age_s, 1),
            "bytes": self.bytes,
            "bytes_are_a_lower_bound": self.is_more,
            "processes": self.processes,
        }


def inventory(roots: Iterable[Path], temp: Path | None) -> list[Found]:
    """All claimed sandboxes of the roots, and the temporary folders with the sandboxes in them."""
    noted: list[Noted] = []
    for root in roots:
        noted += _sandboxes(root)
    for folder, owner, state in claims.temp_directories(temp) if temp is not None else ():
        noted.append(("folder", folder, owner, state))
        noted += _sandboxes(folder)
    counts = _processes_by_path([path for _, path, _, _ in noted])
    now = time.time()
    found = []
    for kind, path, owner, state in noted:
        try:
            age_s = max(0.0, now - path.lstat().st_mtime)
        except OSError:
            continue  # It has gone meanwhile, or is not made yet.
        found.append(Found(kind, path, owner, state, age_s, *_bytes_below(path), counts[path]))
    return found


def _sandboxes(root: Path) -> list[Noted]:
    sandboxes: list[Noted] = [("sandbox", it.directory, it.owner, it.state) for it in claims.claimed(root)]
    return sandboxes + [("layers", it.directory, None, it.state) for it in layer_instances(root)]


def _bytes_below(directory: Path) -> tuple[int, bool]:
    """What the tree takes on disk, and whether that is only a part of it."""
    total, entries, complete = 0, 0, True
    pending = [str(directory)]
    while pending:
        try:
            with os.scandir(pending.pop()) as nodes:
                for node in nodes:
                    entries += 1
                    total += node.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
                    if node.is_dir(follow_symlinks=False):
                        pending.append(node.path)
        except OSError:
            complete = False
        if entries > MOST_ENTRIES:
            return total, True
    return total, not complete


def _processes_by_path(paths: Sequence[Path]) -> dict[Path, int]:
    """How many processes each path has."""
    children: dict[int, list[int]] = defaultdict(list)
    first: dict[Path, list[int]] = {path: [] for path in paths}
    places = {path.name: path for path in paths}
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        if pid == os.getpid():
            continue
        try:
            parent = int((process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            told = os.fsdecode((process / "cmdline").read_bytes())
        except OSError:
            continue
        children[parent].append(pid)
        if (place := places.get(place_of(pid))) is not None:
            first[place].append(pid)
        with suppress(OSError):  # Another user's.
            told += "\0" + str((process / "cwd").readlink())
        told = f"\0{told}\0".replace("\0", "/\0/")
        for path in paths:
            if f"/{path}/" in told:
                first[path].append(pid)
    return {path: len(_with_descendants(pids, children)) for path, pids in first.items()}


def _with_descendants(pids: list[int], children: dict[int, list[int]]) -> set[int]:
    found: set[int] = set()
    pending = list(pids)
    while pending:
        pid = pending.pop()
        if pid not in found:
            found.add(pid)
            pending += children.get(pid, [])
    return found
