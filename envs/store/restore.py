"""Writes recorded entries into an empty directory, and removes trees.

Each node is made relative to its parent's descriptor, which is opened without following links, so that no
record, however it was made, writes outside of the target.
"""

import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from midstream.envs.errors import SnapshotError
from midstream.envs.store.scan import Entry

# Copies the content of this hash into the open file.
Extract = Callable[[str, int], None]

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def make_empty(into: Path) -> None:
    """Makes the directory, or checks that it is empty. Raises SnapshotError where it is not."""
    try:
        into.mkdir(parents=True, exist_ok=True)
        empty = not any(into.iterdir())
    except OSError as error:
        raise SnapshotError(f"cannot restore into {into}: {error.strerror}") from error
    if not empty:
        raise SnapshotError(f"cannot restore into {into}: it is not empty")


def write_tree(entries: Iterable[Entry], into: Path, extract: Extract) -> None:
    """Makes the tree under `into`, an empty directory; the entries come parents first.

    Raises SnapshotError for an entry whose path leaves the tree.
    """
    # The directories from the root to the current one, each with its descriptor and record. Their modes and
    # mtimes are set when they are left, since making a child changes the one and may need the other.
    open_directories: list[tuple[str, int, Entry]] = []
    try:
        for entry in entries:
            if entry.path == ".":
                open_directories.append(("", os.open(into, _OPEN_DIRECTORY), entry))
                continue
            while open_directories and not entry.path.startswith(open_directories[-1][0]):
                _finish(open_directories.pop())
            if not open_directories:
                raise SnapshotError(f"the entry {entry.path!r} has no parent in the snapshot")
            prefix, parent, _ = open_directories[-1]
            name = entry.path[len(prefix) :]
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise SnapshotError(f"the entry {entry.path!r} does not name a node inside the snapshot")
            _make(entry, name, parent, extract)
            if entry.kind == "d":
                child = os.open(name, _OPEN_DIRECTORY, dir_fd=parent)
                open_directories.append((entry.path + "/", child, entry))
        while open_directories:
            _finish(open_directories.pop())
    finally:
        for _, fd, _ in open_directories:
            os.close(fd)


def _make(entry: Entry, name: str, parent: int, extract: Extract) -> None:
    times = (entry.mtime_ns, entry.mtime_ns)
    if entry.kind == "d":
        os.mkdir(name, 0o700, dir_fd=parent)
    elif entry.kind == "f":
        fd = os.open(name, _CREATE_FILE, 0o600, dir_fd=parent)
        try:
            extract(entry.content, fd)
            os.fchmod(fd, entry.mode)
            os.utime(fd, ns=times)
        finally:
            os.close(fd)
    elif entry.kind == "l":
        os.symlink(entry.content, name, dir_fd=parent)
        os.utime(name, ns=times, dir_fd=parent, follow_symlinks=False)
    elif entry.kind in ("p", "s"):
        os.mknod(name, (stat.S_IFIFO if entry.kind == "p" else stat.S_IFSOCK) | 0o600, dir_fd=parent)
        # The node was made a moment ago in a directory that nobody else uses, so it is no link.
        os.chmod(name, entry.mode, dir_fd=parent)
        os.utime(name, ns=times, dir_fd=parent)
    else:
        raise SnapshotError(f"the entry {entry.path!r} is of the unknown kind {entry.kind!r}")


def _finish(directory: tuple[str, int, Entry]) -> None:
    _, fd, entry = directory
    try:
        os.fchmod(fd, entry.mode)
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
    finally:
        os.close(fd)


def remove_tree(path: Path) -> None:
    """Removes a directory tree whatever its modes and depth; a missing one is fine. Follows no link.

    Raises OSError where something stays.
    """
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        try:
            _let_owner_in(path)
            shutil.rmtree(path)
        except RecursionError:
            subprocess.run(["rm", "-rf", "--", str(path)], check=True, capture_output=True)


def _let_owner_in(directory: Path) -> None:
    """Lets the owner of each directory of the tree list and change it, which may be what kept it in place."""
    directory.chmod(0o700)
    with os.scandir(directory) as nodes:
        for node in nodes:
            if node.is_dir(follow_symlinks=False):
                _let_owner_in(Path(node.path))
