"""Tells what ended the first process of a sandbox's namespaces: something outside of them, or a command."""

import resource
import signal

from midstream.envs.sandboxes.marks import read_file

# Where proc(5) puts the exit code, counted from the field behind the program's name.
_EXIT_CODE_FIELD = 52 - 3
_SIGNAL_BITS = 0x7F


def was_killed_from_outside(pid: int) -> bool:
    """Whether SIGKILL from outside ended this first process, which nobody has waited for yet.

    That signal does not reach it from inside. The kernel sends it as a command's doing, too: past a limit on
    processor time that the command has set, and for a call that strict seccomp forbids. Memory is not looked at.
    """
    try:
        fields = read_file(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        if int(fields[_EXIT_CODE_FIELD]) & _SIGNAL_BITS != signal.SIGKILL:
            return False
        return not _has_own_time_limit(pid) and not _is_strict(pid)
    except OSError:
        return False


def _has_own_time_limit(pid: int) -> bool:
    ours = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = _line(f"/proc/{pid}/limits", b"Max cpu time").split()[-2]
    return limit != (b"unlimited" if ours == resource.RLIM_INFINITY else str(ours).encode())


def _is_strict(pid: int) -> bool:
    # 1 is the strict mode; 3 is what the kernel makes of it as it kills.
    return _line(f"/proc/{pid}/status", b"Seccomp:").split()[-1] in (b"1", b"3")


def _line(path: str, start: bytes) -> bytes:
    return next((line for line in read_file(path).splitlines() if line.startswith(start)), b"? ?")
