"""Writes a snapshot's tree into an empty directory, or makes a directory that holds another state into it."""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from midstream.envs.errors import SnapshotError
from midstream.envs.store.contents import Contents
from midstream.envs.store.place import Owner, Placement
from midstream.envs.store.records import Entry, Tree, Updates, parent, parents
from midstream.envs.store.removal import remove_below, remove_node, remove_tree

_ROOT = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_empty(into: Path) -> None:
    """Makes the directory, or checks that it is empty. Raises SnapshotError where it is not."""
    try:
        into.mkdir(parents=True, exist_ok=True)
        empty = not any(into.iterdir())
    except OSError as error:
        raise SnapshotError(f"cannot restore into {into}: {error.strerror}") from error
    if not empty:
        raise SnapshotError(f"cannot restore into {into}: it is not empty")


@contextmanager
def removed_on_failure(directory: Path) -> Iterator[None]:
    """Removes the directory where the block fails; faults of the system come as SnapshotError."""
    try:
        yield
    except BaseException as error:
        remove_tree(directory)
        if isinstance(error, OSError):
            raise SnapshotError(f"cannot write a snapshot into {directory}: {error}") from error
        raise


def write_tree(
    entries: Mapping[bytes, Entry], into: Path, contents: Contents, owner: Owner | None = None
) -> None:
    """Makes the tree in an empty directory. Raises OSError, SnapshotMissing, SnapshotDamaged, SnapshotError."""
    root_fd = os.open(into, _ROOT)
    try:
        _fill(entries, root_fd, contents, owner)
    finally:
        os.close(root_fd)


def rewrite_tree(entries: Mapping[bytes, Entry], into: Path, contents: Contents, owner: Owner | None) -> None:
    """Empties a directory, whatever is in it, and makes the tree there."""
    root_fd = os.open(into, _ROOT)
    try:
        remove_below(root_fd, b"")
        _fill(entries, root_fd, contents, owner)
    finally:
        os.close(root_fd)


def change_tree(
    before: Tree, after: Tree, updates: Updates, directory: Path, contents: Contents, owner: Owner | None
) -> None:
    """Makes a directory that holds the one tree hold the other, where `updates` is what differs.

    Raises what `write_tree` does; the directory is then in neither state.
    """
    root_fd = os.open(directory, _ROOT)
    try:
        with Placement(root_fd, contents, owner) as placement:
            _change(before, after, updates, root_fd, placement)
    finally:
        os.close(root_fd)


def _fill(entries: Mapping[bytes, Entry], root_fd: int, contents: Contents, owner: Owner | None) -> None:
    with Placement(root_fd, contents, owner) as placement:
        placement.make({path: entry for path, entry in entries.items() if path})
        placement.finish({path: entry for path, entry in entries.items() if entry.kind == "d"})


@dataclass
class _Plan:
    """What becomes of each path that differs: only its mode or mtime, only its content too, or all of it."""

    restamped: dict[bytes, Entry] = field(default_factory=dict)
    rewritten: dict[bytes, Entry] = field(default_factory=dict)
    removed: set[bytes] = field(default_factory=set)
    made: dict[bytes, Entry] = field(default_factory=dict)


def _change(before: Tree, after: Tree, updates: Updates, root_fd: int, placement: Placement) -> None:
    opened = _directories_to_open(before, updates)
    for path in sorted(opened):
        placement.let_owner_in(path, before.entries[path].mode)
    plan = _plan(before, updates)
    for path, entry in plan.restamped.items():
        if not placement.restamp_alone(path, entry):
            plan.rewritten[path] = entry
    for path in placement.in_stored_order(plan.rewritten):
        if not placement.rewrite(path, plan.rewritten[path]):
            plan.removed.add(path)
            plan.made[path] = plan.rewritten[path]
    for path in plan.removed:
        # What lies below a directory goes with it.
        if not any(above in plan.removed for above in parents(path)):
            remove_node(root_fd, path)
    placement.forget()
    placement.make(plan.made)
    placement.finish(_directories_to_finish(after, updates, {*plan.removed, *plan.made, *opened}))


def _plan(before: Tree, updates: Updates) -> _Plan:
    plan = _Plan()
    for path, entry in updates.items():
        old = before.entries.get(path)
        if entry is not None and old is not None and old.kind == entry.kind:
            if entry.kind == "d":
                continue
            if old._replace(mode=entry.mode, mtime_ns=entry.mtime_ns) == entry:
                plan.restamped[path] = entry
                continue
            if entry.kind == "f":
                plan.rewritten[path] = entry
                continue
        if old is not None:
            plan.removed.add(path)
        if entry is not None:
            plan.made[path] = entry
    return plan


def _directories_to_open(before: Tree, updates: Updates) -> set[bytes]:
    """Directories among these paths and on the way to them whose mode keeps their owner from changing them."""
    found = set()
    for above in {above for path in updates for above in (path, *parents(path), b"")}:
        entry = before.entries.get(above)
        if entry is not None and entry.kind == "d" and entry.mode & stat.S_IRWXU != stat.S_IRWXU:
            found.add(above)
    return found


def _directories_to_finish(after: Tree, updates: Updates, paths: set[bytes]) -> dict[bytes, Entry]:
    """Directories whose own record differs, or whose mtime or mode was changed on the way."""
    directories = {*updates, *paths, *(parent(path) for path in paths if path)}
    return {
        path: entry
        for path in directories
        if (entry := after.entries.get(path)) is not None and entry.kind == "d"
    }
