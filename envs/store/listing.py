"""Reads many directories at once and tells what differs from how they were before.

A listing is the packed state of one directory: a header (device and inode of the directory, number of records,
allocated bytes) and a record for each name, in the order of the names' bytes: the whole stat that tells whether
a node changed. A process can keep the listings of 100,000 files in some 8 MB, and the native `compare` gives
Python only what differs. The functions in Python below do the same on a machine without a compiler; the tests
hold the two against each other.
"""

import errno
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

NS = 1_000_000_000
# device, inode, number of records, allocated bytes of the regular files
HEADER = struct.Struct("=QQQQ")
# inode, device, size, blocks, mtime s, ctime s, mtime ns, ctime ns, mode, links, length of the name, unsettled
RECORD = struct.Struct("=QQQQqqIIIIHB")
_UNSETTLED_AT = RECORD.size - 1
# Below this many directories a second thread costs more than it gains.
DIRECTORIES_PER_THREAD = 16
MAX_THREADS = 4

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PASS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Record(NamedTuple):
    """One name of a directory and its stat; `blocks` are of 512 bytes."""

    name: bytes
    mode: int
    inode: int
    links: int
    size: int
    blocks: int
    mtime_ns: int
    ctime_ns: int
    device: int


# A directory below the root, its previous listing (None if it has none), and the names in it to look at (None for
# all; the others are then taken to be as they were), in order, each ended by a NUL.
Directory = tuple[bytes, bytes | None, bytes | None]
# The new listing (None where nothing differs), the records that are new or other, the names that are gone, the
# number of records, and the allocated bytes of the regular files.
RecordTuple = tuple[bytes, int, int, int, int, int, int, int, int]
Compared = tuple[bytes | None, list[RecordTuple], list[bytes], int, int]


def compare_in_python(
    root_fd: int,
    directories: Sequence[Directory],
    settled_ns: int,
    max_entries: int,
    distrusted: bytes,
    threads: int,
) -> list[Compared | int]:
    """Directories below `root_fd` as they are now: a result for each.

    A number in place of a result is the errno of reading that directory, E2BIG where all together have more
    than `max_entries` names that are looked at. Records whose mtime or ctime is not before `settled_ns`, and
    those of the `distrusted` inodes (packed pairs of device and inode), differ now and will the next time,
    since their content can change without their stat. `threads` is for the native twin of this function.
    """
    pairs = struct.iter_unpack("=QQ", distrusted)
    reading = _Reading(
        root_fd, settled_ns, max_entries, frozenset((device, inode) for device, inode in pairs)
    )
    return [reading.compare(path, previous, names) for path, previous, names in directories]


class _Reading:
    """One call of compare_in_python."""

    def __init__(
        self, root_fd: int, settled_ns: int, max_entries: int, distrusted: frozenset[tuple[int, int]]
    ) -> None:
        self._root_fd = root_fd
        self._settled_ns = settled_ns
        self._remaining = max_entries
        self._distrusted = distrusted

    def compare(self, path: bytes, previous: bytes | None, names: bytes | None) -> Compared | int:
        try:
            fd = open_beneath_in_python(self._root_fd, path, _OPEN_DIRECTORY)
            try:
                return self._compare_open(fd, previous, names)
            finally:
                os.close(fd)
        except OSError as error:
            return error.errno or errno.EIO

    def _compare_open(self, fd: int, previous: bytes | None, asked: bytes | None) -> Compared:
        own = os.fstat(fd)
        before = {} if previous is None else dict(_packed_records(previous))
        same = previous is not None and HEADER.unpack_from(previous)[:2] == (own.st_dev, own.st_ino)
        packed: dict[bytes, bytes] = {}
        if same and asked is not None:
            names = asked.split(b"\0")[:-1]
            if (asked and not asked.endswith(b"\0")) or any(one >= other for one, other in pairwise(names)):
                raise OSError(errno.EINVAL, "names that are not in order")
            among = frozenset(names)
            packed = {name: record for name, record in before.items() if name not in among}
        else:
            names = list(map(os.fsencode, os.listdir(fd)))
            self._remaining -= len(names)
        if self._remaining < 0:
            raise OSError(errno.E2BIG, "too many entries")
        looked_at = {name: record for name in sorted(names) if (record := self._record(fd, name)) is not None}
        changed = [
            name
            for name, record in looked_at.items()
            if not same or record[_UNSETTLED_AT] or before.get(name) != record
        ]
        packed = dict(sorted({**packed, **looked_at}.items()))
        gone = [name for name in before if name not in packed]
        found = [Record(*_unpacked(name, record)) for name, record in packed.items()]
        allocated = sum(min(r.size, r.blocks * 512) for r in found if stat.S_ISREG(r.mode))
        listing = HEADER.pack(own.st_dev, own.st_ino, len(packed), allocated)
        listing += b"".join([record + name for name, record in packed.items()])
        differs = not same or changed or gone
        records = [_unpacked(name, packed[name]) for name in changed]
        return listing if differs else None, records, gone, len(packed), allocated

    def _record(self, fd: int, name: bytes) -> bytes | None:
        try:
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        unsettled = (
            info.st_mtime_ns >= self._settled_ns
            or info.st_ctime_ns >= self._settled_ns
            or (info.st_dev, info.st_ino) in self._distrusted
        )
        return RECORD.pack(
            info.st_ino,
            info.st_dev,
            info.st_size,
            info.st_blocks,
            info.st_mtime_ns // NS,
            info.st_ctime_ns // NS,
            info.st_mtime_ns % NS,
            info.st_ctime_ns % NS,
            info.st_mode,
            info.st_nlink,
            len(name),
            unsettled,
        )


def open_beneath_in_python(root_fd: int, path: bytes, flags: int, mode: int = 0) -> int:
    """Opens a path below a directory, following no link; "" is the directory itself. Raises OSError."""
    if not path:
        # By /proc, since looking up "." needs the right to search in it.
        return os.open(f"/proc/self/fd/{root_fd}", (flags & ~os.O_NOFOLLOW) | os.O_CLOEXEC)
    parts = path.split(b"/")
    if any(part in (b"", b"..") for part in parts):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    at = root_fd
    try:
        for part in parts[:-1]:
            below = os.open(part, _PASS, dir_fd=at)
            if at != root_fd:
                os.close(at)
            at = below
        return os.open(parts[-1], flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=at)
    finally:
        if at != root_fd:
            os.close(at)


def distrusted(listing: bytes) -> bytes:
    """The listing as of another directory, so that all that is in it now differs from it."""
    return HEADER.pack(0, 0, 0, 0) + listing[HEADER.size :]


def names(listing: bytes) -> list[bytes]:
    """The names in a listing."""
    return [name for name, _ in _packed_records(listing)]


def _packed_records(listing: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = HEADER.size
    while at < len(listing):
        end = at + RECORD.size
        length = (
            listing[end - 3] | listing[end - 2] << 8 if _LITTLE else listing[end - 3] << 8 | listing[end - 2]
        )
        yield listing[end : end + length], listing[at:end]
        at = end + length


_LITTLE = struct.pack("=H", 1)[0] == 1


def _unpacked(name: bytes, record: bytes) -> RecordTuple:
    fields = RECORD.unpack(record)
    inode, device, size, blocks, mtime_s, ctime_s, mtime_n, ctime_n, mode, links = fields[:10]
    return name, mode, inode, links, size, blocks, mtime_s * NS + mtime_n, ctime_s * NS + ctime_n, device


try:
    from midstream.envs.store._native import compare as compare
    from midstream.envs.store._native import open_beneath as open_beneath
except ImportError:  # no compiler where this was installed: slower, and the same
    compare = compare_in_python
    open_beneath = open_beneath_in_python
