"""Where the journals of a run lie: in the run directory of a job, or of each of the jobs below it."""

from pathlib import Path

from midstream.buffers.journal.database import NAME
from midstream.buffers.journal.errors import JournalError
from midstream.buffers.runs import named_below, runs_with

# Of a run directory.
FOLDER = "buffer"


def journals_of(run: Path) -> dict[Path, Path]:
    """The directories of journals by the run directories that they belong to, sorted.

    ``run`` is the run directory of a job, the directory of a journal, or that of several runs, such as the
    strategies of a comparison.

    Raises:
        JournalError: there is none, and where there are some.
    """
    if _is_there(run):
        return {run: run}
    try:
        found = runs_with(run, has_journal)
    except OSError as error:
        raise JournalError(
            f"cannot read {run} ({error.strerror}): look as the user of the job, or mend access"
        ) from error
    if found:
        return {run_dir: run_dir / FOLDER for run_dir in found}
    if below := named_below(run, has_journal):
        raise JournalError(f"{run} holds no journal, but there is one in {below}: name it")
    raise JournalError(
        f"{run} holds no journal ({FOLDER}/{NAME}): its job has not begun, or midstream.run_dir is not set to this"
        " directory"
    )


def has_journal(run_dir: Path) -> bool:
    """Whether a run has one, also where it may not be looked at, which whoever reads it says."""
    return _is_there(run_dir / FOLDER)


def _is_there(directory: Path) -> bool:
    try:
        return (directory / NAME).is_file()
    except PermissionError:
        return True
