"""Cores for an engine and for the rest, so that neither takes the other's time, as where an engine has GPUs."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from midstream.envs.sandboxes.processes import with_descendants


@contextmanager
def apart(engine_pid: int) -> Iterator[None]:
    """Gives one half of the cores to the engine's processes and the other to this one and all that it starts.

    Afterwards this process has all of them again; the engine keeps to its half. Raises RuntimeError where there is
    one core alone.
    """
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    if half == 0:
        raise RuntimeError("an engine cannot be kept apart on one core: give --together")
    try:
        for pid in with_descendants(engine_pid):
            _pin(pid, cores[:half])
        _pin(os.getpid(), cores[half:])
        yield
    finally:
        _pin(os.getpid(), cores)


def _pin(pid: int, cores: Collection[int]) -> None:
    """All threads of a process; those that it starts later are where their makers are. One that has ended is fine."""
    pinned: set[str] = set()
    with suppress(FileNotFoundError, ProcessLookupError):
        while left := {task.name for task in Path(f"/proc/{pid}/task").iterdir()} - pinned:
            for thread in left:
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread), cores)
            pinned |= left
