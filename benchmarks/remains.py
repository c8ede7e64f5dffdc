"""What a process has of the machine: to see that nothing is left, and that it does not grow."""

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from midstream.envs.ownership.owners import this_process
from midstream.envs.sandboxes.isolation.cgroups import PREFIX, find_cgroup_root
from midstream.envs.sandboxes.processes import descendants

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Folders that the backend and the store keep whatever is in them.
_KEPT = ("layers", "snapshots")


def raise_descriptor_limit() -> None:
    """As many descriptors as this user may have: a thousand sandboxes need some thousands."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass(frozen=True)
class Remains:
    """Counts: `processes` below this one, `mounts` it sees, its open `descriptors`, its control `groups`,
    what lies in the `folders` of sandboxes, and `unfinished` files of stores.
    """

    processes: int
    mounts: int
    descriptors: int
    groups: int
    folders: int
    unfinished: int

    def beyond(self, before: "Remains") -> dict[str, int]:
        """What is here and was not before, by name; empty where nothing is."""
        more = {field.name: getattr(self, field.name) - getattr(before, field.name) for field in fields(self)}
        return {name: count for name, count in more.items() if count > 0}


def remains(roots: Sequence[Path] = (), stores: Sequence[Path] = ()) -> Remains:
    root = find_cgroup_root()
    return Remains(
        processes=len(descendants(os.getpid())),
        mounts=len(Path("/proc/self/mountinfo").read_text().splitlines()),
        descriptors=descriptors(),
        groups=0 if root is None else sum(1 for _ in root.path.glob(f"{PREFIX}{this_process().label}+*")),
        folders=sum(len(_left_in(folder)) for folder in roots),
        unfinished=sum(1 for store in stores for _ in (store / "tmp").iterdir()),
    )


def descriptors() -> int:
    """Those that this process has open; a mount that is nowhere in the tree has one, too."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def own_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def children_bytes() -> int:
    """Resident memory of all processes below this one; what they share is counted for each."""
    return sum(_resident(pid) for pid in descendants(os.getpid()))


def children_proportional_bytes() -> int:
    """The same, but what processes share is divided among them (PSS). Slow: some 0.2 ms a process."""
    return sum(_proportional(pid) for pid in descendants(os.getpid()))


def available_bytes() -> int:
    """What the kernel says could still be had: page tables, slabs and tmpfs of sandboxes count against it."""
    return _kib(Path("/proc/meminfo").read_text(), "MemAvailable:") * 1024


def _left_in(folder: Path) -> list[Path]:
    """Everything in a folder of sandboxes but the empty shells that the backends keep there."""
    if not folder.exists():
        return []
    top = [path for path in folder.iterdir() if path.name not in _KEPT and any(_files_in(path))]
    layers = folder / "layers"
    return top + (list(layers.iterdir()) if layers.exists() else [])


def _files_in(path: Path) -> list[Path]:
    """A hidden folder counts by what is in it, anything else by being there."""
    if not path.name.startswith("."):
        return [path]
    return [each for each in path.rglob("*") if not each.is_dir()]


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def _proportional(pid: int) -> int:
    try:
        return _kib(Path(f"/proc/{pid}/smaps_rollup").read_text(), "Pss:") * 1024
    except OSError:
        return 0


def _kib(text: str, name: str) -> int:
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(name))
