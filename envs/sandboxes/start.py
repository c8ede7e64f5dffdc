"""Starts a shell: its descriptors, its process, the loop that it runs, its limits and its workspace."""

import asyncio
import fcntl
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.sandboxes.isolation import Isolation
from midstream.envs.sandboxes.isolation.cgroups import Cgroup
from midstream.envs.sandboxes.marks import MARK, new_mark
from midstream.envs.sandboxes.shell import Shell
from midstream.envs.sandboxes.spawning import SandboxProcess, is_complete, spawner
from midstream.envs.sandboxes.tree import ProcessTree

# A machine that is so busy that a shell needs longer is not one to run commands on.
START_TIMEOUT_S = 30.0
MAX_FAULT_BYTES = 4096
# The shell's number of its end of the socket: out of the way of those that commands pick, within the limit on
# open files, which our own numbers may exceed.
CONTROL_FD = 100

# Called with the number of a new shell's first process, None without namespaces, before its first command.
Attach = Callable[[int | None], None]

# One line, so that bash's messages name line 1 of the command. The end of a command is reported when the
# inner loop comes round again, which it does after a `continue` too; the outer loop catches a `break`. Each
# part of the report is redirected on its own, so that what a DEBUG trap prints before it goes elsewhere. A
# command's TMOUT is not for the reads of the loop.
_LOOP = (
    "exec 7>&1 </dev/null >/dev/null 2>&1; {preamble}; exec {fd}<&{inherited} {inherited}<&-; builtin umask 022; "
    "__n= __s=0; while builtin :; do while [[ $__n ]] && {{ "
    'builtin printf "%s %d\\0%s\\0" "$__n" "$__s" "$PWD" >&{fd}; builtin export -p >&{fd}; '
    'builtin printf "\\0" >&{fd}; }}; __n=; IFS= TMOUT= builtin read -r -d "" -u {fd} __n && '
    'IFS= TMOUT= builtin read -r -d "" -u {fd} __c; do __s=0; builtin eval "$__c" </dev/null >&7 2>&7 7>&- {fd}>&-; '
    "__s=$?; done; [[ $__n ]] || builtin exit; done"
)


class ShellEnded(EnvironmentFailure):
    """A new shell did not outlive its set-up."""


@dataclass(frozen=True)
class _Started:
    """A process that was started, the group that is its own, and our ends of what leads to it."""

    process: SandboxProcess
    group: Cgroup | None
    born_in_group: bool
    control: socket.socket
    output: int
    info: int | None


async def start_shell(
    isolation: Isolation, directory: Path, environment: Mapping[str, str], attach: Attach | None = None
) -> Shell:
    """Starts a shell over the directory; let it finish, and close what it returns.

    `attach` runs on a thread. Raises EnvironmentFailure where no process, descriptor or memory is to be had or
    the workspace cannot be put before the shell, ShellEnded where the shell says nothing; what `attach`
    raises, too. Nothing is left then.
    """
    loop = asyncio.get_running_loop()
    mark = new_mark(directory.name)
    try:
        started = await loop.run_in_executor(
            spawner(), partial(_spawned, isolation, directory, {**environment, MARK: mark})
        )
        shell = await _identified(started, directory, mark)
    except OSError as error:
        raise EnvironmentFailure(f"cannot start a shell in {directory}: {error.strerror or error}") from error
    tree = shell.tree
    joining: asyncio.Future[None] | None = None
    if tree.must_join_group:
        # The kernel takes milliseconds to move a process, which the shell needs to start and its files to be mounted.
        joining = loop.run_in_executor(None, tree.join_group)
    try:
        # An answer says that the namespaces are complete.
        answer = await shell.run("", START_TIMEOUT_S, MAX_FAULT_BYTES)
        if answer.state is None:
            how = "is silent" if answer.timed_out else f"ended with exit code {answer.exit_code}"
            raise ShellEnded(f"the shell of {directory} {how} at its start: {answer.output.strip()}")
        tree.hold()
        await loop.run_in_executor(None, _attach, isolation, directory, shell.init_pid, attach)
        if joining is not None:
            await joining
    except BaseException:
        if joining is not None:
            await asyncio.wait([joining])
        await shell.close()
        raise
    return shell


def _attach(isolation: Isolation, directory: Path, init_pid: int | None, attach: Attach | None) -> None:
    try:
        isolation.attach(directory, init_pid)
    except OSError as error:
        raise EnvironmentFailure(f"cannot mount {directory} in its sandbox: {error.strerror}") from error
    if attach is not None:
        attach(init_pid)


def _spawned(isolation: Isolation, directory: Path, environment: Mapping[str, str]) -> _Started:
    ours, theirs = socket.socketpair()
    output, their_output = os.pipe()
    info, their_info = os.pipe() if isolation.has_namespaces else (None, None)
    shell_fd = -1
    group: Cgroup | None = None
    process: SandboxProcess | None = None
    try:
        shell_fd = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, CONTROL_FD + 1)
        loop = _LOOP.format(inherited=shell_fd, fd=CONTROL_FD, preamble=isolation.preamble())
        shell = ["bash", "--norc", "--noprofile", "-c", loop]
        launch = isolation.launch(directory, shell, their_info)
        group = isolation.new_cgroup()
        with nullcontext(False) if group is None else group.births() as born_in_group:
            process = SandboxProcess(
                launch.argv,
                {**environment, **launch.environment},
                output=their_output,
                pass_fds=[shell_fd, *launch.fds, *(() if their_info is None else (their_info,))],
            )
    except BaseException:
        _close(ours, output, info)
        _discard(process, group)
        raise
    finally:
        _close(theirs, their_output, their_info, None if shell_fd < 0 else shell_fd)
    for end in (output, info):
        if end is not None:
            os.set_blocking(end, False)
    ours.setblocking(False)
    return _Started(process, group, born_in_group, ours, output, info)


def _discard(process: SandboxProcess | None, group: Cgroup | None) -> None:
    """Ends what has no shell yet, and returns when it is gone. Blocks; raises OSError where the group stays."""
    if process is not None:
        process.discard()
    if group is not None:
        group.remove()


async def _identified(started: _Started, directory: Path, mark: str) -> Shell:
    """The shell of a started process, once the process above all others in its namespaces is known.

    Raises OSError, and ShellEnded where nobody names that process in time. Nothing is left where it fails.
    """
    loop = asyncio.get_running_loop()
    process, ends = started.process, (started.control, started.output)
    try:
        process.identify(b"" if started.info is None else await _received(started.info, directory))
        tree = ProcessTree(process, mark, started.group, born_in_group=started.born_in_group)
        return Shell(tree, *ends)
    except BaseException:
        process.unwatch()
        for end in ends:
            loop.remove_reader(end)
        _close(*ends)
        await asyncio.shield(loop.run_in_executor(None, _discard, process, started.group))
        raise
    finally:
        _close(started.info)


async def _received(info: int, directory: Path) -> bytes:
    """What bubblewrap writes of its namespaces, or the part of it that came before its end. Raises ShellEnded."""
    loop = asyncio.get_running_loop()
    received, done = bytearray(), loop.create_future()

    def read() -> None:
        try:
            chunk = os.read(info, MAX_FAULT_BYTES)
        except BlockingIOError:
            return
        received.extend(chunk)
        if (not chunk or is_complete(bytes(received))) and not done.done():
            done.set_result(None)

    loop.add_reader(info, read)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await done
    except TimeoutError as error:
        raise ShellEnded(f"the shell of {directory} is silent at its start") from error
    finally:
        loop.remove_reader(info)
    return bytes(received)


def _close(*ends: socket.socket | int | None) -> None:
    for end in ends:
        if isinstance(end, socket.socket):
            end.close()
        elif end is not None:
            os.close(end)
