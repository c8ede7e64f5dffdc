"""Where the journals of a run lie: in the run directory of a job, or of each of the jobs below it."""

import os
from collections.abc import Iterator
from pathlib import Path

from midstream.buffers.journal.database import NAME
from midstream.buffers.journal.errors import JournalError

# Of a run directory.
FOLDER = "buffer"
# So far below a directory journals are looked for, to be named where it has none itself.
_DEPTH = 4
_MOST_NAMED = 5


def journals_of(run: Path) -> dict[Path, Path]:
    """The directories of journals by the run directories that they belong to, sorted.

    ``run`` is the run directory of a job, the directory of a journal, or that of several runs, such as the
    strategies of a comparison.

    Raises:
        JournalError: there is none, and where there are some.
    """
    if _is_there(run):
        return {run: run}
    if _is_there(run / FOLDER):
        return {run: run / FOLDER}
    try:
        found = {below: below / FOLDER for below in sorted(run.iterdir()) if _is_there(below / FOLDER)}
    except OSError as error:
        raise JournalError(
            f"cannot read {run} ({error.strerror}): look as the user of the job, or mend access"
        ) from error
    if found:
        return found
    below = [str(path) for path in _below(run, _DEPTH)]
    if below:
        more = f" and {len(below) - _MOST_NAMED} more" if len(below) > _MOST_NAMED else ""
        named = ", ".join(below[:_MOST_NAMED]) + more
        raise JournalError(f"{run} holds no journal, but there is one in {named}: name it")
    raise JournalError(
        f"{run} holds no journal ({FOLDER}/{NAME}): its job has not begun, or midstream.run_dir is not set to this"
        " directory"
    )


def _is_there(directory: Path) -> bool:
    """Also where it may not be looked at, which whoever reads it says."""
    try:
        return (directory / NAME).is_file()
    except PermissionError:
        return True


def _below(directory: Path, depth: int) -> Iterator[Path]:
    """Run directories with a journal, outermost first."""
    with os.scandir(directory) as entries:
        folders = sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    for folder in folders:
        if _is_there(folder / FOLDER):
            yield folder
        elif depth > 1 and os.access(folder, os.R_OK | os.X_OK):
            yield from _below(folder, depth - 1)
