"""Starts a shell: its descriptors, its process, the loop that it runs, its limits and its workspace."""

import asyncio
import fcntl
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.sandboxes.isolation import Isolation
from midstream.envs.sandboxes.isolation.cgroups import Cgroup
from midstream.envs.sandboxes.marks import MARK, new_mark
from midstream.envs.sandboxes.shell import Shell
from midstream.envs.sandboxes.spawning import SandboxProcess, spawner
from midstream.envs.sandboxes.tree import ProcessTree

# A machine that is so busy that a shell needs longer is not one to run commands on.
START_TIMEOUT_S = 30.0
MAX_FAULT_BYTES = 4096
# The shell's numbers of our descriptors start here, out of the way of those that commands pick.
LOWEST_FD = 100

# Called with the number of a new shell's first process, None without namespaces, before its first command.
Attach = Callable[[int | None], None]

# One line, so that bash's messages name line 1 of the command. The end of a command is reported when the
# inner loop comes round again, which it does after a `continue` too; the outer loop catches a `break`.
_LOOP = (
    "exec 7>&1 </dev/null >/dev/null 2>&1; {preamble}; builtin umask 022; __n= __s=0; while builtin :; do while "
    '[[ $__n ]] && {{ builtin printf "%s %d\\0%s\\0" "$__n" "$__s" "$PWD"; builtin export -p; '
    'builtin printf "\\0"; }} >&{fd}; __n=; IFS= builtin read -r -d "" -u {fd} __n && '
    'IFS= builtin read -r -d "" -u {fd} __c; do __s=0; builtin eval "$__c" </dev/null >&7 2>&7 7>&- {fd}>&-; '
    "__s=$?; done; [[ $__n ]] || builtin exit; done"
)


class ShellEnded(EnvironmentFailure):
    """A new shell did not outlive its set-up."""


async def start_shell(
    isolation: Isolation, directory: Path, environment: Mapping[str, str], attach: Attach | None = None
) -> Shell:
    """Starts a shell over the directory; let it finish, and close what it returns.

    `attach` runs on a thread. Raises EnvironmentFailure where no process, descriptor or memory is to be had or
    the workspace cannot be put before the shell, ShellEnded where the shell says nothing; what `attach`
    raises, too. Nothing is left then.
    """
    loop = asyncio.get_running_loop()
    try:
        connection = await loop.run_in_executor(
            spawner(), partial(_connect, isolation, directory, environment, new_mark())
        )
    except OSError as error:
        raise EnvironmentFailure(f"cannot start a shell in {directory}: {error.strerror or error}") from error
    shell = Shell(*connection)
    try:
        # An answer says that the namespaces are complete.
        answer = await shell.run("", START_TIMEOUT_S, MAX_FAULT_BYTES)
        if answer.state is None:
            how = "is silent" if answer.timed_out else f"ended with exit code {answer.exit_code}"
            raise ShellEnded(f"the shell of {directory} {how} at its start: {answer.output.strip()}")
        await loop.run_in_executor(None, _attach, isolation, directory, shell.init_pid, attach)
    except BaseException:
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


def _connect(
    isolation: Isolation, directory: Path, environment: Mapping[str, str], mark: str
) -> tuple[ProcessTree, socket.socket, int]:
    ours, theirs = socket.socketpair()
    output, their_output = os.pipe()
    info = os.pipe() if isolation.has_namespaces else None
    shell_fd = -1
    group: Cgroup | None = None
    process: SandboxProcess | None = None
    try:
        group = isolation.new_cgroup()
        shell_fd = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, LOWEST_FD)
        loop = _LOOP.format(fd=shell_fd, preamble=isolation.preamble())
        shell = ["bash", "--norc", "--noprofile", "-c", loop]
        launch = isolation.launch(directory, shell, info[1] if info else -1)
        process = SandboxProcess(
            launch.argv,
            {**environment, **launch.environment, MARK: mark},
            output=their_output,
            pass_fds=[shell_fd, *launch.fds, *([info[1]] if info else [])],
            info=info,
        )
        if group is not None:
            # The shell has started nothing yet: it waits for its first command.
            group.add(process.init_pid or process.pid)
    except BaseException:
        ours.close()
        os.close(output)
        if process is not None:
            process.discard()
        if group is not None:
            group.remove()
        raise
    finally:
        theirs.close()
        os.close(their_output)
        if shell_fd >= 0:
            os.close(shell_fd)
    ours.setblocking(False)
    os.set_blocking(output, False)
    return ProcessTree(process, mark, group), ours, output
