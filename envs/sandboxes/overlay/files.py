"""A workspace whose snapshots are layers: taken in the time of a mount, whatever the size of the tree."""

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from midstream.envs.errors import EnvironmentFailure, SnapshotError
from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.files import Running
from midstream.envs.sandboxes.overlay.layers import Layers, Stack
from midstream.envs.sandboxes.overlay.mounts import MAX_LOWERS, attach, holds_open
from midstream.envs.sandboxes.protocol import SandboxSpec
from midstream.envs.store.store import Baseline

TARGET = "/workspace"
# A shell's namespaces are complete some milliseconds after its process has started.
START_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Frozen:
    """A state that nothing changes any more, on its way into the store.

    `stack` is its layers, of which `changed` says whether the newest holds something new. `snapshot` is there
    where it had to be recorded at once. `remounted`: the shell must enter its directory again.
    """

    stack: Stack
    state: Mapping[str, str]
    changed: bool
    remounted: bool = False
    snapshot: Snapshot | None = None


class OverlayFiles:
    """The workspace of one sandbox: an overlay of shared layers and one that it writes to."""

    def __init__(self, directory: Path, layers: Layers) -> None:
        """`directory` is an empty folder, over which the mount is put inside of the sandbox."""
        self.directory = directory
        self._layers = layers
        self._stack: Stack = ()
        self._live = ""
        # Of the mount that is, or is to be, the workspace.
        self._mount = -1
        self._attached = False
        self._baseline = Baseline()
        self._last: Snapshot | None = None
        self._last_state: Mapping[str, str] = {}
        self._harvesting = threading.Lock()

    def create(self, spec: SandboxSpec) -> None:
        known = self._layers.base(spec)
        self._begin(known.stack, known.snapshot, known.state)

    def attach(self, init_pid: int | None) -> None:
        if init_pid is None:
            raise EnvironmentFailure("overlay workspaces need the namespaces of bubblewrap: set backend=store")
        try:
            if self._attached:
                # The mount went with the namespaces of an earlier shell; what it wrote is still there.
                self._close_mount()
                work = self._layers.places.new_work(self._live)
                self._mount = self._layers.mounts.new_mount(self._stack, self._live, work)
            there = self.directory.stat()
            attach(self._mount, init_pid, TARGET, there, replaces=False, timeout_s=START_TIMEOUT_S)
            self._attached = True
        except OSError as error:
            raise EnvironmentFailure(f"cannot mount the workspace of {self.directory.name}: {error}") from error

    def open(self, init_pid: int | None) -> int:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._mount)

    def snapshot(self, state: Mapping[str, str], running: Running) -> tuple[Snapshot, bool]:
        frozen = self.freeze(state, running)
        return self.harvest(frozen), frozen.remounted

    def freeze(self, state: Mapping[str, str], running: Running) -> Frozen:
        """Closes what was written as a layer and mounts a new one over it: all that a sandbox must wait for.

        Where processes or the shell itself still have files open, they would write to the closed layer: then
        the snapshot is recorded at once, and the mount stays. Every result goes to `harvest`, in order.
        """
        if not self._layers.places.written(self._live).exists():
            return self._frozen(state, changed=False)
        if self._must_stay(running):
            return self._recorded_live(state)
        self._swap(running.init_pid)
        return self._frozen(state, changed=True, remounted=running.init_pid is not None)

    def harvest(self, frozen: Frozen) -> Snapshot:
        """Takes a frozen state into the store. Raises WorkspaceLimit or SnapshotError."""
        with self._harvesting:
            try:
                if frozen.snapshot is None:
                    self._last = self._harvested(frozen, self._last)
                    self._last_state = frozen.state
                    return self._last
                return frozen.snapshot
            finally:
                self._layers.release(frozen.stack)

    def restore(self, snapshot: Snapshot) -> dict[str, str]:
        known = self._layers.of(snapshot)
        self._leave()
        self._begin(known.stack, snapshot, known.state)
        return dict(known.state)

    def destroy(self) -> None:
        self._leave()
        if self.directory.exists():
            self.directory.chmod(0o700)
            self.directory.rmdir()

    def _begin(self, stack: Stack, snapshot: Snapshot, state: Mapping[str, str]) -> None:
        self._stack, self._last, self._last_state = stack, snapshot, state
        self._baseline = Baseline()
        try:
            self.directory.mkdir(mode=0o555, parents=True, exist_ok=True)
            self._live = self._layers.places.new_live()
            self._mount = self._layers.mounts.new_mount(stack, self._live)
        except OSError as error:
            raise EnvironmentFailure(f"cannot mount the workspace of {self.directory.name}: {error}") from error

    def _leave(self) -> None:
        self._close_mount()
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
        return running.init_pid is not None and holds_open(running.init_pid, self._mount)

    def _swap(self, init_pid: int | None) -> None:
        places = self._layers.places
        before, mount = self._live, self._mount
        layer = places.close_layer(before)
        self._layers.hold((layer,))
        stack = self._layers.shortened((*self._stack, layer))
        try:
            live = places.new_live()
            self._mount = self._layers.mounts.new_mount(stack, live)
        except OSError as error:
            # Nothing has seen the closed layer: the old mount goes on as if it had never been.
            places.reopen_layer(layer, before)
            raise SnapshotError(f"cannot mount a layer over {layer}: {error}") from error
        self._stack, self._live = stack, live
        try:
            if init_pid is not None:
                attach(self._mount, init_pid, TARGET, os.fstat(mount), replaces=True)
            self._attached = init_pid is not None
        except OSError as error:
            raise EnvironmentFailure(f"cannot mount a layer in the sandbox: {error}") from error
        finally:
            # The kernel forgets a mount's files one by one when its last user is gone.
            self._layers.in_background(_dismantle, mount, self._layers, before)

    def _frozen(self, state: Mapping[str, str], *, changed: bool, remounted: bool = False) -> Frozen:
        self._layers.hold(self._stack)
        return Frozen(self._stack, dict(state), changed, remounted)

    def _recorded_live(self, state: Mapping[str, str]) -> Frozen:
        with self._harvesting:
            written = self._layers.places.written(self._live)
            self._last = self._layers.store.put_layer(
                written, self._last, baseline=self._baseline, state=state
            )
            self._last_state = dict(state)
        self._layers.hold(self._stack)
        return Frozen(self._stack, dict(state), changed=True, snapshot=self._last)

    def _harvested(self, frozen: Frozen, parent: Snapshot | None) -> Snapshot:
        assert parent is not None
        if not frozen.changed and frozen.state == self._last_state:
            return parent
        written = self._layers.places.workspace(frozen.stack[-1])
        snapshot = self._layers.store.put_layer(
            written, parent, baseline=self._baseline, state=frozen.state
        )
        if snapshot is not parent:
            self._layers.record(snapshot, frozen.stack, frozen.state)
        return snapshot


def _dismantle(mount: int, layers: Layers, live: str) -> None:
    os.close(mount)
    layers.places.remove(live)
