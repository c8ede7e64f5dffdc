"""A workspace: a directory of files in a sandbox, worked on by shell commands, scored by a check command."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace

from midstream.conf.schema import LayerConfig
from midstream.envs.errors import (
    AgentFault,
    EnvironmentFailure,
    RestoreMismatch,
    SnapshotError,
    WorkspaceLimit,
)
from midstream.envs.pool.leases import Lease
from midstream.envs.pool.pool import Pool
from midstream.envs.protocol import Observation, Snapshot, Step, Task
from midstream.envs.retention import Retention, resting
from midstream.envs.sandboxes.choose import choose_backend
from midstream.envs.sandboxes.directories import sandbox_root
from midstream.envs.sandboxes.isolation import choose_isolation
from midstream.envs.sandboxes.protocol import ExecResult, Sandbox, SandboxSpec
from midstream.envs.settings import pool_settings, process_limits, snapshot_path, tree_limits
from midstream.envs.store.store import SnapshotStore
from midstream.envs.tasks import check_metadata


@dataclass
class Counters:
    """What a factory's environments did so far.

    `restores_checked` counts states that were compared with their snapshot before a rollout went on in them,
    `restores_bad` those that differed; `faults` counts episodes that the agent itself made impossible.
    """

    starts: int = 0
    resumes: int = 0
    restores_checked: int = 0
    restores_bad: int = 0
    failures: int = 0
    faults: int = 0


class WorkspaceEnvironment:
    """One live workspace, made by its factory.

    A step that fails or is cancelled leaves it unusable, since nobody knows how far the command got: close it
    and resume from the last snapshot.
    """

    def __init__(
        self, factory: "WorkspaceFactory", task: Task, lease: Lease, snapshot: Snapshot | None
    ) -> None:
        """`snapshot` is the state that the sandbox is in, None for the task's beginning."""
        self._factory = factory
        self._settings = factory.settings
        self._task = task
        self._lease: Lease | None = lease
        # The snapshot of the present state, None where it has none, and the last one that was taken.
        self._at: Snapshot | None = snapshot
        self._last: Snapshot | None = snapshot
        self._is_fresh = snapshot is None
        self._closing: asyncio.Task[None] | None = None

    async def reset(self, task: Task) -> Observation:
        """The beginning of the task, made anew unless nothing was done since the last reset to it.

        Raises what the factory's `start` does.
        """
        if task != self._task or not self._is_fresh:
            async with self._used():
                await self._factory.pool.release(self._held())
                self._lease = None
                self._lease = await self._factory._begun(task)
            self._task, self._at, self._is_fresh = task, None, True
        return Observation("")

    async def step(self, action: str) -> Step:
        """Runs the action in the shell; its output is the observation.

        The `done_command` ends the episode, after the command of that name has run if there is one. A command
        that takes too long, ends the shell or floods its output is told to the agent, not raised.
        """
        done = action.strip() == self._settings.done_command
        command = _run_if_known(action.strip()) if done else action
        async with self._used() as sandbox:
            self._at, self._is_fresh = None, False
            result = await sandbox.exec(command, self._settings.step_timeout_s)
        info = {
            "exit_code": result.exit_code,
            "timed_out": result.timed_out,
            "truncated": result.truncated,
            "shell_replaced": result.shell_replaced,
            "seconds": result.seconds,
        }
        return Step(_observed(result, self._settings.step_timeout_s), done, None, info)

    async def snapshot(self) -> Snapshot:
        """Files, working directory and exported variables now; the previous snapshot where all are the same.

        That of the task's beginning has no parent and lists no changes. Not kept: processes, shell functions
        and variables that are not exported, /tmp. Background processes are stopped while the files are read.
        Raises SnapshotError, after which it can be tried again, and WorkspaceLimit where the agent made the
        workspace too large or unrecordable.
        """
        async with self._used() as sandbox:
            with self._factory.own_doing() if self._is_fresh else nullcontext():
                snapshot = await sandbox.snapshot()
        if self._at is None or self._at.id != snapshot.id:
            # What the task itself brought is nobody's doing, and how a backend came by it is nobody's business.
            self._at = replace(snapshot, parent=None, changes=()) if self._is_fresh else snapshot
        self._last = self._at
        return self._at

    async def score(self) -> float:
        """1.0 if `eval_cmd` exits 0 in a fresh shell with a clean environment, else 0.0, a timeout too.

        What the agent left running is ended first.
        """
        async with self._used() as sandbox:
            self._at, self._is_fresh = None, False
            eval_cmd = self._task.metadata["eval_cmd"]
            result = await sandbox.exec_fresh(eval_cmd, self._settings.eval_timeout_s)
        return float(result.exit_code == 0)

    async def rest(self) -> None:
        """Ends this environment for a rollout that will go on from its last snapshot.

        The last snapshot is kept whatever happens to this process; the sandbox is parked if it is in that
        state and there is room, so that the rollout may find it again.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._rest())
        await asyncio.shield(self._closing)

    async def close(self) -> None:
        """Ends every process and removes the directory; at any time, also twice."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _rest(self) -> None:
        try:
            if self._last is not None:
                await self._factory.retention.keep(self._last)
        finally:
            if self._lease is not None and self._at is not None:
                await self._factory.pool.park(self._lease, self._at)
            else:
                await self._close()

    async def _close(self) -> None:
        if self._lease is not None:
            await self._factory.pool.release(self._lease)

    def _held(self) -> Lease:
        if self._closing is not None or self._lease is None:
            raise EnvironmentFailure("this environment is closed: resume from its last snapshot")
        return self._lease

    @asynccontextmanager
    async def _used(self) -> AsyncIterator[Sandbox]:
        """The sandbox, for one operation that counts as a sign of life."""
        async with self._factory._counted():
            lease = self._held()
            self._factory.pool.heartbeat(lease)
            yield lease.sandbox


class WorkspaceFactory:
    """Starts and resumes workspaces, each in a sandbox of its own; named by `environment.factory`.

    A factory of your own may name another `environment_class`, which it makes as this one is made.
    """

    environment_class = WorkspaceEnvironment
    # Raises TasksError for the metadata of a task that no workspace can be made of.
    check_task = staticmethod(check_metadata)

    def __init__(self, config: LayerConfig) -> None:
        """Checks that the isolation and the backend work.

        Raises IsolationUnavailable, SandboxFailure, ValueError or SnapshotError.
        """
        self.settings = config.environment
        self.counters = Counters()
        isolation = choose_isolation(
            self.settings.isolation, process_limits(self.settings.limits), self.settings.network
        )
        root = sandbox_root(self, self.settings.sandbox_root)
        store = SnapshotStore(
            snapshot_path(config) or root / "snapshots",
            tree_limits(self.settings.limits),
            fsync=config.snapshots.fsync,
        )
        self.backend = choose_backend(
            self.settings.backend, root, store, isolation, setup_timeout_s=self.settings.step_timeout_s
        )
        self.pool = Pool(self.backend, pool_settings(self.settings.pool, root))
        self.retention = Retention(
            self.backend,
            store,
            owner=resting(config.run_dir),
            owns_store=config.snapshots.path is None,
            keeps_all=config.snapshots.keep == "all",
        )

    async def start(self, task: Task) -> WorkspaceEnvironment:
        """A workspace with the task's files, its `pre_commands` run.

        Raises TasksError for metadata that is not as `load_tasks` checks it, EnvironmentFailure where no
        sandbox is to be had or a command of `pre_commands` does not exit 0.
        """
        async with self._counted():
            lease = await self._begun(task)
        self.counters.starts += 1
        return self.environment_class(self, task, lease, None)

    async def resume(self, task: Task, snapshot: Snapshot) -> WorkspaceEnvironment:
        """A workspace in the state of the snapshot, compared with it: a parked one, or a new one.

        Raises RestoreMismatch where that differs, SnapshotMissing where the store lacks it.
        """
        check_metadata(task.metadata)
        async with self._counted():
            try:
                lease = await self.pool.resume(_spec(task, self.settings.max_output_bytes), snapshot)
            except RestoreMismatch:
                self.counters.restores_checked += 1
                self.counters.restores_bad += 1
                raise
        self.counters.restores_checked += 1
        self.counters.resumes += 1
        return self.environment_class(self, task, lease, snapshot)

    async def keep(self, snapshots: Sequence[Snapshot]) -> None:
        """Has these outlast this process, also through a power cut.

        Raises SnapshotError for the first that cannot be kept; the others are all the same.
        """
        failures = []
        for snapshot in snapshots:
            try:
                await self.retention.keep(snapshot)
            except SnapshotError as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def adopt(self, needed: Collection[str]) -> frozenset[str]:
        """Takes over what earlier processes of this run kept, as far as it is needed; the rest may go.

        Returns the ids of what is needed and cannot be restored. Raises SnapshotError.
        """
        return self.retention.adopt(needed)

    async def forget(self, snapshots: Sequence[Snapshot]) -> None:
        """Nobody will resume from these: what is parked under them ends, and the store may drop them."""
        for snapshot in snapshots:
            await self.pool.discard(snapshot)
        await self.retention.forget(snapshots)

    def metrics(self) -> dict[str, float]:
        """`sandbox/*` of the pool and `env/*` of the environments, since the start; zeros included."""
        pool = {f"sandbox/{name}": value for name, value in self.pool.metrics().items()}
        return pool | {f"env/{name}": float(value) for name, value in vars(self.counters).items()}

    @contextmanager
    def own_doing(self) -> Iterator[None]:
        """What the task itself brought is not the agent's fault: a task too large is an EnvironmentFailure."""
        try:
            yield
        except WorkspaceLimit as limit:
            fix = "give environment.limits room for it"
            raise EnvironmentFailure(
                f"the task's own workspace is beyond the limits: {limit}; {fix}"
            ) from limit

    async def close(self) -> None:
        """Ends every sandbox and gives all back; the snapshots stay."""
        await self.pool.close()
        try:
            await self.retention.close()
        finally:
            await self.backend.close()

    async def _begun(self, task: Task) -> Lease:
        check_metadata(task.metadata)
        with self.own_doing():
            lease = await self.pool.lease(_spec(task, self.settings.max_output_bytes))
        try:
            for command in task.metadata.get("pre_commands", ()):
                result = await lease.sandbox.exec(command, self.settings.eval_timeout_s)
                if result.exit_code != 0:
                    fault = f"exited with {result.exit_code}: {result.output}"
                    raise EnvironmentFailure(f"the task's pre_command {command!r} {fault}")
        except BaseException:
            await self.pool.release(lease)
            raise
        return lease

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        try:
            yield
        except AgentFault:
            self.counters.faults += 1
            raise
        except EnvironmentFailure:
            self.counters.failures += 1
            raise


def _spec(task: Task, max_output_bytes: int) -> SandboxSpec:
    return SandboxSpec(
        files=task.metadata.get("files", {}),
        workdir=task.metadata.get("workdir", "."),
        base=task.key,
        max_output_bytes=max_output_bytes,
    )


def _run_if_known(name: str) -> str:
    """A command that runs the one of this name if there is one, and does nothing otherwise."""
    # Quoted always: a name such as `done` is a word of the shell's grammar.
    name = "'" + name.replace("'", "'\\''") + "'"
    return f"if {{ builtin declare -F -- {name} || builtin type -P -- {name}; }} >/dev/null; then {name}; fi"


def _observed(result: ExecResult, timeout_s: float) -> str:
    text = result.output.rstrip("\n")
    if result.timed_out:
        return f"{text}\n[timed out after {timeout_s:g} s; a new shell was started]".lstrip("\n")
    return text or (f"[exit {result.exit_code}]" if result.exit_code != 0 else "")
