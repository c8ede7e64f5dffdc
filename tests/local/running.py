"""Runs `midstream compare` as a user would, in a process of its own, and looks for what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_GONE_WITHIN_S = 20.0


def command(run_dir: Path, *arguments: str) -> list[str]:
    program = [sys.executable, "-m", "midstream.cli.main", "compare", "job=smoke"]
    return [*program, "--run-dir", str(run_dir), *arguments]


def run(run_dir: Path, *arguments: str, timeout_s: float = 480) -> subprocess.CompletedProcess[str]:
    """Run to the end."""
    return subprocess.run(
        command(run_dir, *arguments), capture_output=True, text=True, timeout=timeout_s, check=False
    )


@contextmanager
def started(run_dir: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A comparison that runs while the block does; it is killed if it still runs afterwards."""
    with subprocess.Popen(
        command(run_dir, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def descendants(pid: int) -> dict[int, str]:
    """Command lines of all processes below ``pid``, by their pid."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (parent := _parent(folder)) is not None:
            children.setdefault(parent, []).append(int(folder.name))
    found, queue = {}, [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            found[child] = _command_line(child)
            queue.append(child)
    return found


def wait_gone(pids: Iterator[int] | dict[int, str]) -> list[str]:
    """Command lines of those of ``pids`` that are still there after a while: should be none."""
    pids = list(pids)
    give_up_at = time.monotonic() + _GONE_WITHIN_S
    while time.monotonic() < give_up_at and any(_runs(pid) for pid in pids):
        time.sleep(0.1)
    return [_command_line(pid) for pid in pids if _runs(pid)]


def wait_until(condition: Callable[[], Any], timeout_s: float = 180) -> Any:
    """Return the first true value of ``condition``."""
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at:
        if value := condition():
            return value
        time.sleep(0.05)
    raise TimeoutError(f"nothing within {timeout_s} s")


def events(run_dir: Path, strategy: str) -> list[dict[str, Any]]:
    """The events that a strategy has recorded so far."""
    lines = [
        line
        for path in (run_dir / strategy / "events").glob("*.jsonl")
        for line in path.read_text().splitlines(keepends=True)
    ]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def interrupt(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGINT)


def _parent(folder: Path) -> int | None:
    try:
        return int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
