"""The directories of sandboxes: where they lie, and what a task puts into one."""

import os
import stat
import tempfile
import weakref
from pathlib import Path

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.ownership.claims import temp_prefix
from midstream.envs.sandboxes.protocol import SandboxSpec
from midstream.envs.store.removal import remove_tree

_SET_ID = stat.S_ISUID | stat.S_ISGID


def write_files(directory: Path, spec: SandboxSpec, owner: tuple[int, int] | None = None) -> None:
    """Makes the directory anew with the files of the spec, all of it for this uid and gid.

    Raises EnvironmentFailure.
    """
    try:
        remove_tree(directory)
        directory.mkdir(mode=0o700, parents=True)
        (directory / spec.workdir).mkdir(parents=True, exist_ok=True)
        for name, text in spec.files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
        if owner is not None:
            give_tree(directory, owner)
    except OSError as error:
        raise EnvironmentFailure(f"cannot write the task's files to {directory}: {error}") from error


def give_tree(directory: Path, owner: tuple[int, int]) -> None:
    """Makes the directory and all below it belong to this uid and gid; follows no link. Raises OSError.

    No process may be at work in it.
    """
    for _, directories, files, fd in os.fwalk(directory, follow_symlinks=False):
        os.fchown(fd, *owner)
        for name in directories + files:
            mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
            os.chown(name, *owner, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISREG(mode) and mode & _SET_ID:
                # The kernel takes these bits away from a file that changes hands.
                os.chmod(name, stat.S_IMODE(mode), dir_fd=fd)


def sandbox_root(owner: object, path: Path | str | None) -> Path:
    """The directory of all sandboxes; one of our own, removed with its owner, where none is set."""
    if path is None:
        root = Path(tempfile.mkdtemp(prefix=temp_prefix()))
        weakref.finalize(owner, _remove_own, root, os.getpid())
        return root
    root = Path(path).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFailure(f"environment.sandbox_root={str(path)!r}: {error.strerror}") from error
    return root


def _remove_own(root: Path, pid: int) -> None:
    if pid == os.getpid():  # Not in a forked child that exits.
        remove_tree(root)
