"""Cores for an engine and for the rest, so that neither takes the other's time, as where an engine has GPUs."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from midstream.envs.sandboxes.processes import with_descendants


@contextmanager
def apart(engine_pid: int) -> Iterator[None]:
    """Gives one half of the cores to the engine's processes and the other to this one and all that it starts.

    Raises RuntimeError where there is one core alone.
    """
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    if half == 0:
        raise RuntimeError("an engine cannot be kept apart on one core: give --together")
    for pid in with_descendants(engine_pid):
        _pin(pid, cores[:half])
    _pin(os.getpid(), cores[half:])
    try:
        yield
    finally:
        _pin(os.getpid(), cores)


def _pin(pid: int, cores: Collection[int]) -> None:
    """All threads of a process; those that it starts later are where their makers are."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:
            continue
