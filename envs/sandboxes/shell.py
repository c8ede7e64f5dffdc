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
import os
import secrets
import socket
import time
from dataclasses import dataclass

from midstream.envs.sandboxes.marks import MARK
from midstream.envs.sandboxes.output import BoundedOutput
from midstream.envs.sandboxes.protocol import ExecResult
from midstream.envs.sandboxes.tree import ProcessTree

READ_BYTES = 1 << 16
# At a command's end its own output lies in the pipe, which holds no more than this many reads.
DRAIN_READS = 16
# A shell whose variables outgrow this is ended: its state could not be recorded.
MAX_RECORD_BYTES = 1 << 20
# Of the end of a command: its word with the exit code, the directory, the exported variables.
FIELDS = 3
# Records of no command that a shell may send in its life, which no honest one does.
MAX_FOREIGN_RECORDS = 64
# What timeout(1) returns for a command that it had to end.
TIMED_OUT_EXIT_CODE = 124


@dataclass(frozen=True)
class ShellState:
    """What a later shell is given of an earlier one: where it was, and its exported variables.

    `cwd` is as the sandbox sees it; `exports` is bash's own text, one `declare` a line. Bytes that are not
    UTF-8 are surrogate escapes in both.
    """

    cwd: str
    exports: str


@dataclass(frozen=True)
class Answer:
    """How one command ended. `state` is None where the shell did not outlive it.

    `killed_from_outside` says that this was neither a command's doing nor ours.
    """

    output: str
    exit_code: int
    timed_out: bool
    truncated: bool
    seconds: float
    state: ShellState | None
    killed_from_outside: bool = False

    def result(self, notice: str, *, replaced: bool) -> ExecResult:
        """What the agent is told. `replaced`: the shell is another one than the last command's."""
        exit_code = TIMED_OUT_EXIT_CODE if self.timed_out else self.exit_code
        replaced = replaced or self.state is None or bool(notice)
        return ExecResult(
            notice + self.output, exit_code, self.timed_out, self.truncated, self.seconds, replaced
        )


class Shell:
    """A started shell. Make it with `start_shell`; `close` it whatever happens."""

    def __init__(self, tree: ProcessTree, control: socket.socket, output: int) -> None:
        """`control` and `output` are our ends, which do not block; the shell closes them."""
        self.tree = tree
        self._control = control
        self._output_fd = output
        self.killed = False
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._foreign = 0
        self._unsent = b""
        self._word = b""
        self._output = BoundedOutput(0)
        self._reading = True
        self._end: asyncio.Future[tuple[int, ShellState] | None] | None = None
        self._ended = self.tree.watch()
        self._ended.add_done_callback(self._on_exit)
        self._loop.add_reader(self._control, self._on_control)
        self._loop.add_reader(self._output_fd, self._on_output)

    @property
    def ended(self) -> bool:
        return self._ended.done()

    @property
    def init_pid(self) -> int | None:
        """The process above all others of the sandbox, where it has namespaces."""
        return self.tree.init_pid

    async def run(self, command: str | bytes, timeout_s: float, max_output_bytes: int) -> Answer:
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
        self._send(self._word + b"\0" + _encoded(command) + b"\0")
        timed_out = outside = False
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
            died = self.ended and not self.killed
            self.kill()
            await self._ended
            outside = died and await self.died_from_outside()
        self._drain()
        exit_code, state = end or (await self.tree.exit_code(), None)
        seconds = time.perf_counter() - started
        output, self._output = self._output, BoundedOutput(0)
        return Answer(output.text(), exit_code, timed_out, output.truncated, seconds, state, outside)

    async def died_from_outside(self) -> bool:
        """Whether something outside its namespaces killed this shell, which has ended without a `kill`."""
        await self.tree.exit_code()
        return self.tree.killed_from_outside()

    def kill(self) -> None:
        """Ends the shell and all that it started, without waiting."""
        self.killed = True
        self.tree.kill()

    async def close(self) -> None:
        """Ends the shell and all that it started, and returns when they are gone. Call it once.

        Raises EnvironmentFailure where something cannot be killed.
        """
        self.kill()
        try:
            await self.tree.end(self._ended)
        finally:
            for source in (self._control.fileno(), self._output_fd):
                self._loop.remove_reader(source)
            self._loop.remove_writer(self._control.fileno())
            self._control.close()
            os.close(self._output_fd)

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
        *fields, self._received = (self._received + chunk).split(b"\0")
        while len(fields) % FIELDS:
            self._received = fields.pop() + b"\0" + self._received
        for head, cwd, exports in zip(fields[::FIELDS], fields[1::FIELDS], fields[2::FIELDS], strict=True):
            word, _, exit_code = head.partition(b" ")
            if self._word and word == self._word:
                text = exports.decode("utf-8", "surrogateescape")
                state = ShellState(cwd.decode("utf-8", "surrogateescape"), _carried(text))
                self._settle((int(exit_code), state))
            else:
                # That of an earlier command, or a command's own invention, of which there may be a flood.
                self._foreign += 1
        if len(self._received) > MAX_RECORD_BYTES or self._foreign > MAX_FOREIGN_RECORDS:
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


def _encoded(command: str | bytes) -> bytes:
    """What no shell can take, NUL and halves of surrogate pairs, is left out or replaced."""
    if isinstance(command, str):
        command = command.encode("utf-8", "replace")
    return command.replace(b"\0", b"")


# Variables that belong to one shell or one sandbox.
_OWN = tuple(f"declare -x {name}=" for name in ("HOME", "PWD", "SHLVL", "_", MARK))


def _carried(exports: str) -> str:
    return "".join([line for line in exports.splitlines(keepends=True) if not line.startswith(_OWN)])
