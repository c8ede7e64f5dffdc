"""Binds the engine's processes to each other and to the job: where one dies, all of them end."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.process import BaseProcess

PARENT_PID_ENV = "MIDSTREAM_ENGINE_PARENT_PID"
"""The pid that the engine's launcher must find as its parent."""

_PR_SET_PDEATHSIG = 1
_CHILD_WATCH_PERIOD_S = 0.25


def die_with_parent() -> None:
    """Ask for SIGKILL at the parent's death, and exit at once if that death has already happened.

    The kernel's notion of parent is the *thread* that forked this process: see `EngineProcess`, which keeps
    that thread alive. The session's leader (the launcher) knows its parent from the environment; the others
    recognise theirs by being in the same session.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(code)}")
    if not _parent_is_there():
        os._exit(1)


def _parent_is_there() -> bool:
    parent = os.getppid()
    if os.getsid(0) == os.getpid():
        return parent == int(os.environ[PARENT_PID_ENV])
    try:
        return os.getsid(parent) == os.getsid(0)
    except ProcessLookupError:
        return False


def die_with_children() -> None:
    """From now on, end this process as soon as one of its multiprocessing children has failed.

    SGLang has a watchdog for this, but its crash handling can keep a server whose detokenizer died listening,
    and every request to it hanging, for a minute.
    """
    threading.Thread(target=_exit_after_a_failed_child, name="child-watch", daemon=True).start()


def _exit_after_a_failed_child() -> None:
    children: set[BaseProcess] = set()
    while True:
        children.update(multiprocessing.active_children())
        for child in children:
            if child.exitcode:
                sys.stderr.write(f"{child.name} (pid {child.pid}) ended with exit code {child.exitcode}\n")
                sys.stderr.flush()
                os._exit(1)
        time.sleep(_CHILD_WATCH_PERIOD_S)
