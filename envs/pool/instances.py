"""The layers of overlay backends below a root of sandboxes, and whether the processes they belong to live.

Each backend holds the lock beside its directory for as long as its process lives; what it shares between its
sandboxes has no claim of its own.
"""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from midstream.envs.ownership.claims import OwnerState

LAYERS = "layers"


@dataclass(frozen=True)
class Instance:
    """The layers of one backend; `uid` is the user whose they are."""

    directory: Path
    uid: int
    state: OwnerState


def layer_instances(root: Path) -> list[Instance]:
    """Those of the backends that kept, or keep, their sandboxes in the root."""
    found = []
    for lock in sorted((root / LAYERS).glob("*.lock")):
        try:
            uid = lock.lstat().st_uid
        except FileNotFoundError:
            continue
        found.append(Instance(lock.with_suffix(""), uid, _state(lock)))
    return found


def _state(lock: Path) -> OwnerState:
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return "unknown"
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "alive"
    except OSError:
        return "unknown"
    finally:
        os.close(fd)
    return "gone"
