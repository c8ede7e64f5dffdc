"""Reads one node of a tree that a directory listing has just named, without following a link."""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from midstream.envs.errors import WorkspaceLimit
from midstream.envs.store.attributes import read_attributes
from midstream.envs.store.chunks import FileMoved
from midstream.envs.store.listing import Record, open_beneath
from midstream.envs.store.records import UNREAD, Attributes, text
from midstream.envs.store.statcache import Inode

# Reads an open file of this size, at most so many bytes of it since holes need none; returns its hash and the bytes
# that it read.
Ingest = Callable[[int, int, int], tuple[bytes, int]]

_NODE = os.O_PATH | os.O_NOFOLLOW
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_FILE = os.O_RDONLY | os.O_NONBLOCK
# Faults of this process or machine; any other means that the node is no longer what was listed.
_OURS = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM)


class TreeMoved(Exception):
    """The tree changed while it was read."""


class NodeReader:
    """Reads nodes below a directory. All methods raise TreeMoved, and OSError with the path of the node."""

    def __init__(self, root_fd: int, ingest: Ingest, max_bytes: int, layer: bool) -> None:
        self._root_fd = root_fd
        self._ingest = ingest
        self._max_bytes = max_bytes
        self._layer = layer
        self._readable_bytes = max_bytes
        # Contents of files that have several names.
        self._contents: dict[Inode, bytes] = {}
        self._made_passable: list[tuple[bytes, int]] = []

    def make_passable(self, path: bytes) -> None:
        """Opens a directory's mode to its owner, until `close_again`."""
        with self._opened(path, _NODE) as fd:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            os.chmod(f"/proc/self/fd/{fd}", mode | stat.S_IRWXU)  # noqa: PTH101
        self._made_passable.append((path, mode))

    def close_again(self) -> None:
        for path, mode in reversed(self._made_passable):
            with self._opened(path, _NODE) as fd:
                os.chmod(f"/proc/self/fd/{fd}", mode)  # noqa: PTH101

    def file(self, path: bytes, record: Record, *, read: bool = True) -> tuple[bytes, Attributes]:
        """The content hash, UNREAD without `read`, and attributes of the very file that the record is of.

        Raises WorkspaceLimit.
        """
        inode = record.device, record.inode
        with self._opened_file(path, record) as (fd, info, attributes), naming(path):
            if not read:
                return UNREAD, attributes
            content = self._contents.get(inode)
            if content is None:
                content = self._read(fd, path, record, info)
        if record.links > 1:
            self._contents[inode] = content
        return content, attributes

    def _read(self, fd: int, path: bytes, record: Record, info: os.stat_result) -> bytes:
        try:
            content, read = self._ingest(fd, record.size, self._readable_bytes)
        except WorkspaceLimit as limit:
            raise WorkspaceLimit(f"{shown(path)} {limit}, {self._max_bytes}: delete some") from limit
        except FileMoved as moved:
            raise TreeMoved(f"{shown(path)} kept changing") from moved
        self._readable_bytes -= read
        if _written(os.fstat(fd)) != _written(info):
            raise TreeMoved(f"{shown(path)} kept changing")
        return content

    @contextmanager
    def _opened_file(self, path: bytes, record: Record) -> Iterator[tuple[int, os.stat_result, Attributes]]:
        """The very file that the record is of, its stat and attributes, even where its mode keeps its owner out."""
        try:
            fd = open_beneath(self._root_fd, path, _FILE)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                raise WorkspaceLimit(
                    f"{shown(path)} is held by a lease: end the process that has it"
                ) from error
            if error.errno != errno.EACCES:
                raise self._moved(path, error) from error
            fd, attributes = self._open_closed(path)
        else:
            with naming(path):
                attributes = read_attributes(fd, marks=self._layer)
        try:
            info = os.fstat(fd)
            found = info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns
            if found != (record.device, record.inode, record.size, record.mtime_ns):
                raise TreeMoved(f"{shown(path)} kept changing")
            yield fd, info, attributes
        finally:
            os.close(fd)

    def _open_closed(self, path: bytes) -> tuple[int, Attributes]:
        """A file whose mode must be opened to its owner for a moment; attributes are read in that moment."""
        with self._opened(path, _NODE) as node:
            mode = os.fstat(node).st_mode
            if not stat.S_ISREG(mode):
                raise TreeMoved(f"{shown(path)} kept changing")
            name = f"/proc/self/fd/{node}"
            os.chmod(name, stat.S_IMODE(mode) | stat.S_IRUSR)  # noqa: PTH101
            try:
                fd = os.open(name, _FILE | os.O_CLOEXEC)
                try:
                    return fd, read_attributes(fd, marks=self._layer)
                except BaseException:
                    os.close(fd)
                    raise
            finally:
                os.chmod(name, stat.S_IMODE(mode))  # noqa: PTH101

    @contextmanager
    def _opened(self, path: bytes, flags: int) -> Iterator[int]:
        try:
            fd = open_beneath(self._root_fd, path, flags)
        except OSError as error:
            raise self._moved(path, error) from error
        try:
            yield fd
        finally:
            os.close(fd)

    def _moved(self, path: bytes, error: OSError) -> Exception:
        """What it means that a node that was just listed cannot be opened."""
        if error.errno in _OURS:
            return OSError(error.errno, error.strerror, path)
        return TreeMoved(f"{shown(path)} kept changing ({error.strerror})")

    def is_whiteout(self, path: bytes) -> bool:
        """Whether a device is an overlay's mark of a deleted path."""
        with self._opened(path, _NODE) as fd:
            info = os.fstat(fd)
            return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0

    def target(self, path: bytes) -> bytes:
        with self._opened(path, _NODE) as fd:
            try:
                return os.readlink(b"", dir_fd=fd)
            except OSError as error:
                raise TreeMoved(f"{shown(path)} kept changing") from error

    def directory_attributes(self, path: bytes) -> Attributes:
        try:
            fd = open_beneath(self._root_fd, path, _DIRECTORY)
        except OSError as error:
            if error.errno != errno.EACCES:
                raise self._moved(path, error) from error
            self.make_passable(path)
            fd = open_beneath(self._root_fd, path, _DIRECTORY)
        try:
            with naming(path):
                return read_attributes(fd, marks=self._layer)
        finally:
            os.close(fd)


@contextmanager
def naming(path: bytes) -> Iterator[None]:
    """Gives faults of calls by descriptor the path."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def _written(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns


def shown(path: object) -> str:
    """A path in a message."""
    return repr(text(path) or ".") if isinstance(path, bytes) else repr(str(path))
