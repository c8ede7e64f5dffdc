"""Where a part of a run lies: in the run directory of a job, or of each of the jobs below it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

# So far below a directory run directories are looked for, to be named where it has none itself.
_DEPTH = 4
_MOST_NAMED = 5


def runs_with(directory: Path, is_there: Callable[[Path], bool]) -> list[Path]:
    """The directory itself where the part ``is_there``, else those right below it, such as the strategies of a
    comparison, sorted. Raises OSError.
    """
    if is_there(directory):
        return [directory]
    return [below for below in sorted(directory.iterdir()) if is_there(below)]


def named_below(directory: Path, is_there: Callable[[Path], bool]) -> str:
    """The run directories further below in which the part ``is_there``, for a message; "" where there is none."""
    below = [str(path) for path in _below(directory, is_there, _DEPTH)]
    more = f" and {len(below) - _MOST_NAMED} more" if len(below) > _MOST_NAMED else ""
    return ", ".join(below[:_MOST_NAMED]) + more


def _below(directory: Path, is_there: Callable[[Path], bool], depth: int) -> Iterator[Path]:
    """Outermost first."""
    with os.scandir(directory) as entries:
        folders = sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    for folder in folders:
        if is_there(folder):
            yield folder
        elif depth > 1 and os.access(folder, os.R_OK | os.X_OK):
            yield from _below(folder, is_there, depth - 1)
