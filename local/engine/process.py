"""One engine's process tree: started bound to this process, and ended so that nothing of it is left."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from midstream.envs.ownership.claims import temp_prefix
from midstream.local.engine.lifeline import PARENT_PID_ENV

LAUNCHER_MODULE = "midstream.local.engine.launch"

_TEARDOWN_GRACE_S = 1.0
"""How long the resource tracker, which outlives the others, may take to unlink their semaphores."""

_POLL_S = 0.02
_SHARED_MEMORY_PREFIX = "/dev/shm/sglang_loads_"
"""SGLang's table of its load, which only an orderly exit of SGLang would unlink."""


class EngineProcess:
    """The launcher process, leader of its own session, and everything that SGLang starts below it.

    A session of its own keeps a terminal's Ctrl-C away from the engine: the job decides when it ends.

    The kernel kills the launcher when the *thread* that started it ends, however that comes about (see
    `lifeline`). That thread is therefore one of ours that waits for the launcher: it ends after the launcher,
    or together with this whole process.
    """

    def __init__(
        self, flags: list[str], environment: Mapping[str, str], *, temporary_dir: Path, log_path: Path
    ):
        """Start the launcher with SGLang's `flags`; `environment` is laid over this process's own.

        The log is appended to. Raises OSError where it cannot be written or the interpreter cannot be run.
        """
        self._temporary_dir = temporary_dir
        self._command = [sys.executable, "-P", "-m", LAUNCHER_MODULE, *flags]
        self._environment = {**os.environ, **environment, PARENT_PID_ENV: str(os.getpid())}
        self._log_path = log_path
        started: Future[subprocess.Popen[bytes]] = Future()
        self._supervisor = threading.Thread(
            target=self._supervise, args=(started,), name="engine-supervisor", daemon=True
        )
        self._supervisor.start()
        self._popen = started.result()

    def _supervise(self, started: "Future[subprocess.Popen[bytes]]") -> None:
        try:
            with self._log_path.open("ab") as log:
                popen = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as fault:
            started.set_exception(fault)
            return
        started.set_result(popen)
        popen.wait()
        # Now, not at the next stop(): the session's id can belong to nobody else while its members live.
        _end_session(popen.pid)

    @property
    def pid(self) -> int:
        """The launcher's pid, which is also the id of its session."""
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while the launcher runs; negative where a signal ended it."""
        return self._popen.poll()

    def wait(self, timeout_s: float) -> bool:
        """True as soon as every process of the engine has ended, False after `timeout_s`."""
        self._supervisor.join(timeout_s)
        return not self._supervisor.is_alive()

    def kill(self, timeout_s: float) -> None:
        """End every process of the engine and remove what they leave; safe to call again.

        Raises TimeoutError, naming the pids, where some are still there after `timeout_s`.

        SIGKILL, because the engine holds no state worth saving, and SGLang looks for a SIGTERM every five
        seconds only. The launcher's children die with it.
        """
        left_behind = _shared_memory_of(session_pids(self.pid)) if self.exit_code is None else set()
        self._popen.kill()
        if not self.wait(timeout_s):
            survivors = session_pids(self.pid)
            raise TimeoutError(f"processes {survivors} of the engine survive SIGKILL for {timeout_s} s")
        for path in left_behind:
            path.unlink(missing_ok=True)
        shutil.rmtree(self._temporary_dir, ignore_errors=True)


def make_temporary_dir() -> Path:
    """A private directory with a path short enough for socket files."""
    return Path(tempfile.mkdtemp(prefix=temp_prefix("engine")))


def session_pids(session: int) -> list[int]:
    """The processes of a session that are not zombies, whatever groups and parents they have."""
    names = (entry.name for entry in Path("/proc").iterdir())
    return [pid for pid in map(int, filter(str.isdigit, names)) if _runs_in(session, pid)]


def _runs_in(session: int, pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # it has ended since the listing
        return False
    # Fields after the name, which is in parentheses and may hold any character: state, ppid, group, session.
    state, _, _, its_session = stat.rpartition(")")[2].split()[:4]
    return state != "Z" and int(its_session) == session


def _shared_memory_of(pids: list[int]) -> set[Path]:
    files: set[Path] = set()
    for pid in pids:
        try:
            mappings = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:  # it has ended since the listing
            continue
        paths = (line.split(maxsplit=5)[-1] for line in mappings.splitlines())
        files.update(Path(path) for path in paths if path.startswith(_SHARED_MEMORY_PREFIX))
    return files


def _end_session(session: int) -> None:
    """Return when no process of a session, whose leader is dead, is left."""
    grace_ends = time.monotonic() + _TEARDOWN_GRACE_S
    while survivors := session_pids(session):
        if time.monotonic() > grace_ends:
            for pid in survivors:
                _kill_quietly(pid)
        time.sleep(_POLL_S)


def _kill_quietly(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
