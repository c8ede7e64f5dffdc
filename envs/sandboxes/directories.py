"""The directories of sandboxes: where they lie, and what a task puts into one."""

import os
import shutil
import tempfile
import weakref
from pathlib import Path

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.protocol import Task
from midstream.envs.store.restore import remove_tree


def write_files(directory: Path, task: Task) -> None:
    """Makes the directory anew with the files of a checked task."""
    try:
        remove_tree(directory)
        directory.mkdir(mode=0o700, parents=True)
        (directory / task.metadata.get("workdir", ".")).mkdir(parents=True, exist_ok=True)
        for name, text in task.metadata.get("files", {}).items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
    except OSError as error:
        raise EnvironmentFailure(f"cannot write the task's files to {directory}: {error}") from error


def sandbox_root(owner: object, path: Path | str | None) -> Path:
    """The directory of all sandboxes; one of our own, removed with its owner, where none is set."""
    if path is None:
        root = Path(tempfile.mkdtemp(prefix="midstream-"))
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
        shutil.rmtree(root, ignore_errors=True)
