"""Finds and removes what killed processes left on this host: processes, mounts, sandboxes, temporary folders.

Only what carries the label of an owner that is gone is touched. What another user owns is left to them, what
nobody can be asked about is left alone, and both are said.

Before a directory is removed, it is renamed to one that belongs to this process. The kernel lets one of two
reapers do that, and a reaper that is killed leaves no more than the next one finds.
"""

import os
import secrets
import subprocess
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.pool import claims, marks
from midstream.envs.pool.mounts import mounts_below, unmount
from midstream.envs.pool.owners import is_alive, this_process
from midstream.envs.store.restore import remove_tree

# The job that the label of a directory names which a reaper has taken over.
REAPER = "reaper"
# A directory that this process has taken over and could not remove is tried again by its next reaping.
_one_at_a_time = threading.Lock()


@dataclass
class Reaped:
    """What a reaper did, in numbers and in words: `removed`, `skipped` and `failed` say why, an item each."""

    sandboxes: int = 0
    folders: int = 0
    mounts: int = 0
    processes: int = 0
    removed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.sandboxes + self.folders + self.mounts + self.processes


def reap(roots: Iterable[Path], temp: Path | None, dry_run: bool = False) -> Reaped:
    """Removes what is left in the roots of sandboxes and in the temp directory; blocks.

    With `dry_run` it only says what it would remove. Raises nothing for what cannot be removed: that is
    among the `failed`.
    """
    reaped = Reaped()
    with _one_at_a_time:
        _reap_processes(reaped, dry_run)
        for root in roots:
            _reap_root(root, reaped, dry_run)
        if temp is not None:
            _reap_temp(temp, reaped, dry_run)
    return reaped


def _reap_processes(reaped: Reaped, dry_run: bool) -> None:
    for process in marks.marked_processes():
        if is_alive(process.owner) is not False or process.pid == os.getpid():
            continue
        name = f"process {process.pid} of {process.owner.label}"
        if process.uid != os.geteuid():
            reaped.skipped.append(f"{name}: it runs as user {process.uid}")
        elif dry_run or marks.end(process):
            reaped.processes += 1
            reaped.removed.append(name)
        else:
            reaped.failed.append(f"{name}: it outlives SIGKILL by {marks.END_TIMEOUT_S:g} s")


def _reap_root(root: Path, reaped: Reaped, dry_run: bool) -> None:
    ourselves = this_process(REAPER)
    for each in claims.claimed(root):
        if each.state == "gone" or each.owner == ourselves:
            if _remove(each.directory, reaped, dry_run):
                reaped.sandboxes += 1
            if not dry_run and not os.path.lexists(each.directory):
                claims.release(each.directory)
        elif each.state == "unknown":
            owner = "a label that cannot be read" if each.owner is None else each.owner.label
            reaped.skipped.append(f"{each.directory}: whether {owner} lives cannot be seen from here")
    if not dry_run:
        claims.forget_silent(root)
    for uid, count in claims.foreign_claims(root):
        reaped.skipped.append(f"{count} sandboxes in {root}: they belong to user {uid}")


def _reap_temp(temp: Path, reaped: Reaped, dry_run: bool) -> None:
    ourselves = this_process(REAPER)
    for folder, owner, state in claims.temp_directories(temp):
        try:
            uid = folder.lstat().st_uid
        except OSError:
            continue
        if uid != os.geteuid():
            reaped.skipped.append(f"{folder}: it belongs to user {uid}")
        elif state == "gone" or owner == ourselves:
            reaped.folders += _remove(folder, reaped, dry_run, in_temp=True)
        elif owner is None:
            reaped.skipped.append(f"{folder}: its name says no owner")
        elif state == "unknown":
            reaped.skipped.append(f"{folder}: whether {owner.label} lives cannot be seen from here")


def _remove(directory: Path, reaped: Reaped, dry_run: bool, in_temp: bool = False) -> bool:
    """Whether the directory was there and is gone by our doing; with `dry_run`, whether it would be tried."""
    if not os.path.lexists(directory):
        return False
    points = mounts_below(directory)
    if dry_run:
        reaped.mounts += len(points)
        reaped.removed.append(str(directory))
        return True
    try:
        for point in points:
            unmount(point)
            reaped.mounts += 1
        if mounts_below(directory):
            # Removing through a mount would remove what is mounted.
            raise OSError(0, "something is still mounted in it")
        taken = _take_over(directory, in_temp)
        if taken is None:
            return False
        remove_tree(taken)
        if not in_temp:
            claims.release(taken)
    except (OSError, EnvironmentFailure, subprocess.CalledProcessError) as error:
        reaped.failed.append(f"{directory}: {getattr(error, 'strerror', None) or error}")
        return False
    reaped.removed.append(str(directory))
    return True


def _take_over(directory: Path, in_temp: bool) -> Path | None:
    """The directory under a new name that is ours; None where another reaper was first."""
    label, word = this_process(REAPER).label, secrets.token_hex(6)
    if in_temp:
        taken = directory.with_name(f"{claims.TEMP_PREFIX}{label}-{word}")
    else:
        taken = directory.with_name(f"{os.getpid()}-{word}")
        claims.claim(taken, label)
    try:
        directory.rename(taken)
    except FileNotFoundError:
        if not in_temp:
            claims.release(taken)
        return None
    return taken
