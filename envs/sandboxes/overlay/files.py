"""A workspace whose snapshots are layers: taken in the time of a mount, whatever the size of the tree."""

import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from midstream.envs.errors import EnvironmentFailure, SnapshotError, SnapshotMissing
from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.files import Frozen, Running
from midstream.envs.sandboxes.overlay.layers import Layers
from midstream.envs.sandboxes.overlay.mounts import MAX_LOWERS, Mounted, can_return
from midstream.envs.sandboxes.overlay.stacks import Stack
from midstream.envs.sandboxes.protocol import SandboxSpec
from midstream.envs.store.store import Baseline


@dataclass(eq=False, kw_only=True)
class FrozenLayers(Frozen):
    """`stack` is the layers of the state; `changed` says whether the newest is its own."""

    stack: Stack
    state: Mapping[str, str]
    changed: bool


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
        # What a new mount took the place of. It goes when nobody waits: the kernel forgets its files one by one.
        self._replaced: deque[tuple[Stack, str, int]] = deque()
        self._harvesting = threading.RLock()
        self._pending: deque[FrozenLayers] = deque()
        # The last snapshot with its state, and the one whose tree is that of the layers harvested last.
        self._last: Snapshot | None = None
        self._last_state: Mapping[str, str] = {}
        self._below: Snapshot | None = None
        # Whether that one is in place of another, and nobody else's.
        self._below_again = False
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
            Mounted(init_pid).cover(self.directory.stat(), self._mount)
            self._attached = True
        except OSError as error:
            raise EnvironmentFailure(f"cannot mount the workspace {self.directory.name}: {error}") from error

    def open(self, init_pid: int | None) -> int:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._mount)

    def freeze(self, state: Mapping[str, str], running: Running) -> FrozenLayers:
        """Closes what was written as a layer and mounts a new one over it.

        Where something could go on writing to the closed layer, or the shell might not get back to where it
        is, the mount stays and the state is harvested at once. Raises WorkspaceLimit or SnapshotError, with
        nothing changed, and EnvironmentFailure where the workspace is lost.
        """
        if not self._layers.places.written(self._live).exists():
            return self._frozen(state, changed=False)
        mounted = None if running.init_pid is None else Mounted(running.init_pid)
        try:
            if self._must_stay(running, state) or not (
                mounted is None or mounted.seal(os.fstat(self._mount))
            ):
                return self._recorded(state)
            self._swap(mounted)
        except OSError as error:
            raise EnvironmentFailure(f"the workspace {self.directory.name} is lost: {error}") from error
        return self._frozen(state, changed=True, remounted=mounted is not None)

    def harvest(self, frozen: FrozenLayers) -> Snapshot:
        """The snapshot of a frozen state, which is then in the store; earlier ones are taken there first.

        Raises WorkspaceLimit or SnapshotError, and can then be called again.
        """
        with self._harvesting:
            self._dismantle()
            while frozen.snapshot is None:
                if not self._pending:
                    raise SnapshotError(f"the workspace {self.directory.name} was left before its harvest")
                first = self._pending[0]
                self._last = first.snapshot = self._harvested(first)
                self._last_state = first.state
                self._pending.popleft()
                self._layers.release(first.stack)
            self._layers.bases.give(frozen.snapshot)
            return frozen.snapshot

    def restore(self, snapshot: Snapshot, spec: SandboxSpec) -> dict[str, str]:
        known = self._layers.of(snapshot, spec)
        self._leave()
        self._begin(known.stack, snapshot, known.state)
        return dict(known.state)

    def destroy(self) -> None:
        """Removes all that is on disk. Of what was frozen, only what is harvested by now is left."""
        self._leave()
        if self.directory.exists():
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
        # Another place for the next one that begins.
        self._layers.in_background(self._layers.places.prepare)

    def _leave(self) -> None:
        self._close_mount()
        with self._harvesting:
            for frozen in self._pending:
                self._layers.release(frozen.stack)
            self._pending.clear()
            self._dismantle()
            self._build_on(None)
        if self._live:
            self._layers.places.remove(self._live)
        self._layers.release(self._stack)
        self._live, self._stack, self._attached = "", (), False

    def _dismantle(self) -> None:
        while self._replaced:
            self._layers.in_background(_remove_mount, self._layers, *self._replaced.popleft())

    def _close_mount(self) -> None:
        if self._mount >= 0:
            os.close(self._mount)
        self._mount = -1

    def _must_stay(self, running: Running, state: Mapping[str, str]) -> bool:
        if running.background or running.mapped or len(self._stack) >= MAX_LOWERS:
            return True
        return running.init_pid is not None and not can_return(
            running.init_pid, state.get("cwd"), self._mount
        )

    def _swap(self, mounted: Mounted | None) -> None:
        """Raises SnapshotError with nothing changed, OSError where the workspace is lost."""
        old = self._stack, self._live, self._mount
        there = os.fstat(self._mount)
        try:
            self._stack, self._live, self._mount = self._next()
        except SnapshotError:
            if mounted is not None:
                mounted.unseal(there)
            raise
        self._attached = mounted is not None
        self._replaced.append(old)
        if mounted is not None:
            mounted.replace(there, self._mount)

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

    def _frozen(self, state: Mapping[str, str], *, changed: bool, remounted: bool = False) -> FrozenLayers:
        frozen = FrozenLayers(stack=self._stack, state=dict(state), changed=changed, remounted=remounted)
        self._layers.hold(frozen.stack)
        self._pending.append(frozen)
        return frozen

    def _recorded(self, state: Mapping[str, str]) -> FrozenLayers:
        """The state now, harvested from what is written to; later layers do not know of it."""
        with self._harvesting:
            if self._pending:
                self.harvest(self._pending[-1])
            written = self._layers.places.written(self._live)
            known = self._last if state == self._last_state else None
            snapshot = self._put(written, self._stack, state, replace(self._baseline), known)
            self._last = self._signed(snapshot)
            self._last_state = dict(state)
        return FrozenLayers(stack=(), state=self._last_state, changed=True, snapshot=self._last)

    def _harvested(self, frozen: FrozenLayers) -> Snapshot:
        if not frozen.changed:
            return self._harvested_unchanged(frozen)
        *below, top = frozen.stack
        written = self._layers.places.workspace(top)
        known = self._last if frozen.state == self._last_state else None
        snapshot = self._put(written, tuple(below), frozen.state, self._baseline, known)
        signed = self._signed(snapshot)
        self._layers.record(snapshot, frozen.stack, frozen.state)
        self._build_on(snapshot)
        return signed

    def _harvested_unchanged(self, frozen: FrozenLayers) -> Snapshot:
        assert self._last is not None
        if frozen.state == self._last_state:
            return self._last
        nothing = self._layers.places.new_blank(frozen.stack[-1])
        try:
            written = self._layers.places.workspace(nothing)
            snapshot = self._put(written, frozen.stack, frozen.state, self._baseline)
        finally:
            self._layers.places.remove(nothing)
        signed = self._signed(snapshot)
        self._layers.record(snapshot, frozen.stack, frozen.state)
        self._build_on(snapshot)
        return signed

    def _put(
        self,
        written: Path,
        below: Stack,
        state: Mapping[str, str],
        baseline: Baseline,
        known: Snapshot | None = None,
    ) -> Snapshot:
        """Records what was written over the layers below, whose snapshot may have been collected meanwhile.

        Returns `known`, one with this state, where it has the same tree.
        """
        assert self._below is not None
        put = partial(self._layers.store.put_layer, written, baseline=baseline, state=state, known=known)
        try:
            return put(self._below)
        except SnapshotMissing:
            self._build_on(again := self._layers.record_again(below), again=True)
            return put(again)

    def _build_on(self, below: Snapshot | None, *, again: bool = False) -> None:
        """Makes this the snapshot on which the next layers lie; what was in place of one goes."""
        before, was_again = self._below, self._below_again
        self._below, self._below_again = below, again
        if was_again and before is not None:
            self._layers.store.delete([before])

    def _signed(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot as a successor of the last one, of which the layers below may not know."""
        last, below = self._last, self._below
        assert last is not None and below is not None
        if snapshot.id == last.id:
            return last
        if snapshot.parent == last.id:
            return snapshot
        if below.digest == last.digest and snapshot.id != below.id:
            return replace(snapshot, parent=last.id)
        return replace(snapshot, parent=last.id, changes=self._layers.store.diff(last, snapshot))


def _remove_mount(layers: Layers, stack: Stack, live: str, mount: int) -> None:
    os.close(mount)
    try:
        layers.places.strip(live)
    finally:
        layers.release(stack)
    layers.places.prepare()
