"""A workspace whose snapshots are layers: taken in the time of a mount, whatever the size of the tree."""

import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from midstream.envs.errors import EnvironmentFailure, SnapshotError
from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.files import Running
from midstream.envs.sandboxes.isolation.bubblewrap import INSIDE
from midstream.envs.sandboxes.overlay.layers import Layers
from midstream.envs.sandboxes.overlay.mounts import MAX_LOWERS, attach, holds_open
from midstream.envs.sandboxes.overlay.stacks import Stack
from midstream.envs.sandboxes.protocol import SandboxSpec
from midstream.envs.store.store import Baseline


@dataclass(eq=False)
class Frozen:
    """A state that nothing changes any more, on its way into the store, where it is `snapshot`.

    `stack` is its layers; `changed` says whether the newest is its own. `remounted`: the shell must enter its
    directory again.
    """

    stack: Stack
    state: Mapping[str, str]
    changed: bool
    remounted: bool = False
    snapshot: Snapshot | None = None


class OverlayFiles:
    """The workspace of one sandbox: an overlay of shared layers and one that it writes to.

    A snapshot is two steps, of which the sandbox waits for the first: `freeze` closes what was written as a
    layer, `harvest` takes that layer into the store, meanwhile or later, in any thread.
    """

    def __init__(self, directory: Path, layers: Layers) -> None:
        """`directory` is an empty folder, over which the mount is put inside of the sandbox."""
        self.directory = directory
        self._layers = layers
        # Its layers, held; where it writes to; and the mount of both that is, or is to be, its workspace.
        self._stack: Stack = ()
        self._live = ""
        self._mount = -1
        self._attached = False
        self._harvesting = threading.RLock()
        self._pending: deque[Frozen] = deque()
        # The last snapshot with its state, and the one whose tree is that of the layers harvested last.
        self._last: Snapshot | None = None
        self._last_state: Mapping[str, str] = {}
        self._below: Snapshot | None = None
        self._baseline = Baseline()

    def create(self, spec: SandboxSpec) -> None:
        known = self._layers.base(spec)
        self._begin(known.stack, known.snapshot, known.state)

    def attach(self, init_pid: int | None) -> None:
        if init_pid is None:
            raise EnvironmentFailure(
                "an overlay cannot be put before a shell without namespaces: set environment.backend=store, or "
                "environment.isolation=bubblewrap"
            )
        try:
            if self._attached:
                # The mount went with the namespaces of an earlier shell; what that wrote is still there.
                self._close_mount()
                work = self._layers.places.new_work(self._live)
                self._mount = self._layers.mounts.new_mount(self._stack, self._live, work)
            attach(self._mount, init_pid, INSIDE, self.directory.stat(), replaces=False)
            self._attached = True
        except OSError as error:
            raise EnvironmentFailure(f"cannot mount the workspace {self.directory.name}: {error}") from error

    def open(self, init_pid: int | None) -> int:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._mount)

    def snapshot(self, state: Mapping[str, str], running: Running) -> tuple[Snapshot, bool]:
        frozen = self.freeze(state, running)
        return self.harvest(frozen), frozen.remounted

    def freeze(self, state: Mapping[str, str], running: Running) -> Frozen:
        """Closes what was written as a layer and mounts a new one over it.

        Where other processes run or the shell has a file open, which could go on writing to the closed layer,
        the mount stays and the state is harvested at once. Raises WorkspaceLimit or SnapshotError, with
        nothing changed, and EnvironmentFailure where the workspace is lost.
        """
        if not self._layers.places.written(self._live).exists():
            return self._frozen(state, changed=False)
        if self._must_stay(running):
            return self._recorded(state)
        self._swap(running.init_pid)
        return self._frozen(state, changed=True, remounted=running.init_pid is not None)

    def harvest(self, frozen: Frozen) -> Snapshot:
        """The snapshot of a frozen state, which is then in the store; earlier ones are taken there first.

        Raises WorkspaceLimit or SnapshotError, and can then be called again.
        """
        with self._harvesting:
            while frozen.snapshot is None:
                first = self._pending[0]
                self._last = first.snapshot = self._harvested(first)
                self._last_state = first.state
                self._pending.popleft()
                self._layers.release(first.stack)
            return frozen.snapshot

    def restore(self, snapshot: Snapshot) -> dict[str, str]:
        known = self._layers.of(snapshot)
        self._leave()
        self._begin(known.stack, snapshot, known.state)
        return dict(known.state)

    def destroy(self) -> None:
        """Removes all that is on disk. Of what was frozen, only what is harvested by now is left."""
        self._leave()
        if self.directory.exists():
            self.directory.chmod(0o700)
            self.directory.rmdir()

    def _begin(self, stack: Stack, snapshot: Snapshot, state: Mapping[str, str]) -> None:
        self._stack = stack
        self._last, self._last_state, self._below = snapshot, state, snapshot
        self._baseline = Baseline()
        try:
            self.directory.mkdir(mode=0o555, parents=True, exist_ok=True)
            self._live = self._layers.places.new_live()
            self._mount = self._layers.mounts.new_mount(stack, self._live)
        except OSError as error:
            raise EnvironmentFailure(f"cannot mount the workspace {self.directory.name}: {error}") from error

    def _leave(self) -> None:
        self._close_mount()
        with self._harvesting:
            for frozen in self._pending:
                self._layers.release(frozen.stack)
            self._pending.clear()
        if self._live:
            self._layers.places.remove(self._live)
        self._layers.release(self._stack)
        self._live, self._stack, self._attached = "", (), False

    def _close_mount(self) -> None:
        if self._mount >= 0:
            os.close(self._mount)
        self._mount = -1

    def _must_stay(self, running: Running) -> bool:
        if running.background or running.mapped or len(self._stack) >= MAX_LOWERS:
            return True
        try:
            return running.init_pid is not None and holds_open(running.init_pid, self._mount)
        except OSError as error:
            raise EnvironmentFailure(f"the sandbox {self.directory.name} died: {error}") from error

    def _swap(self, init_pid: int | None) -> None:
        layers, old = self._layers, (self._stack, self._live, self._mount)
        there = os.fstat(self._mount)
        self._stack, self._live, self._mount = self._next()
        self._attached = init_pid is not None
        try:
            if init_pid is not None:
                attach(self._mount, init_pid, INSIDE, there, replaces=True)
        except OSError as error:
            raise EnvironmentFailure(f"the workspace {self.directory.name} is lost: {error}") from error
        finally:
            # The kernel forgets the files of a mount, one by one, when the last who holds it lets go.
            layers.in_background(_dismantle, layers, *old)

    def _next(self) -> tuple[Stack, str, int]:
        """What was written becomes a layer: the new stack, held, a place to write to, and a mount of both."""
        places, written = self._layers.places, self._live
        below = self._layers.shortened(self._stack)
        try:
            live = places.new_live()
            places.close_layer(written)
            try:
                mount = self._layers.mounts.new_mount((*below, written), live)
            except OSError:
                # Nothing has seen the closed layer yet: the old mount goes on as if it had never been.
                places.reopen_layer(written)
                raise
        except OSError as error:
            self._layers.release(below)
            raise SnapshotError(f"cannot mount a new layer in {places.path}: {error}") from error
        self._layers.hold((written,))
        return (*below, written), live, mount

    def _frozen(self, state: Mapping[str, str], *, changed: bool, remounted: bool = False) -> Frozen:
        frozen = Frozen(self._stack, dict(state), changed, remounted)
        self._layers.hold(frozen.stack)
        self._pending.append(frozen)
        return frozen

    def _recorded(self, state: Mapping[str, str]) -> Frozen:
        """The state now, harvested from what is written to; later layers do not know of it."""
        with self._harvesting:
            if self._pending:
                self.harvest(self._pending[-1])
            written = self._layers.places.written(self._live)
            self._last = self._signed(self._put(written, state, replace(self._baseline)), state)
            self._last_state = dict(state)
        return Frozen((), self._last_state, changed=True, snapshot=self._last)

    def _harvested(self, frozen: Frozen) -> Snapshot:
        if not frozen.changed:
            return self._harvested_unchanged(frozen)
        self._below = self._put(self._layers.places.workspace(frozen.stack[-1]), frozen.state, self._baseline)
        self._layers.record(self._below, frozen.stack, frozen.state)
        return self._signed(self._below, frozen.state)

    def _harvested_unchanged(self, frozen: Frozen) -> Snapshot:
        assert self._last is not None
        if frozen.state == self._last_state:
            return self._last
        nothing = self._layers.places.new_blank(frozen.stack[-1])
        try:
            written = self._layers.places.workspace(nothing)
            self._below = self._put(written, frozen.state, self._baseline)
        finally:
            self._layers.places.remove(nothing)
        self._layers.record(replace(self._below, changes=()), frozen.stack, frozen.state)
        return self._below

    def _put(self, written: Path, state: Mapping[str, str], baseline: Baseline) -> Snapshot:
        assert self._below is not None
        return self._layers.store.put_layer(written, self._below, baseline=baseline, state=state)

    def _signed(self, snapshot: Snapshot, state: Mapping[str, str]) -> Snapshot:
        """The snapshot as a successor of the last one, which may have been taken without closing a layer."""
        last = self._last
        if last is None or snapshot.parent == last.id or snapshot is last:
            return snapshot
        if snapshot.digest == last.digest and state == self._last_state:
            return last
        return replace(snapshot, parent=last.id, changes=self._layers.store.diff(last, snapshot))


def _dismantle(layers: Layers, stack: Stack, live: str, mount: int) -> None:
    os.close(mount)
    layers.places.strip(live)
    layers.release(stack)
    layers.places.prepare()
