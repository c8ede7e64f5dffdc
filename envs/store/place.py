"""Makes the nodes of a snapshot below a directory, whatever else is there, and follows no link doing so."""

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from midstream.envs.errors import SnapshotError
from midstream.envs.store.attributes import write_attributes
from midstream.envs.store.chunks import CHUNK_BYTES, has_holes, write_blob
from midstream.envs.store.contents import Contents
from midstream.envs.store.listing import open_beneath
from midstream.envs.store.records import Entry, parent, text

_NODE = os.O_PATH | os.O_NOFOLLOW
_DIRECTORY = os.O_PATH | os.O_DIRECTORY
_CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_PARENTS = 32

Owner = tuple[int, int]


class Placement:
    """Nodes below one directory. Methods raise OSError, SnapshotMissing, SnapshotDamaged and SnapshotError."""

    def __init__(self, root_fd: int, contents: Contents, owner: Owner | None) -> None:
        """`owner` are the user and group to which whatever is made is given; None leaves it as it comes."""
        self._root_fd = root_fd
        self._contents = contents
        self._owner = owner
        self._parents: OrderedDict[bytes, int] = OrderedDict()

    def __enter__(self) -> "Placement":
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()

    def forget(self) -> None:
        """Closes the directories that were kept open; needed after some were removed."""
        for fd in self._parents.values():
            os.close(fd)
        self._parents.clear()

    def in_stored_order(self, files: Mapping[bytes, Entry]) -> Iterable[bytes]:
        """Files whose contents share a block one after the other, so that it is unpacked once."""
        known = self._contents.locate({entry.content for entry in files.values() if entry.size})
        nowhere = ("", 0, 0)
        places = {
            path: (where.pack, where.offset, where.start) if (where := known.get(entry.content)) else nowhere
            for path, entry in files.items()
        }
        return sorted(files, key=lambda path: (places[path], path))

    def make(self, entries: Mapping[bytes, Entry]) -> None:
        """Makes these nodes where nothing is yet. The modes and mtimes of directories are left to `finish`.

        A hard link is made to the first path of its group, which is among the entries or there already.
        """
        for path in sorted(entries):
            _check(path)
            entry = entries[path]
            if entry.kind == "d":
                os.mkdir(_name(path), 0o700, dir_fd=self.directory(parent(path)))
            elif entry.kind != "f":
                self._make_other(path, entry)
        files = {path: entry for path, entry in entries.items() if entry.kind == "f"}
        links = {path: entry for path, entry in files.items() if entry.link not in (b"", path)}
        for path in self.in_stored_order(files):
            if path not in links:
                self._make_file(path, files[path])
        for path, entry in links.items():
            _check(entry.link)
            source, target = self.directory(parent(entry.link)), self.directory(parent(path))
            os.link(
                _name(entry.link), _name(path), src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False
            )

    def finish(self, directories: Mapping[bytes, Entry]) -> None:
        """Gives directories their owners, attributes, modes and mtimes, the deepest first."""
        for path in sorted(directories, reverse=True):
            entry = directories[path]
            fd = open_beneath(self._root_fd, path, _DIRECTORY)
            try:
                name = f"/proc/self/fd/{fd}"
                if self._owner is not None:
                    os.chown(name, *self._owner)
                readable = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    write_attributes(readable, entry.attributes)
                finally:
                    os.close(readable)
                self._stamp(name, entry)
            finally:
                os.close(fd)

    def restamp_alone(self, path: bytes, entry: Entry) -> bool:
        """Gives a node that is there already its mode and mtime, unless it has other names.

        These may lie outside of the tree, where nothing is ours to change.
        """
        fd = open_beneath(self._root_fd, path, _NODE)
        try:
            if entry.link or os.fstat(fd).st_nlink != 1:
                return False
            if entry.kind == "l":
                self._set_times(path, entry)
            else:
                self._stamp(f"/proc/self/fd/{fd}", entry)
        finally:
            os.close(fd)
        return True

    def rewrite(self, path: bytes, entry: Entry) -> bool:
        """Makes a file that is there already into this one, where that is all right and cheaper than a new file.

        It is not for files with other names, which may lie outside of the tree, or that are to have holes.
        """
        if entry.kind != "f" or entry.link or not 0 < entry.size <= CHUNK_BYTES:
            return False
        blob = self._contents.small(path, entry)
        try:
            fd = open_beneath(self._root_fd, path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.ETXTBSY):
                return False
            raise
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1 or has_holes(blob):
                return False
            write_blob(fd, blob)
            os.ftruncate(fd, entry.size)
            self._finish_file(fd, entry, own=False)
        finally:
            os.close(fd)
        return True

    def let_owner_in(self, path: bytes, mode: int) -> None:
        """Lets the owner of a directory change what is in it, until `finish`."""
        fd = open_beneath(self._root_fd, path, _DIRECTORY)
        try:
            os.chmod(f"/proc/self/fd/{fd}", mode | stat.S_IRWXU)  # noqa: PTH101
        finally:
            os.close(fd)

    def whiteout(self, path: bytes) -> None:
        """Marks a path of an overlay's layer as deleted."""
        os.mknod(_name(path), stat.S_IFCHR, os.makedev(0, 0), dir_fd=self.directory(parent(path)))

    def directory(self, path: bytes) -> int:
        """A descriptor of a directory, valid until a few others were asked for."""
        if (fd := self._parents.get(path)) is not None:
            self._parents.move_to_end(path)
            return fd
        fd = open_beneath(self._root_fd, path, _DIRECTORY)
        self._parents[path] = fd
        if len(self._parents) > _OPEN_PARENTS:
            os.close(self._parents.popitem(last=False)[1])
        return fd

    def _make_file(self, path: bytes, entry: Entry) -> None:
        fd = os.open(_name(path), _CREATE_FILE, 0o600, dir_fd=self.directory(parent(path)))
        try:
            self._contents.write(path, entry, fd)
            if entry.size:
                os.ftruncate(fd, entry.size)
            self._finish_file(fd, entry, own=True)
        finally:
            os.close(fd)

    def _finish_file(self, fd: int, entry: Entry, *, own: bool) -> None:
        if own and self._owner is not None:
            os.fchown(fd, *self._owner)
        if entry.attributes or not own:
            write_attributes(fd, entry.attributes)
        os.fchmod(fd, entry.mode)
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))

    def _make_other(self, path: bytes, entry: Entry) -> None:
        name, directory = _name(path), self.directory(parent(path))
        if entry.kind == "l":
            os.symlink(entry.content, name, dir_fd=directory)
        elif entry.kind in ("p", "s"):
            kind = stat.S_IFIFO if entry.kind == "p" else stat.S_IFSOCK
            os.mknod(name, kind | 0o600, dir_fd=directory)
        else:
            raise SnapshotError(f"{text(path)!r} is of the unknown kind {entry.kind!r}")
        if self._owner is not None:
            os.chown(name, *self._owner, dir_fd=directory, follow_symlinks=False)
        self.restamp_alone(path, entry)

    def _stamp(self, name: str, entry: Entry) -> None:
        os.chmod(name, entry.mode)  # noqa: PTH101
        os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns))

    def _set_times(self, path: bytes, entry: Entry) -> None:
        times = entry.mtime_ns, entry.mtime_ns
        os.utime(_name(path), ns=times, dir_fd=self.directory(parent(path)), follow_symlinks=False)


def _name(path: bytes) -> bytes:
    return path[path.rfind(b"/") + 1 :]


def _check(path: bytes) -> None:
    """Records that were made elsewhere must not name a node outside of the tree."""
    if any(part in (b"", b".", b"..") for part in path.split(b"/")) or b"\0" in path:
        raise SnapshotError(f"the path {text(path)!r} does not name a node inside the snapshot")
