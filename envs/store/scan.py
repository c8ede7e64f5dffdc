"""Reads a directory tree into entries and a digest without following a link and without blocking.

What is recorded: regular files, directories (empty ones too), symbolic links, modes with setuid and sticky,
mtimes, any byte in a name. FIFOs and sockets are recorded by kind and come back as inert nodes; devices are
refused. Not recorded: owners, extended attributes, holes, and that two names are hard links of one file.

Everything is opened relative to the directory's descriptor and checked again once open, so that a swap of a
file or directory for a link during the scan is noticed and never followed.
"""

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from midstream.envs.errors import SnapshotError

DIGEST_BYTES = 32
CHUNK_BYTES = 1 << 20
# The kernel stamps mtime and ctime from a clock that ticks every 1 to 10 ms. A file that was read within this
# time of its last change may have changed again under the same stamp, so it is read again next time.
RACY_NS = 20_000_000
# A process that writes while the tree is read makes the scan start anew, this often at most.
SCAN_ATTEMPTS = 4

_KINDS = {stat.S_IFREG: "f", stat.S_IFDIR: "d", stat.S_IFLNK: "l", stat.S_IFIFO: "p", stat.S_IFSOCK: "s"}
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# Reads the open file to its end, keeps the content where that is wanted, and returns its hash.
Ingest = Callable[[int, int], str]
StatKey = tuple[int, int, int, int, int]


class Entry(NamedTuple):
    """One node. `path` is relative to the root, which is "."; bytes that are not UTF-8 are surrogate escapes.

    `kind` is f, d, l, p (FIFO) or s (socket); `content` is a file's hash or a link's target.
    """

    path: str
    kind: str
    mode: int
    mtime_ns: int
    size: int
    content: str


@dataclass(frozen=True)
class Tree:
    """All entries, parents before children and names in order. `bytes` is the content of all files."""

    entries: tuple[Entry, ...]
    digest: str
    bytes: int


@dataclass(frozen=True)
class TreeLimits:
    """What a tree may hold; a scan stops with SnapshotError at the first excess, before reading it."""

    entries: int = 200_000
    bytes: int = 4 << 30
    depth: int = 256


@dataclass
class StatCache:
    """What the last scans of one directory saw, so that a file is read again only where its stat changed."""

    # Names the state of the store in which the cached hashes are known to have their content.
    epoch: bytes = b""
    files: dict[str, tuple[StatKey, Entry]] = field(default_factory=dict)


class _TreeMoved(Exception):
    """The tree changed while it was read."""


def hash_content(fd: int, size: int) -> str:
    """The hash of an open file's content, in hex; `size` is what it is expected to hold."""
    content = blake2b(digest_size=DIGEST_BYTES)
    while chunk := os.read(fd, min(CHUNK_BYTES, size + 1)):
        content.update(chunk)
    return content.hexdigest()


def scan(
    root: Path | str, cache: StatCache, ingest: Ingest = hash_content, limits: TreeLimits | None = None
) -> Tree:
    """The tree under `root` now; `ingest` is called for every file that the cache does not vouch for.

    Raises SnapshotError, naming the path: a device, a limit, or a tree that does not hold still.
    """
    limits = limits or TreeLimits()
    for _ in range(SCAN_ATTEMPTS):
        one_pass = _Scan(root, cache, ingest, limits)
        try:
            entries = one_pass.run()
        except _TreeMoved as moved:
            reason = moved
            continue
        except OSError as error:
            raise SnapshotError(f"cannot read {error.filename!r} under {root}: {error.strerror}") from error
        cache.files = one_pass.seen
        return Tree(entries, digest(entries), sum(entry.size for entry in entries))
    raise SnapshotError(f"{root}: {reason} in {SCAN_ATTEMPTS} scans; stop the processes that write there")


def digest(entries: tuple[Entry, ...]) -> str:
    """The digest of a state: kinds, modes, names, contents and targets of all entries, without mtimes."""
    text = "".join([f"{e.kind} {e.mode:o} {e.path}\0{e.content}\0" for e in entries])
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=DIGEST_BYTES).hexdigest()


class _Scan:
    """One pass over the tree."""

    def __init__(self, root: Path | str, cache: StatCache, ingest: Ingest, limits: TreeLimits) -> None:
        self._root = root
        self._known = cache.files
        self._ingest = ingest
        self._limits = limits
        self._entries: list[Entry] = []
        self._bytes = 0
        # Only an entry whose last change lies before this time is vouched for by its stat.
        self._settled_ns = time.time_ns() - RACY_NS
        self._unprivileged = os.geteuid() != 0
        self.seen: dict[str, tuple[StatKey, Entry]] = {}

    def run(self) -> tuple[Entry, ...]:
        fd = os.open(self._root, _OPEN_DIRECTORY)
        try:
            info = os.fstat(fd)
            with self._passable(fd, info.st_mode):
                self._add(Entry(".", "d", stat.S_IMODE(info.st_mode), info.st_mtime_ns, 0, ""))
                self._directory(fd, "", 0)
        finally:
            os.close(fd)
        return tuple(self._entries)

    def _directory(self, fd: int, prefix: str, depth: int) -> None:
        if depth >= self._limits.depth:
            raise SnapshotError(f"{prefix!r} lies deeper than the limit of {self._limits.depth} directories")
        with os.scandir(fd) as listing:
            nodes = sorted(listing, key=lambda node: node.name)
        for node in nodes:
            path = prefix + node.name
            try:
                info = node.stat(follow_symlinks=False)
            except FileNotFoundError as error:
                raise _TreeMoved(f"{path!r} vanished") from error
            kind = _KINDS.get(stat.S_IFMT(info.st_mode))
            if kind is None:
                raise SnapshotError(f"{path!r} is a device, which cannot be recorded; remove it")
            if kind == "f":
                self._add(self._file(fd, node.name, path, info))
                continue
            target = self._target(fd, node.name, path) if kind == "l" else ""
            self._add(Entry(path, kind, stat.S_IMODE(info.st_mode), info.st_mtime_ns, 0, target))
            if kind == "d":
                with self._opened(fd, node.name, path, info, _OPEN_DIRECTORY) as child:
                    self._directory(child, path + "/", depth + 1)

    def _add(self, entry: Entry) -> None:
        self._entries.append(entry)
        if len(self._entries) > self._limits.entries:
            raise SnapshotError(f"more than {self._limits.entries} entries, reached at {entry.path!r}")

    def _file(self, directory: int, name: str, path: str, info: os.stat_result) -> Entry:
        self._bytes += info.st_size
        if self._bytes > self._limits.bytes:
            raise SnapshotError(f"more than {self._limits.bytes} bytes of files, reached at {path!r}")
        key = _stat_key(info)
        known = self._known.get(path)
        if known is not None and known[0] == key:
            self.seen[path] = known
            return known[1]
        with self._opened(directory, name, path, info, _OPEN_FILE) as fd:
            content = self._ingest(fd, info.st_size)
            if _stat_key(os.fstat(fd))[2:] != key[2:] and not self._closed_to_us(info.st_mode):
                raise _TreeMoved(f"{path!r} kept changing")
        entry = Entry(path, "f", stat.S_IMODE(info.st_mode), info.st_mtime_ns, info.st_size, content)
        if info.st_ctime_ns < self._settled_ns and info.st_mtime_ns < self._settled_ns:
            self.seen[path] = (key, entry)
        return entry

    def _target(self, directory: int, name: str, path: str) -> str:
        try:
            return os.readlink(name, dir_fd=directory)
        except OSError as error:
            raise _TreeMoved(f"{path!r} kept changing") from error

    @contextmanager
    def _opened(
        self, directory: int, name: str, path: str, info: os.stat_result, flags: int
    ) -> Iterator[int]:
        """A descriptor of the very node that `info` describes, even where its mode keeps its owner out."""
        closed = self._closed_to_us(info.st_mode)
        try:
            first = os.open(
                name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC if closed else flags, dir_fd=directory
            )
        except OSError as error:
            raise _TreeMoved(f"{path!r} kept changing ({error.strerror})") from error
        try:
            found = os.fstat(first)
            if (found.st_ino, stat.S_IFMT(found.st_mode)) != (info.st_ino, stat.S_IFMT(info.st_mode)):
                raise _TreeMoved(f"{path!r} kept changing")
            if not closed:
                yield first
                return
            with self._passable(first, info.st_mode):
                fd = os.open(f"/proc/self/fd/{first}", flags & ~os.O_NOFOLLOW)
                try:
                    yield fd
                finally:
                    os.close(fd)
        finally:
            os.close(first)

    def _closed_to_us(self, mode: int) -> bool:
        needed = stat.S_IRUSR | stat.S_IXUSR if stat.S_ISDIR(mode) else stat.S_IRUSR
        return self._unprivileged and mode & needed != needed

    @contextmanager
    def _passable(self, fd: int, mode: int) -> Iterator[None]:
        """Opens a node's mode to its owner for as long as it is read."""
        if not self._closed_to_us(mode):
            yield
            return
        node = Path(f"/proc/self/fd/{fd}")
        node.chmod(stat.S_IMODE(mode) | stat.S_IRWXU)
        try:
            yield
        finally:
            node.chmod(stat.S_IMODE(mode))


def _stat_key(info: os.stat_result) -> StatKey:
    return info.st_mode, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
