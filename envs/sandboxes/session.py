"""A shell session: a directory, and a shell in it that is there whenever a command is to be run."""

import asyncio
import logging
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.sandboxes.files import Running
from midstream.envs.sandboxes.isolation import PATH, Isolation
from midstream.envs.sandboxes.processes import Halt
from midstream.envs.sandboxes.protocol import ExecResult
from midstream.envs.sandboxes.shell import Answer, Shell, ShellState
from midstream.envs.sandboxes.start import START_TIMEOUT_S, Attach, ShellEnded, start_shell

MAX_OUTPUT_BYTES = 65536
SETUP_TIMEOUT_S = 10.0
REENTER_TIMEOUT_S = 5.0

_ENTER_HOME = 'builtin cd -- "$HOME"'
_SOURCE_STARTUP_FILE = "if [[ -f .bashrc ]]; then builtin . ./.bashrc; fi"
# The path is looked up again, in whatever is mounted there now.
_REENTER = (
    '__was_set=${OLDPWD+yes}; __old=${OLDPWD-}; builtin cd -L -- "$PWD" || builtin :; '
    "if [[ $__was_set ]]; then OLDPWD=$__old; else builtin unset -v OLDPWD; fi; builtin unset -v __was_set __old"
)

_logger = logging.getLogger(__name__)


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
        attach: Attach | None = None,
    ) -> None:
        """`setup_timeout_s`, or the timeout of the command that needs the shell, bounds the startup file.

        `attach` is called on a thread with the number of the first process of each new shell, None without
        namespaces, before its first command; what it raises fails the start.
        """
        self.directory = directory
        self.isolation = isolation
        self._root = isolation.root(directory)
        home = os.path.normpath(f"{self._root}/{workdir}")
        self._environment = {"PATH": PATH, "HOME": home, "LANG": "C.UTF-8", "TERM": "dumb"}
        self._max_output_bytes = max_output_bytes
        self._setup_timeout_s = setup_timeout_s
        self._attach = attach
        self._startup_file_works = True
        # Whether the agent may have written the startup file.
        self._worked_on = False
        self._notice = ""
        # Whether a command's doing ended the shell after the command itself.
        self._died = False
        self._halt: Halt | None = None
        self._state: ShellState | None = None
        self._shell: Shell | None = None
        # A start and an end are tasks of their own, so that a cancelled caller leaves neither half done.
        self._starting: asyncio.Task[Shell] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def init_pid(self) -> int | None:
        """The host's number of the process above all others of the shell, where it has namespaces."""
        return None if self._live_shell is None else self._live_shell.init_pid

    @property
    def alive(self) -> bool:
        """Whether the shell runs."""
        return self._live_shell is not None

    @property
    def _live_shell(self) -> Shell | None:
        shell = self._shell
        return None if shell is None or shell.ended or shell.killed else shell

    async def exec(self, command: str, timeout_s: float) -> ExecResult:
        """Runs a command in the shell; what it changes there is seen by the next one.

        A command that takes longer is killed with all that runs in the sandbox. Raises EnvironmentFailure
        where the sandbox is closed, cannot start a shell, or was killed from outside of its namespaces.
        """
        shell = await self._ready_shell(timeout_s)
        notice, self._notice, self._worked_on = self._notice, "", True
        replaced, self._died = self._died, False
        answer = await shell.run(command, timeout_s, self._max_output_bytes)
        self._check_open()
        if answer.state is not None:
            self._state = answer.state
        else:
            await self._end_shell()
            self._check_not_killed(answer)
        return answer.result(notice, replaced=replaced)

    async def exec_fresh(self, command: str, timeout_s: float) -> ExecResult:
        """Runs a command in a shell of its own, with a clean environment and without `.bashrc`.

        The sandbox's shell and its background processes end first, so that nothing interferes. Raises
        EnvironmentFailure as `exec` does.
        """
        self._check_open()
        await self._end_shell()
        try:
            shell = await self._start()
            answer = await shell.run(command, timeout_s, self._max_output_bytes)
            self._check_open()
            self._check_not_killed(answer)
            return answer.result("", replaced=False)
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
        """Gives the next shell the state that `state` returned here or elsewhere; none, where that is empty."""
        self._state, self._worked_on = None, True
        if state:
            self._state = ShellState(os.path.normpath(Path(self._root, state["cwd"])), state["exports"])

    async def start(self) -> None:
        """Has the shell there now, where a failure is one to start. Raises EnvironmentFailure as `exec` does."""
        await self._ready_shell(self._setup_timeout_s)

    async def end(self) -> None:
        """Ends the shell with all that runs in the sandbox; the next command starts another one."""
        self._check_open()
        await self._end_shell()

    async def reenter(self) -> None:
        """Has a live shell enter its directory again, after another file system was mounted over it.

        A shell that has ended is fine, and a directory that is gone: the shell stays where it was.
        """
        if self._live_shell is not None:
            await self._live_shell.run(_REENTER, REENTER_TIMEOUT_S, 0)

    @contextmanager
    def stopped(self) -> Iterator[Running]:
        """Holds all processes of the sandbox still for the block, which learns what they are. Blocks.

        Raises EnvironmentFailure where one does not stop. From any thread.
        """
        shell = self._live_shell
        if shell is None:
            yield Running()
            return
        halt = shell.tree.halt()
        halt.begin()
        try:
            yield shell.tree.describe(halt)
        finally:
            halt.end()

    def pause(self) -> None:
        """Stops all processes until `resume`; until then commands are refused. Blocks; from any thread.

        Raises EnvironmentFailure where one does not stop.
        """
        shell = self._live_shell
        if shell is not None and self._halt is None:
            halt = shell.tree.halt(even_idle=True)
            halt.begin()
            self._halt = halt

    def resume(self) -> None:
        """Lets them go on. Fine where nothing is paused."""
        halt, self._halt = self._halt, None
        if halt is not None:
            halt.end()

    async def close(self) -> None:
        """Ends every process of the sandbox and returns when all are gone; the directory stays.

        Can be called at any time and more than once; a cancelled caller does not stop it.
        """
        self._closed = True
        if self._shell is not None:
            self._shell.kill()
        while self._shell or self._starting or self._ending:
            await self._end_shell()
        self.resume()

    def _check_open(self) -> None:
        if self._closed:
            raise EnvironmentFailure(f"the sandbox in {self.directory} is closed")

    def _check_not_killed(self, answer: Answer) -> None:
        if answer.killed_from_outside:
            raise EnvironmentFailure(f"something outside the sandbox in {self.directory} killed it")

    async def _ready_shell(self, timeout_s: float) -> Shell:
        self._check_open()
        if self._halt is not None:
            raise EnvironmentFailure(f"the sandbox in {self.directory} is paused: resume it first")
        if self._shell is not None and self._shell.ended and not self._shell.killed:
            outside = await self._shell.died_from_outside()
            await self._end_shell()
            if outside:
                raise EnvironmentFailure(f"the sandbox in {self.directory} was killed between two commands")
            self._died = True
        if self._shell is not None and not self._shell.killed:
            return self._shell
        await self._end_shell()
        shell = await self._start()
        if self._startup_file_works:
            timeout_s = min(timeout_s, self._setup_timeout_s)
            answer = await shell.run(_SOURCE_STARTUP_FILE, timeout_s, self._max_output_bytes)
            self._check_open()
            self._check_not_killed(answer)
            if answer.state is None:
                await self._give_startup_file_up(answer, timeout_s)
                shell = await self._start()
        return shell if self._state is None else await self._carried_on(shell, self._state)

    async def _start(self) -> Shell:
        """A shell in HOME. Raises ShellEnded where it did not get there."""
        self._starting = asyncio.create_task(
            start_shell(self.isolation, self.directory, self._environment, self._attach)
        )
        self._shell = await asyncio.shield(self._starting)
        self._starting = None
        answer = await self._shell.run(_ENTER_HOME, START_TIMEOUT_S, self._max_output_bytes)
        self._check_open()
        if answer.state is None:
            await self._end_shell()
            raise ShellEnded(f"the shell of {self.directory} ended at its start: {answer.output.strip()}")
        return self._shell

    async def _give_startup_file_up(self, answer: Answer, timeout_s: float) -> None:
        """Raises ShellEnded where nobody but the task can have written the file."""
        await self._end_shell()
        what = f"did not end within {timeout_s:g} s" if answer.timed_out else "ended the shell"
        if not self._worked_on:
            raise ShellEnded(f"the startup file .bashrc in {self.directory} {what}: {answer.output.strip()}")
        self._startup_file_works = False
        self._notice = f"[.bashrc {what} and is not read any more]\n"

    async def _carried_on(self, shell: Shell, state: ShellState) -> Shell:
        """The shell in the state of an earlier one, as far as that can be had; what cannot is logged."""
        again = f"builtin cd -- {shlex.quote(state.cwd)}\n{state.exports}"
        answer = await shell.run(again.encode("utf-8", "surrogateescape"), START_TIMEOUT_S, MAX_OUTPUT_BYTES)
        self._check_open()
        self._check_not_killed(answer)
        if answer.state is None:
            _logger.warning("%s: the recorded variables ended the shell: %s", self.directory, answer.output)
            await self._end_shell()
            return await self._start()
        if answer.state.cwd != state.cwd:
            _logger.warning(
                "%s: the shell is in %r and not in %r: %s",
                self.directory,
                answer.state.cwd,
                state.cwd,
                answer.output,
            )
        return shell

    async def _end_shell(self) -> None:
        if self._ending is None:
            self._ending = asyncio.create_task(self._end_current())
        await asyncio.shield(self._ending)

    async def _end_current(self) -> None:
        try:
            if self._starting is not None:
                try:
                    self._shell = await self._starting
                except Exception:  # noqa: BLE001 (whoever asked for the start is told; nothing is left of it)
                    self._shell = None
            shell, self._shell, self._starting = self._shell, None, None
            if shell is not None:
                await shell.close()
        finally:
            self._ending = None
