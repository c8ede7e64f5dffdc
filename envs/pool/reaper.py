"""Finds and removes what killed processes left here: processes, control groups, mounts, sandboxes, temporary folders.

Only what carries the label of an owner that is gone is touched. What another user owns is left to them, what
nobody can be asked about is left alone, and both are said.

Before a directory is removed, it is renamed to one that belongs to this process. The kernel lets one of two
reapers do that, and a reaper that is killed leaves no more than the next one finds.
"""

import os
import secrets
import select
import signal
import subprocess
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.ownership import claims
from midstream.envs.ownership.mounts import mounts_below, unmount
from midstream.envs.ownership.owners import this_process
from midstream.envs.pool.instances import LAYERS, layer_instances
from midstream.envs.sandboxes import marks
from midstream.envs.sandboxes.isolation.cgroups import list_leftover_cgroups, remove_leftover_cgroups
from midstream.envs.sandboxes.isolation.user import NOBODY
from midstream.envs.store.removal import remove_tree

# The job that the label of a directory names which a reaper has taken over.
REAPER = "reaper"
# A directory that this process has taken over and could not remove is tried again by its next reaping.
_one_at_a_time = threading.Lock()


@dataclass
class Reaped:
    """What a reaper did, in numbers and in words: `removed`, `skipped` and `failed` say why, an item each."""

    sandboxes: int = 0
    layers: int = 0
    folders: int = 0
    mounts: int = 0
    processes: int = 0
    cgroups: int = 0
    removed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.sandboxes + self.layers + self.folders + self.mounts + self.processes + self.cgroups

    def summary(self) -> str:
        """The numbers in words."""
        counts = (
            (self.sandboxes, "sandbox", "sandboxes"),
            (self.layers, "set of layers", "sets of layers"),
            (self.folders, "temporary folder", "temporary folders"),
            (self.mounts, "mount", "mounts"),
            (self.processes, "process", "processes"),
            (self.cgroups, "control group", "control groups"),
        )
        words = [f"{count} {one if count == 1 else many}" for count, one, many in counts if count]
        return ", ".join(words) or "nothing"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def reap(roots: Iterable[Path], temp: Path | None, dry_run: bool = False) -> Reaped:
    """Removes what is left in the roots of sandboxes and in the temp directory; blocks.

    With `dry_run` it only says what it would remove. Raises nothing for what cannot be removed: that is
    among the `failed`.
    """
    reaped = Reaped()
    with _one_at_a_time:
        _reap_processes(reaped, dry_run)
        _reap_cgroups(reaped, dry_run)
        for root in roots:
            _reap_root(root, reaped, dry_run)
            _reap_layers(root, reaped, dry_run)
        if temp is not None:
            _reap_temp(temp, reaped, dry_run)
    return reaped


def _reap_processes(reaped: Reaped, dry_run: bool) -> None:
    """Those in namespaces mostly die with their owner, by the kernel's doing; those without do not."""
    held: dict[int, int] = {}
    try:
        for pid in marks.find_marked_processes():
            with suppress(ProcessLookupError):
                held[pid] = os.pidfd_open(pid)
        # A number that is still a leftover's names what the descriptor holds, and not a newcomer elsewhere.
        for pid in sorted(held.keys() & set(marks.find_marked_processes())) if held else ():
            _reap_process(pid, held[pid], reaped, dry_run)
    finally:
        for pidfd in held.values():
            os.close(pidfd)


def _reap_process(pid: int, pidfd: int, reaped: Reaped, dry_run: bool) -> None:
    name = f"process {pid}"
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
        if uid not in _own_uids():
            reaped.skipped.append(f"{name}: it runs as user {uid}")
            return
        if not dry_run:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            if not select.select([pidfd], [], [], marks.END_TIMEOUT_S)[0]:
                reaped.failed.append(f"{name}: it outlives SIGKILL by {marks.END_TIMEOUT_S:g} s")
                return
    except (FileNotFoundError, ProcessLookupError):
        return
    reaped.processes += 1
    reaped.removed.append(name)


def _own_uids() -> set[int]:
    """The users as whom this user's sandboxes run."""
    return {os.geteuid(), *([NOBODY] if os.geteuid() == 0 else [])}


def _reap_cgroups(reaped: Reaped, dry_run: bool) -> None:
    left = list_leftover_cgroups()
    if left and not dry_run:
        try:
            remove_leftover_cgroups()
        except OSError as error:
            reaped.failed.append(f"control groups, {error.filename} at least: {error.strerror}")
            left = [path for path in left if not path.exists()]
    reaped.cgroups += len(left)
    reaped.removed += [f"control group {path}" for path in left]


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


def _reap_layers(root: Path, reaped: Reaped, dry_run: bool) -> None:
    """What overlay backends share between their sandboxes."""
    instances = layer_instances(root)
    for uid in sorted({instance.uid for instance in instances} - {os.geteuid()}):
        reaped.skipped.append(f"layers in {root}: they belong to user {uid}")
    own = [instance for instance in instances if instance.uid == os.geteuid()]
    left = [instance.directory for instance in own if instance.state == "gone"]
    if left and not dry_run:
        try:
            # Needs the module in C, which was there where layers are, if not in this installation.
            from midstream.envs.sandboxes.overlay.places import remove_abandoned

            remove_abandoned(root / LAYERS)
        except (ImportError, OSError, subprocess.CalledProcessError) as error:
            reaped.failed.append(f"layers in {root}: {error}")
            left = [directory for directory in left if not directory.exists()]
    reaped.layers += len(left)
    reaped.removed += map(str, left)


def _reap_temp(temp: Path, reaped: Reaped, dry_run: bool) -> None:
    ourselves = this_process(REAPER)
    nameless = 0
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
            nameless += 1
        elif state == "unknown":
            reaped.skipped.append(f"{folder}: whether {owner.label} lives cannot be seen from here")
    if nameless:
        what = f"{nameless} folders {temp}/{claims.TEMP_PREFIX}* whose names say no owner"
        reaped.skipped.append(f"{what}: remove them by hand if no job of an older version runs")


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
