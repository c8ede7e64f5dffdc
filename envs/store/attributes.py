"""Which extended attributes of a node belong to a snapshot, read and set by descriptor."""

import errno
import os

from midstream.envs.store.records import Attributes

CAPABILITY = b"security.capability"
_MARKS = (b"user.overlay.", b"trusted.overlay.")
_NONE_HERE = (errno.ENOTSUP, errno.ENOSYS)


def read_attributes(fd: int, *, marks: bool = False) -> Attributes:
    """Those of users, and for root the capabilities of programs; an overlay's own marks only where asked for.

    Raises OSError.
    """
    return tuple((name, os.getxattr(fd, name)) for name in sorted(_names(fd, marks)))


def is_mark(name: bytes) -> bool:
    """Whether an attribute is an overlay's own."""
    return name.startswith(_MARKS)


def write_attributes(fd: int, wanted: Attributes) -> None:
    """Makes these the node's attributes, without those that it had. Raises OSError."""
    names = [name for name, _ in wanted]
    for name in _names(fd, False):
        if name not in names:
            os.removexattr(fd, name)
    for name, value in wanted:
        os.setxattr(fd, name, value)


def _names(fd: int, marks: bool) -> list[bytes]:
    try:
        names = os.listxattr(fd)
    except OSError as error:
        if error.errno in _NONE_HERE:
            return []
        raise
    return [name for name in map(os.fsencode, names) if _recorded(name, marks)]


def _recorded(name: bytes, marks: bool) -> bool:
    if is_mark(name):
        return marks
    if name == CAPABILITY:
        return os.geteuid() == 0
    return name.startswith(b"user.")
