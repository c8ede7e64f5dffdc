"""One bash that lives as long as its sandbox and runs one command after the other.

Commands go to the shell, and the end of each comes back, over a socket of their own; output has a pipe. Each
command carries a fresh random word that its end must repeat. The command is run by `eval`, with the socket
closed and stdin empty, so that no quoting, here-document, `break` or redirection in it can unbalance the loop
around it; a `break` without a loop ends its command. Children never see the socket. What a command can do is
end the shell or overwrite the loop's own tools: then the shell ends or is silent until the timeout, and its
sandbox starts another one.

All methods belong to the event loop on which the shell was started; no method blocks it.
"""

import asyncio
import fcntl
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.sandboxes.isolation import Isolation
from midstream.envs.sandboxes.output import BoundedOutput
from midstream.envs.sandboxes.processes import REAP_TIMEOUT_S, SandboxProcess, end_marked, spawner

READ_BYTES = 1 << 16
# At a command's end its own output lies in the pipe, which holds no more than this many reads.
DRAIN_READS = 16
# A shell whose variables outgrow this is ended: its state could not be recorded.
MAX_RECORD_BYTES = 1 << 20
# The shell's numbers of our descriptors start here, out of the way of those that commands pick.
LOWEST_FD = 100
MARK = "MIDSTREAM_SANDBOX"

# One line, so that bash's messages name line 1 of the command. The end of a command is reported when the
# inner loop comes round again, which it does after a `continue` too; the outer loop catches a `break`.
_LOOP = (
    "exec 7>&1 </dev/null >/dev/null 2>&1; {ulimits}; __n= __s=0; while builtin :; do while "
    '[[ $__n ]] && {{ builtin printf "%s %d\\0%s\\0" "$__n" "$__s" "$PWD"; builtin export -p; '
    'builtin printf "\\0"; }} >&{fd}; __n=; IFS= builtin read -r -d "" -u {fd} __n && '
    'IFS= builtin read -r -d "" -u {fd} __c; do __s=0; builtin eval "$__c" </dev/null >&7 2>&7 7>&- {fd}>&-; '
    "__s=$?; done; [[ $__n ]] || builtin exit; done"
)


@dataclass(frozen=True)
class ShellState:
    """What a later shell is given of an earlier one: where it was, and its exported variables.

    `cwd` is as the sandbox sees it; `exports` is bash's own text, one `declare` a line.
    """

    cwd: str
    exports: str


@dataclass(frozen=True)
class Answer:
    """How one command ended. `state` is None where the shell did not outlive it."""

    output: str
    exit_code: int
    timed_out: bool
    truncated: bool
    seconds: float
    state: ShellState | None


@dataclass(frozen=True)
class _Connection:
    """Our ends of a started shell."""

    process: SandboxProcess
    control: socket.socket
    output: int


class Shell:
    """A started shell. Make it with `start_shell`; `close` it whatever happens."""

    def __init__(self, connection: _Connection, mark: str, has_namespaces: bool) -> None:
        self._process = connection.process
        self._control = connection.control
        self._output_fd = connection.output
        self._mark = mark
        self._has_namespaces = has_namespaces
        self.killed = False
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._unsent = b""
        self._word = b""
        self._output = BoundedOutput(0)
        self._reading = True
        self._end: asyncio.Future[tuple[int, ShellState] | None] | None = None
        self._ended = self._process.watch()
        self._ended.add_done_callback(self._on_exit)
        self._loop.add_reader(self._control, self._on_control)
        self._loop.add_reader(self._output_fd, self._on_output)

    @property
    def ended(self) -> bool:
        return self._ended.done()

    @property
    def init_pid(self) -> int | None:
        """The process above all others of the sandbox, where it has namespaces."""
        return self._process.init_pid

    async def run(self, command: str, timeout_s: float, max_output_bytes: int) -> Answer:
        """Runs one command. The shell is killed when the time is up, and when the caller is cancelled.

        NUL characters, which no shell can take, are left out.
        """
        started = time.perf_counter()
        if not self._reading:
            # What background processes said meanwhile is nobody's.
            self._drain()
            self._loop.add_reader(self._output_fd, self._on_output)
            self._reading = True
        self._word = secrets.token_hex(8).encode()
        self._output = BoundedOutput(max_output_bytes)
        self._end = self._loop.create_future()
        if self.ended:
            self._end.set_result(None)
        self._send(self._word + b"\0" + command.replace("\0", "").encode("utf-8", "replace") + b"\0")
        timed_out = False
        timer = self._loop.call_later(timeout_s, self._settle, None)
        try:
            end = await self._end
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            timer.cancel()
            self._word = b""
        if end is None:
            timed_out = not self.ended
            self.kill()
            await self._ended
        self._drain()
        exit_code, state = end or (await self._process.exit_code(), None)
        seconds = time.perf_counter() - started
        output, self._output = self._output, BoundedOutput(0)
        return Answer(output.text(), exit_code, timed_out, output.truncated, seconds, state)

    def kill(self) -> None:
        """Ends the shell and all that it started, without waiting."""
        self.killed = True
        self._process.kill()

    async def close(self) -> None:
        """Ends the shell and all that it started, and returns when they are gone. Call it once.

        Raises EnvironmentFailure where something cannot be killed.
        """
        self.kill()
        try:
            async with asyncio.timeout(REAP_TIMEOUT_S):
                await asyncio.shield(self._ended)
            await self._process.exit_code()
            if not self._has_namespaces:
                mark = f"{MARK}={self._mark}".encode()
                await self._loop.run_in_executor(None, end_marked, self._process.pid, mark)
        except TimeoutError as error:
            pid = self._process.init_pid or self._process.pid
            raise EnvironmentFailure(f"process {pid} outlives SIGKILL by {REAP_TIMEOUT_S} s") from error
        finally:
            for source in (self._control.fileno(), self._output_fd):
                self._loop.remove_reader(source)
            self._loop.remove_writer(self._control.fileno())
            self._control.close()
            os.close(self._output_fd)
            self._process.release()

    def _send(self, message: bytes) -> None:
        self._unsent = message
        self._on_writable()

    def _on_writable(self) -> None:
        try:
            sent = self._control.send(self._unsent, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError:  # The shell is gone, as `_on_exit` will say, or does not listen any more.
            sent = len(self._unsent)
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self._loop.add_writer(self._control, self._on_writable)
        else:
            self._loop.remove_writer(self._control)

    def _on_control(self) -> None:
        try:
            chunk = self._control.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._loop.remove_reader(self._control)
            return
        self._received += chunk
        while self._received.count(b"\0") >= 3:
            head, cwd, exports, self._received = self._received.split(b"\0", 3)
            word, _, exit_code = head.partition(b" ")
            # Another word is that of an earlier command, or a command's own invention.
            if self._word and word == self._word:
                text = exports.decode("utf-8", "surrogateescape")
                state = ShellState(os.fsdecode(bytes(cwd)), _carried(text))
                self._settle((int(exit_code), state))
        if len(self._received) > MAX_RECORD_BYTES:
            self.kill()

    def _on_output(self) -> None:
        try:
            chunk = os.read(self._output_fd, READ_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._loop.remove_reader(self._output_fd)
            return
        self._output.add(chunk)
        if not self._word:
            # Between commands a flood from the background must not keep the loop busy: it waits in the pipe.
            self._loop.remove_reader(self._output_fd)
            self._reading = False

    def _drain(self) -> None:
        for _ in range(DRAIN_READS):
            try:
                chunk = os.read(self._output_fd, READ_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                return
            self._output.add(chunk)

    def _on_exit(self, _: asyncio.Future[None]) -> None:
        self._settle(None)

    def _settle(self, end: tuple[int, ShellState] | None) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(end)


async def start_shell(isolation: Isolation, directory: Path, environment: Mapping[str, str]) -> Shell:
    """Starts a shell over the directory; let it finish, and close what it returns.

    Raises EnvironmentFailure where no process, descriptor or memory is to be had.
    """
    loop = asyncio.get_running_loop()
    mark = secrets.token_hex(8)
    marked = dict(environment) if isolation.has_namespaces else {**environment, MARK: mark}
    try:
        connection = await loop.run_in_executor(spawner(), partial(_connect, isolation, directory, marked))
    except OSError as error:
        raise EnvironmentFailure(f"cannot start a shell in {directory}: {error.strerror or error}") from error
    return Shell(connection, mark, isolation.has_namespaces)


def _connect(isolation: Isolation, directory: Path, environment: Mapping[str, str]) -> _Connection:
    ours, theirs = socket.socketpair()
    output, their_output = os.pipe()
    info = os.pipe() if isolation.has_namespaces else None
    shell_fd = -1
    try:
        shell_fd = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, LOWEST_FD)
        loop = _LOOP.format(fd=shell_fd, ulimits=isolation.ulimits())
        shell = ["bash", "--norc", "--noprofile", "-c", loop]
        process = SandboxProcess(
            isolation.argv(directory, shell, info[1] if info else -1),
            environment,
            output=their_output,
            pass_fds=[shell_fd, *isolation.inherited_fds(), *([info[1]] if info else [])],
            info=info,
        )
    except BaseException:
        ours.close()
        os.close(output)
        raise
    finally:
        theirs.close()
        os.close(their_output)
        if shell_fd >= 0:
            os.close(shell_fd)
    ours.setblocking(False)
    os.set_blocking(output, False)
    return _Connection(process, ours, output)


# Variables that belong to one shell or one sandbox.
_OWN = tuple(f"declare -x {name}=" for name in ("HOME", "PWD", "SHLVL", "_", MARK))


def _carried(exports: str) -> str:
    return "".join([line for line in exports.splitlines(keepends=True) if not line.startswith(_OWN)])
