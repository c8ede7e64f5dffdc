"""A workspace: a directory of files in a sandbox, worked on by shell commands, scored by a check command."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from midstream.conf.schema import LayerConfig
from midstream.envs.errors import EnvironmentFailure, RestoreMismatch, SnapshotError
from midstream.envs.protocol import Observation, Snapshot, Step, Task
from midstream.envs.sandboxes.directories import give_tree, sandbox_root, write_files
from midstream.envs.sandboxes.isolation import choose_isolation
from midstream.envs.sandboxes.processes import stopped
from midstream.envs.sandboxes.protocol import ExecResult, SandboxSpec
from midstream.envs.sandboxes.session import ShellSession
from midstream.envs.store.restore import remove_tree
from midstream.envs.store.store import Baseline, SnapshotStore
from midstream.envs.tasks import check_metadata

# Files are read and written by threads: four halve the time of one, more gain nothing.
FILE_THREADS = 4

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Counters:
    """What a factory's environments did so far; `live` is how many are open now."""

    starts: int = 0
    resumes: int = 0
    restores_checked: int = 0
    restores_bad: int = 0
    failures: int = 0
    live: int = 0


class WorkspaceFactory:
    """Starts and resumes workspaces, each in a sandbox of its own; named by `environment.factory`."""

    def __init__(self, config: LayerConfig) -> None:
        """Checks that the isolation works. Raises IsolationUnavailable, ValueError or SnapshotError."""
        self.settings = config.environment
        self.isolation = choose_isolation(self.settings.isolation)
        self.counters = Counters()
        self.files = ThreadPoolExecutor(FILE_THREADS, "midstream-files")
        self._root = sandbox_root(self, self.settings.sandbox_root)
        path = config.snapshots.path
        if path is None:
            path = (
                Path(config.run_dir) / "snapshots" if config.run_dir is not None else self._root / "snapshots"
            )
        self.store = SnapshotStore(path)

    async def start(self, task: Task) -> "WorkspaceEnvironment":
        """A workspace with the task's files, its `pre_commands` run."""
        async with self._opened() as environment:
            await environment.reset(task)
            self.counters.starts += 1
        return environment

    async def resume(self, task: Task, snapshot: Snapshot) -> "WorkspaceEnvironment":
        """A new workspace in the state of the snapshot, read back and compared with it.

        Raises RestoreMismatch where that differs, SnapshotMissing where the store lacks it.
        """
        async with self._opened() as environment:
            await environment.restore(task, snapshot)
            self.counters.resumes += 1
        return environment

    @asynccontextmanager
    async def _opened(self) -> "AsyncIterator[WorkspaceEnvironment]":
        """An environment that stays open unless the block fails or is cancelled."""
        environment = WorkspaceEnvironment(self, self._root / f"{os.getpid()}-{secrets.token_hex(6)}")
        self.counters.live += 1
        try:
            yield environment
        except BaseException:
            await environment.close()
            raise


class WorkspaceEnvironment:
    """One live workspace, made by its factory.

    A step that fails or is cancelled leaves it unusable, since nobody knows how far the command got: close it
    and resume from the last snapshot.
    """

    def __init__(self, factory: WorkspaceFactory, directory: Path) -> None:
        self._factory = factory
        self._settings = factory.settings
        self._directory = directory
        self._sandbox: ShellSession | None = None
        self._task: Task | None = None
        self._baseline = Baseline()
        self._snapshot: Snapshot | None = None
        self._steps = 0
        self._usable = True
        self._file_work: asyncio.Future[Any] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def reset(self, task: Task) -> Observation:
        """The beginning of the task, made anew unless nothing was done since the last reset to it.

        Raises TasksError for metadata that is not as `load_tasks` checks it, EnvironmentFailure where a file
        cannot be written or a command of `pre_commands` does not exit 0.
        """
        async with self._used():
            if task != self._task or self._steps > 0:
                check_metadata(task.metadata)
                if self._sandbox is not None:
                    await self._sandbox.close()
                self._task, self._steps = task, 0
                self._baseline, self._snapshot = Baseline(), None
                spec = SandboxSpec(task.metadata.get("files", {}), task.metadata.get("workdir", "."))
                await self._in_thread(write_files, self._directory, spec, self._factory.isolation.owner)
                sandbox = self._new_sandbox(task)
                # With nothing to prepare the shell still starts here, where a failure is a failure to start.
                for command in task.metadata.get("pre_commands") or [":"]:
                    result = await sandbox.exec(command, self._settings.eval_timeout_s)
                    if result.exit_code != 0:
                        fault = f"exited with {result.exit_code}: {result.output}"
                        raise EnvironmentFailure(f"the task's pre_command {command!r} {fault}")
        return Observation("")

    async def step(self, action: str) -> Step:
        """Runs the action in the shell; its output is the observation.

        The `done_command` ends the episode, after the command of that name has run if there is one. A command
        that takes too long, ends the shell or floods its output is told to the agent, not raised.
        """
        done = action.strip() == self._settings.done_command
        command = _run_if_known(action.strip()) if done else action
        async with self._used() as sandbox:
            self._steps += 1
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

        Not kept: processes, shell functions and variables that are not exported, /tmp. Background processes
        are stopped while the files are read. Raises SnapshotError, after which it can be tried again.
        """
        async with self._used() as sandbox:
            try:
                snapshot = await self._in_thread(self._put, sandbox.init_pid, sandbox.state())
            except SnapshotError:
                self._usable = True
                raise
        self._snapshot = snapshot
        return snapshot

    async def score(self) -> float:
        """1.0 if `eval_cmd` exits 0 in a fresh shell with a clean environment, else 0.0, a timeout too.

        What the agent left running is ended first.
        """
        async with self._used() as sandbox:
            assert self._task is not None
            eval_cmd = self._task.metadata["eval_cmd"]
            result = await sandbox.exec_fresh(eval_cmd, self._settings.eval_timeout_s)
        return float(result.exit_code == 0)

    async def close(self) -> None:
        """Ends every process and removes the directory; at any time, also twice."""
        if self._closing is None:
            self._usable = False
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def restore(self, task: Task, snapshot: Snapshot) -> None:
        """Puts a new environment into the state of the snapshot. For the factory's `resume`."""
        async with self._used():
            check_metadata(task.metadata)
            # A step was taken somewhere: a reset must not take this for the task's beginning.
            self._task, self._steps, self._snapshot = task, 1, snapshot
            store, counters = self._factory.store, self._factory.counters
            digest = await self._in_thread(store.restore, snapshot, self._directory, baseline=self._baseline)
            counters.restores_checked += 1
            if digest != snapshot.digest:
                counters.restores_bad += 1
                raise RestoreMismatch(
                    f"snapshot {snapshot.id} has digest {snapshot.digest}, what was restored has {digest}"
                )
            if self._factory.isolation.owner is not None:
                await self._in_thread(give_tree, self._directory, self._factory.isolation.owner)
            sandbox = self._new_sandbox(task)
            sandbox.set_state(self._baseline.state)
            await sandbox.exec(":", self._settings.eval_timeout_s)

    def _new_sandbox(self, task: Task) -> ShellSession:
        self._sandbox = ShellSession(
            self._directory,
            self._factory.isolation,
            workdir=task.metadata.get("workdir", "."),
            max_output_bytes=self._settings.max_output_bytes,
        )
        return self._sandbox

    def _put(self, init_pid: int | None, state: dict[str, str]) -> Snapshot:
        with stopped(init_pid) if init_pid is not None else nullcontext():
            return self._factory.store.put(
                self._directory, self._snapshot, baseline=self._baseline, state=state
            )

    @asynccontextmanager
    async def _used(self) -> "AsyncIterator[ShellSession]":
        """Holds the environment for one operation; whatever ends that early leaves it unusable."""
        if not self._usable:
            raise EnvironmentFailure(
                "this environment is closed, in use, or failed or was cancelled in a step: close it and "
                "resume from its last snapshot"
            )
        self._usable = False
        try:
            yield cast(ShellSession, self._sandbox)
        except EnvironmentFailure:
            self._factory.counters.failures += self._closing is None
            raise
        self._usable = self._closing is None

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._factory.files, partial(work, *args, **kwargs))
        # A cancelled caller does not stop the thread; `close` waits for it.
        self._file_work = future
        return await asyncio.shield(future)

    async def _close(self) -> None:
        try:
            if self._sandbox is not None:
                await self._sandbox.close()
        finally:
            if self._file_work is not None:
                await asyncio.wait([self._file_work])
            self._factory.counters.live -= 1
            try:
                await self._in_thread(remove_tree, self._directory)
            except OSError as error:
                raise EnvironmentFailure(str(error)) from error


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
