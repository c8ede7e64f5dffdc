"""What changed in a directory tree since the last scan, without following a link and without blocking.

Every directory is read and every node's stat compared, since an edit in place touches no directory; only what
differs is read. Recorded: regular files, directories (empty ones too), symbolic links, modes with setuid and
sticky, mtimes, hard links, extended attributes, any byte in a name. FIFOs and sockets are recorded by kind;
devices are refused. Not recorded: owners, and access control lists, which name owners.

All paths are opened below the root by openat2 without links, and what was opened is checked to be what the
directory listed, so that a swap of a directory for a link during the scan is noticed and never followed.
"""

import errno
import os
import stat
import struct
import time
from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from midstream.envs.errors import SnapshotError, WorkspaceLimit
from midstream.envs.store import listing
from midstream.envs.store.chunks import read_content
from midstream.envs.store.listing import Compared, Record
from midstream.envs.store.nodes import Ingest, NodeReader, TreeMoved, shown
from midstream.envs.store.records import WHITEOUT, Entry, joined, parent, parents
from midstream.envs.store.statcache import Inode, Scanned, StatCache

# The kernel stamps mtime and ctime from a clock that ticks every 1 to 10 ms. A file that was read within this
# time of its last change may have changed again under the same stamp, so it is read again next time.
RACY_NS = 20_000_000
# A process that writes while the tree is read makes the scan start anew, this often at most.
SCAN_ATTEMPTS = 4

_KINDS = {stat.S_IFREG: "f", stat.S_IFDIR: "d", stat.S_IFLNK: "l", stat.S_IFIFO: "p", stat.S_IFSOCK: "s"}
_NODE = os.O_PATH | os.O_NOFOLLOW


@dataclass(frozen=True)
class TreeLimits:
    """What a tree may hold; a scan stops with WorkspaceLimit at the first excess, before reading it.

    `bytes` are those that files take on disk, so that a hole costs nothing; `depth` is in directories.
    """

    entries: int = 200_000
    bytes: int = 4 << 30
    depth: int = 512


UNLIMITED = TreeLimits(1 << 62, 1 << 62, 1 << 62)


def hash_only(fd: int, size: int, allowance: int) -> tuple[bytes, int]:
    """An Ingest that keeps nothing."""
    return read_content(fd, size, None, allowance)


def scan(
    root: Path | str,
    cache: StatCache,
    ingest: Ingest = hash_only,
    limits: TreeLimits | None = None,
    mapped: frozenset[Inode] = frozenset(),
    *,
    layer: bool = False,
    only: Collection[bytes] | None = None,
    unread: Container[bytes] = (),
) -> Scanned:
    """What differs under `root` from the cache, which stays as it is; `ingest` reads what the stat does not vouch for.

    `mapped` are files, by device and inode, that a live process maps shared and writable: they are read whatever
    their stat says. `layer` reads the upper directory of an overlay, with its marks.

    `only` looks at just these paths, and at all of a directory there that is new or another one; the rest is taken
    to be as it was. Files at `unread` that differ get the content UNREAD.

    Raises WorkspaceLimit for what may not be there (a device, a limit), SnapshotError for a tree that cannot be
    read or does not hold still; both name the path.
    """
    for _ in range(SCAN_ATTEMPTS):
        try:
            with _root(root) as root_fd:
                return _Scan(root_fd, cache, ingest, limits or TreeLimits(), mapped, layer, unread).run(only)
        except TreeMoved as moved:
            reason = moved
        except OSError as error:
            path = error.filename if error.filename is not None else root
            raise SnapshotError(f"cannot read {shown(path)} under {root}: {error.strerror}") from error
    raise SnapshotError(f"{root}: {reason} in {SCAN_ATTEMPTS} scans; stop the processes that write there")


@contextmanager
def _root(root: Path | str) -> Iterator[int]:
    # By O_PATH, which its mode cannot refuse.
    fd = os.open(root, _NODE | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


class _Scan:
    """One pass over the tree."""

    def __init__(
        self,
        root_fd: int,
        cache: StatCache,
        ingest: Ingest,
        limits: TreeLimits,
        mapped: frozenset[Inode],
        layer: bool,
        unread: Container[bytes],
    ) -> None:
        self._root_fd = root_fd
        self._cache = cache
        self._unread = unread
        self._limits = limits
        self._distrusted = b"".join([struct.pack("=QQ", *inode) for inode in sorted(mapped)])
        # Only a record whose last change lies before this time is vouched for by its stat.
        self._settled_ns = time.time_ns() - RACY_NS
        self._entries_left = limits.entries
        self._bytes_left = limits.bytes
        self._layer = layer
        self._nodes = NodeReader(root_fd, ingest, limits.bytes, layer)
        self._found = Scanned()

    def run(self, only: Collection[bytes] | None) -> Scanned:
        info = os.fstat(self._root_fd)
        try:
            self._walk(only)
            attributes = self._nodes.directory_attributes(b"")
        finally:
            self._nodes.close_again()
        self._note(b"", Entry("d", stat.S_IMODE(info.st_mode), info.st_mtime_ns, attributes=attributes))
        self._found.group_links(self._cache)
        return self._found

    def _walk(self, only: Collection[bytes] | None) -> None:
        """All directories that the cache knows at once, then those that are new, level by level."""
        known = self._cache.listings
        asked = None if only is None else _names_by_directory(only)
        wave = [path for path in known if asked is None or path in asked] or [b""]
        while wave:
            results = dict(zip(wave, self._compare(wave, asked or {}), strict=True))
            failed = [path for path, result in results.items() if isinstance(result, int)]
            other = {path: result for path, result in results.items() if not isinstance(result, int)}
            self._count(other)
            differing = {path: result for path, result in other.items() if result[0] is not None}
            gone = self._directories_gone(differing)
            # Parents first: a directory that keeps its owner out hides those below it.
            for path in sorted(failed):
                if not _below(path, gone):
                    retried = self._retry(path, results[path])
                    if retried[0] is not None:
                        differing[path] = retried
                        gone |= self._directories_gone({path: retried})
            self._forget(gone)
            wave = []
            for path, result in differing.items():
                if not _below(path, gone):
                    wave += self._take(path, result)

    def _compare(self, paths: list[bytes], asked: Mapping[bytes, bytes]) -> list[Compared | int]:
        known = self._cache.listings
        threads = min(listing.MAX_THREADS, 1 + len(paths) // listing.DIRECTORIES_PER_THREAD)
        return listing.compare(
            self._root_fd,
            [(path, known.get(path), asked.get(path)) for path in paths],
            self._settled_ns,
            self._entries_left,
            self._distrusted,
            threads,
        )

    def _count(self, results: dict[bytes, Compared]) -> None:
        for path, (_, _, _, count, allocated) in results.items():
            self._entries_left -= count
            self._bytes_left -= allocated
            if self._entries_left < 0:
                raise self._too_many(path)
            if self._bytes_left < 0:
                raise WorkspaceLimit(
                    f"more than {self._limits.bytes} bytes of files, reached in {shown(path)}: delete some"
                )

    def _too_many(self, path: bytes) -> WorkspaceLimit:
        return WorkspaceLimit(
            f"more than {self._limits.entries} entries, reached in {shown(path)}: delete some"
        )

    def _directories_gone(self, results: dict[bytes, Compared]) -> set[bytes]:
        """Known directories that are no longer there, or are something else."""
        known = self._cache.listings
        gone: set[bytes] = set()
        for path, (_, changed, names, _, _) in results.items():
            missing = [joined(path, name) for name in names]
            replaced = [joined(path, record[0]) for record in changed if not stat.S_ISDIR(record[1])]
            gone.update(below for below in (*missing, *replaced) if below in known)
        return gone

    def _retry(self, path: bytes, result: Compared | int) -> Compared:
        """Reads a directory that could not be read, its mode opened to its owner."""
        if result == errno.EACCES:
            # An opened parent may have been all that it needed.
            (result,) = self._compare([path], {})
        if result == errno.EACCES:
            self._nodes.make_passable(path)
            (result,) = self._compare([path], {})
        if isinstance(result, int):
            if result == errno.E2BIG:
                raise self._too_many(path)
            if result in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV):
                raise TreeMoved(f"{shown(path)} kept changing")
            raise OSError(result, os.strerror(result), path)
        self._count({path: result})
        return result

    def _forget(self, gone: set[bytes]) -> None:
        """Everything below these directories."""
        if not gone:
            return
        for path, before in self._cache.listings.items():
            if _below(path, gone):
                self._found.listings[path] = None
                for name in listing.names(before):
                    self._gone(joined(path, name))

    def _gone(self, path: bytes) -> None:
        self._found.updates[path] = None
        if path in self._cache.linked:
            self._found.linked[path] = None

    def _take(self, path: bytes, result: Compared) -> list[bytes]:
        """Records what differs in a directory; returns the directories in it that are not known yet."""
        now, changed, names, _, _ = result
        self._found.listings[path] = now
        for name in names:
            self._gone(joined(path, name))
        return [
            below for record in changed if (below := self._node(joined(path, record[0]), Record(*record)))
        ]

    def _node(self, path: bytes, record: Record) -> bytes | None:
        kind = _KINDS.get(stat.S_IFMT(record.mode))
        if kind is None and self._layer and self._nodes.is_whiteout(path):
            self._note(path, Entry(WHITEOUT, 0, 0))
            return None
        if kind is None:
            raise WorkspaceLimit(f"{shown(path)} is a device, which cannot be recorded: remove it")
        mode = stat.S_IMODE(record.mode)
        self._note_links(path, record)
        if kind == "f":
            content, attributes = self._nodes.file(path, record, read=path not in self._unread)
            self._note(path, Entry(kind, mode, record.mtime_ns, record.size, content, attributes))
        elif kind == "d":
            attributes = self._nodes.directory_attributes(path)
            self._note(path, Entry(kind, mode, record.mtime_ns, attributes=attributes))
            return self._new_directory(path)
        elif kind == "l":
            self._note(path, Entry(kind, 0o777, record.mtime_ns, 0, self._nodes.target(path)))
        else:
            self._note(path, Entry(kind, mode, record.mtime_ns))
        return None

    def _new_directory(self, path: bytes) -> bytes | None:
        if path in self._cache.listings:
            return None
        if path.count(b"/") + 1 >= self._limits.depth:
            raise WorkspaceLimit(
                f"{shown(path)} lies deeper than the limit of {self._limits.depth} directories: remove it"
            )
        return path

    def _note(self, path: bytes, entry: Entry) -> None:
        before = self._cache.tree.entries.get(path)
        if before is not None and before.link and entry.kind == "f":
            entry = entry._replace(link=before.link)
        if entry != before:
            self._found.updates[path] = entry

    def _note_links(self, path: bytes, record: Record) -> None:
        if record.links > 1 and stat.S_ISREG(record.mode):
            self._found.linked[path] = record.device, record.inode
        elif path in self._cache.linked:
            self._found.linked[path] = None


def _names_by_directory(paths: Collection[bytes]) -> dict[bytes, bytes]:
    """As `listing.compare` is asked for them: the root itself is in no directory."""
    found: dict[bytes, list[bytes]] = {}
    for path in sorted(paths):
        if path:
            found.setdefault(parent(path), []).append(path[path.rfind(b"/") + 1 :] + b"\0")
    return {directory: b"".join(names) for directory, names in found.items()}


def _below(path: bytes, directories: set[bytes]) -> bool:
    return bool(directories) and (path in directories or any(above in directories for above in parents(path)))
