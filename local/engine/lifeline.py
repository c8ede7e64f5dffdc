"""Binds a process to its parent: when the parent dies, for whatever reason, the kernel kills this process."""

import ctypes
import os
import signal

PARENT_PID_ENV = "MIDSTREAM_ENGINE_PARENT_PID"
"""The pid that the engine's launcher must find as its parent."""

_PR_SET_PDEATHSIG = 1


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
