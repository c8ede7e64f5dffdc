"""All processes of one shell, itself among them: how they are found, held still and ended."""

import asyncio

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.sandboxes.files import Running
from midstream.envs.sandboxes.isolation.cgroups import Cgroup
from midstream.envs.sandboxes.isolation.unisolated import is_watcher
from midstream.envs.sandboxes.marks import end_all, processes_of
from midstream.envs.sandboxes.processes import Halt, describe, with_descendants
from midstream.envs.sandboxes.spawning import REAP_TIMEOUT_S, SandboxProcess


class ProcessTree:
    """With namespaces: what is below their first process. Without: what the session, the mark in the
    environment, or the control group shows.
    """

    def __init__(
        self, process: SandboxProcess, mark: str, group: Cgroup | None, *, born_in_group: bool = False
    ) -> None:
        """`born_in_group` says that the process was started in its group."""
        self._process = process
        # Whether `join_group` is still to be called.
        self.must_join_group = group is not None and not born_in_group
        self._mark = mark
        self._group = group

    @property
    def init_pid(self) -> int | None:
        """The host's number of the process above all others, where there are namespaces."""
        return self._process.init_pid

    def join_group(self) -> None:
        """Moves the shell into its group, before it starts anything. Blocks; raises EnvironmentFailure."""
        assert self._group is not None
        self.must_join_group = False
        try:
            self._group.add(self._shell)
        except OSError as error:
            raise EnvironmentFailure(
                f"cannot move process {self._shell} into {self._group.path}: {error.strerror}"
            ) from error

    def watch(self) -> asyncio.Future[None]:
        """A future of the running loop that is done when the shell has ended. Call it once."""
        return self._process.watch()

    async def exit_code(self) -> int:
        return await self._process.exit_code()

    def hold(self) -> None:
        """Has the end of the shell looked at, once its namespaces are complete, before it is forgotten."""
        self._process.hold()

    def killed_from_outside(self) -> bool:
        """Whether something outside its namespaces killed the shell, whose `exit_code` has returned.

        The kernel, for its group's limit on memory, is not outside. Without namespaces nothing is.
        """
        if not self._process.killed_from_outside or self._group is None:
            return self._process.killed_from_outside
        try:
            return self._group.out_of_memory_kills() == 0
        except OSError:
            return True

    def find(self) -> list[int]:
        """The pids of all processes, but for the watcher that outlives a killed job."""
        if self.init_pid is not None:
            return with_descendants(self.init_pid)
        return [pid for pid in self._unisolated() if not is_watcher(pid)]

    def halt(self, *, even_idle: bool = False) -> Halt:
        """What can hold all of them still; with `even_idle` also a shell that waits and is alone."""
        return Halt(self.find, None if even_idle else self._shell)

    def describe(self, halt: Halt) -> Running:
        """What the processes that are held mean for whoever records the files."""
        return describe(halt.pids(), self._shell, self.init_pid)

    def kill(self) -> None:
        """Ends the shell and, with namespaces, all of them; does not wait."""
        self._process.kill()

    async def end(self, ended: asyncio.Future[None]) -> None:
        """Returns when all are gone, of which `ended` says that the shell is; `kill` came before. Call it once.

        Raises EnvironmentFailure where one cannot be killed.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(REAP_TIMEOUT_S):
                await asyncio.shield(ended)
            await self._process.exit_code()
            if self.init_pid is None:
                await loop.run_in_executor(None, end_all, self._unisolated)
        except TimeoutError as error:
            raise EnvironmentFailure(
                f"process {self._shell} or one below it outlives SIGKILL: {error}"
            ) from error
        finally:
            self._process.release()
            if self._group is not None:
                await loop.run_in_executor(None, self._remove_group, self._group)

    @property
    def _shell(self) -> int:
        return self.init_pid or self._process.pid

    def _unisolated(self) -> list[int]:
        found = set(processes_of(self._process.pid, self._mark))
        if self._group is not None:
            found.update(self._group.pids())
        return sorted(found)

    @staticmethod
    def _remove_group(group: Cgroup) -> None:
        try:
            group.remove()
        except OSError as error:
            raise EnvironmentFailure(f"cannot remove control group {group.path}: {error.strerror}") from error
