"""Files that several processes share: whole or not there, also after a power cut, and read without waiting."""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in place of the one that may be there; its folder exists. For one writer at a time.

    Raises OSError, and leaves the old one.
    """
    # The next writer takes the place of what a killed one left.
    with _draft(path.with_name(f".{path.name}"), content) as draft:
        draft.replace(path)
        _sync_folder(path.parent)


def create_file(path: Path, content: bytes) -> None:
    """Write a file that is not there yet; of several that try at once, on any hosts, one succeeds.

    Raises:
        FileExistsError: it is there.
        OSError: it cannot be written, or the file system has no hard links.
    """
    with _draft(path.with_name(f".{path.name}.{secrets.token_hex(6)}"), content) as draft:
        try:
            path.hardlink_to(draft)
        except FileExistsError:
            # A server whose answer was lost is asked again, and finds the link that it has made.
            if draft.stat().st_nlink != 2:
                raise
        _sync_folder(path.parent)


def read_file(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file; a pipe or a device is not waited for. Raises OSError, also where it is longer."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        # A file that grows meanwhile is as long as it was.
        if found.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"more than {most_bytes:,} bytes", str(path))
        return file.read(most_bytes)


@contextmanager
def _draft(draft: Path, content: bytes) -> Iterator[Path]:
    """The content on disk under this name; what is left of it goes at the end."""
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
