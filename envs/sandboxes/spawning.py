"""Starts the processes of sandboxes off the event loop, ends them, and learns of their end."""

import asyncio
import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from midstream.envs.sandboxes.causes import was_killed_from_outside

# How often, and how long, the end of what was killed is checked where no descriptor tells.
REAP_POLL_S = 0.002
REAP_TIMEOUT_S = 5.0


class _ProcessWide:
    """What all sandboxes of this process share; made anew in a forked child, which shares none of it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        # One thread keeps up with hundreds of starts a second. It must live as long as this process: the
        # kernel's parent-death signal is tied to the thread that forked.
        self.spawner = ThreadPoolExecutor(1, "midstream-spawn")
        # Nobody writes to it: its end is read when the last holder of the write end, this process, is gone.
        self.lifeline, self._lifeline_held = os.pipe()


_shared: _ProcessWide | None = None
_shared_lock = threading.Lock()


def _process_wide() -> _ProcessWide:
    global _shared  # noqa: PLW0603 (one thread for the whole process is the point)
    with _shared_lock:
        if _shared is None or _shared.pid != os.getpid():
            _shared = _ProcessWide()
        return _shared


def spawner() -> ThreadPoolExecutor:
    """The one thread of this process that starts sandboxes; it lives as long as the process does."""
    return _process_wide().spawner


def lifeline() -> int:
    """A descriptor for children to inherit that reads as ended once this process is gone."""
    return _process_wide().lifeline


class SandboxProcess:
    """A started process in a session of its own. With namespaces, `init_pid` is the first process in them."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        output: int,
        pass_fds: Sequence[int],
    ) -> None:
        """Starts it, on the spawner. Raises OSError. `identify` comes next."""
        self._popen = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=pass_fds,
            env=environment,
            # Where this process stands may be closed to whoever the sandbox runs as.
            cwd="/",
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self.init_pid: int | None = None
        self._pidfd: int | None = None
        self._ended: asyncio.Future[None] | None = None
        self._is_held = False
        self._killed_from_outside = False

    def identify(self, info: bytes) -> None:
        """Learns of the init by what bubblewrap wrote of it, nothing where there are no namespaces."""
        # One that is killed while it writes leaves half of it.
        if is_complete(info):
            self.init_pid = int(json.loads(info)["child-pid"])
        try:
            # The end of the init is the end of all in its namespace: the kernel waits for them first.
            self._pidfd = os.pidfd_open(self.init_pid or self.pid)
        except ProcessLookupError:
            self._popen.kill()

    def hold(self) -> None:
        """Keeps bubblewrap, whose namespaces are complete, from waiting for its init before its end is read.

        Bubblewrap has nothing else to do. It makes one number of a signal and of the exit code that a command
        gives, and forgets which it was.
        """
        if self.init_pid is not None:
            self._is_held = True
            self._popen.send_signal(signal.SIGSTOP)

    def watch(self) -> asyncio.Future[None]:
        """A future of the running loop that is done when it has ended. Call it once."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        if self._pidfd is None:
            self._ended.set_result(None)
        else:
            loop.add_reader(self._pidfd, self._on_end)
        return self._ended

    def unwatch(self) -> None:
        """Takes `watch` back; fine where there was none."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)

    def _on_end(self) -> None:
        assert self._ended is not None and self._pidfd is not None
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._look_and_let_go()
        if not self._ended.done():
            self._ended.set_result(None)

    def kill(self) -> None:
        """Sends SIGKILL to the namespace, or to the process group. Does not wait."""
        try:
            if self.init_pid is None:
                # Its number cannot have been given away: the group has a member that only this kills.
                os.killpg(self.pid, signal.SIGKILL)
            elif self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._let_go()

    async def exit_code(self) -> int:
        """The exit code, negative for a signal, of a process that has ended. Raises TimeoutError."""
        self._look_and_let_go()
        async with asyncio.timeout(REAP_TIMEOUT_S):
            while (code := self._popen.poll()) is None:  # noqa: ASYNC110 (bubblewrap follows its init at once)
                await asyncio.sleep(REAP_POLL_S)
        if self.init_pid is not None and code < 0:
            self._killed_from_outside = True
        return code

    @property
    def killed_from_outside(self) -> bool:
        """Whether, once `exit_code` has returned, SIGKILL from outside its namespaces ended it."""
        return self._killed_from_outside

    def _look_and_let_go(self) -> None:
        if self._is_held and self.init_pid is not None:
            self._killed_from_outside = was_killed_from_outside(self.init_pid)
        self._let_go()

    def _let_go(self) -> None:
        if self._is_held:
            self._is_held = False
            self._popen.send_signal(signal.SIGCONT)

    def discard(self) -> None:
        """Ends one that nobody watches yet, and returns when it is gone."""
        self.kill()
        self._popen.kill()
        self._popen.wait()
        self.release()

    def release(self) -> None:
        """Gives the descriptor back."""
        self._let_go()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def is_complete(info: bytes) -> bool:
    """Whether this is all that bubblewrap writes of its namespaces."""
    return info.rstrip().endswith(b"}")
