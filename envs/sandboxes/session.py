"""A shell session: a directory, and a shell in it that is there whenever a command is to be run."""

import asyncio
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.sandboxes.isolation import PATH, Isolation
from midstream.envs.sandboxes.protocol import ExecResult
from midstream.envs.sandboxes.shell import Answer, Shell, ShellState, start_shell

MAX_OUTPUT_BYTES = 65536
SETUP_TIMEOUT_S = 30.0
# What timeout(1) returns for a command that it had to end.
TIMED_OUT_EXIT_CODE = 124

_ENTER_HOME = 'builtin cd -- "$HOME"'
_SOURCE_STARTUP_FILE = "if [[ -f .bashrc ]]; then builtin . ./.bashrc; fi"


class ShellSession:
    """Runs commands in one directory. One coroutine at a time may use it, on one event loop.

    Its shell starts with the first command, sources `.bashrc` of `workdir` where there is one, and is started
    again where a command ended it. HOME is `workdir`, relative to the sandbox's directory.
    """

    def __init__(
        self,
        directory: Path,
        isolation: Isolation,
        *,
        workdir: str = ".",
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        setup_timeout_s: float = SETUP_TIMEOUT_S,
    ) -> None:
        self.directory = directory
        self.isolation = isolation
        self._root = isolation.root(directory)
        home = os.path.normpath(f"{self._root}/{workdir}")
        self._environment = {"PATH": PATH, "HOME": home, "LANG": "C.UTF-8", "TERM": "dumb"}
        self._max_output_bytes = max_output_bytes
        self._setup_timeout_s = setup_timeout_s
        self._state: ShellState | None = None
        self._shell: Shell | None = None
        # A start and an end are tasks of their own, so that a cancelled caller leaves neither half done.
        self._starting: asyncio.Task[Shell] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def init_pid(self) -> int | None:
        """The host's number of the process above all others of the shell, where it has namespaces."""
        return None if self._shell is None or self._shell.ended else self._shell.init_pid

    async def exec(self, command: str, timeout_s: float) -> ExecResult:
        """Runs a command in the shell; what it changes there is seen by the next one.

        A command that takes longer is killed with all that runs in the sandbox. Raises EnvironmentFailure
        where the sandbox is closed, cannot start a shell, or died without a command's doing.
        """
        shell = await self._ready_shell()
        answer = await shell.run(command, timeout_s, self._max_output_bytes)
        self._check_open()
        if answer.state is not None:
            self._state = answer.state
            return _result(answer)
        await self._end_shell()
        if self.isolation.has_namespaces and answer.exit_code < 0 and not answer.timed_out:
            # From inside of the namespaces nothing can send that signal.
            raise EnvironmentFailure(f"a signal ({-answer.exit_code}) ended the sandbox in {self.directory}")
        return _result(answer)

    async def exec_fresh(self, command: str, timeout_s: float) -> ExecResult:
        """Runs a command in a shell of its own, with a clean environment and without `.bashrc`.

        The sandbox's shell and its background processes end first, so that nothing interferes. Raises
        EnvironmentFailure as `exec` does.
        """
        self._check_open()
        await self._end_shell()
        try:
            shell = await self._start(_ENTER_HOME)
            answer = await shell.run(command, timeout_s, self._max_output_bytes)
            self._check_open()
            return _result(answer)
        finally:
            await self._end_shell()

    def state(self) -> dict[str, str]:
        """What a snapshot keeps beside the files: the working directory and the exported variables."""
        if self._state is None:
            return {}
        cwd = self._state.cwd
        if cwd == self._root or cwd.startswith(self._root + "/"):
            cwd = os.path.relpath(cwd, self._root)
        return {"cwd": cwd, "exports": self._state.exports}

    def set_state(self, state: Mapping[str, str]) -> None:
        """Gives the shell, before its first command, the state that `state` returned here or elsewhere."""
        if state:
            self._state = ShellState(os.path.normpath(Path(self._root, state["cwd"])), state["exports"])

    async def close(self) -> None:
        """Ends every process of the sandbox and returns when all are gone; the directory stays.

        Can be called at any time and more than once; a cancelled caller does not stop it.
        """
        self._closed = True
        if self._shell is not None:
            self._shell.kill()
        while self._shell or self._starting or self._ending:
            await self._end_shell()

    def _check_open(self) -> None:
        if self._closed:
            raise EnvironmentFailure(f"the sandbox in {self.directory} is closed")

    async def _ready_shell(self) -> Shell:
        self._check_open()
        if self._shell is not None and self._shell.ended and not self._shell.killed:
            await self._end_shell()
            raise EnvironmentFailure(f"the sandbox in {self.directory} died between two commands")
        if self._shell is not None and not self._shell.killed:
            return self._shell
        await self._end_shell()
        try:
            shell = await self._start(f"{_ENTER_HOME}; {_SOURCE_STARTUP_FILE}")
        except ShellEnded:
            # The agent may have written the file: it must not look like a failure of the machine.
            shell = await self._start(_ENTER_HOME)
        if self._state is not None:
            again = f"builtin cd -- {shlex.quote(self._state.cwd)}\n{self._state.exports}"
            await shell.run(again, self._setup_timeout_s, 0)
        return shell

    async def _start(self, setup: str) -> Shell:
        """A shell that has run `setup`. Raises ShellEnded where it did not outlive that."""
        self._starting = asyncio.create_task(start_shell(self.isolation, self.directory, self._environment))
        self._shell = await asyncio.shield(self._starting)
        self._starting = None
        answer = await self._shell.run(setup, self._setup_timeout_s, self._max_output_bytes)
        self._check_open()
        if answer.state is None:
            await self._end_shell()
            how = "is silent" if answer.timed_out else f"ended with exit code {answer.exit_code}"
            raise ShellEnded(f"the shell of {self.directory} {how} at its start: {answer.output.strip()}")
        return self._shell

    async def _end_shell(self) -> None:
        if self._ending is None:
            self._ending = asyncio.create_task(self._end_current())
        await asyncio.shield(self._ending)

    async def _end_current(self) -> None:
        try:
            if self._starting is not None:
                try:
                    self._shell = await self._starting
                except EnvironmentFailure:
                    self._shell = None
            shell, self._shell, self._starting = self._shell, None, None
            if shell is not None:
                await shell.close()
        finally:
            self._ending = None


class ShellEnded(EnvironmentFailure):
    """A new shell did not outlive its set-up."""


def _result(answer: Answer) -> ExecResult:
    exit_code = TIMED_OUT_EXIT_CODE if answer.timed_out else answer.exit_code
    return ExecResult(
        answer.output, exit_code, answer.timed_out, answer.truncated, answer.seconds, answer.state is None
    )
