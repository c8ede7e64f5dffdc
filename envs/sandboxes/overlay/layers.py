"""The layers of all sandboxes of one backend: made from tasks, turns and the store, and removed when they may go.

Layers are a cache: each snapshot whose layers are here is in the store as well, from which they can be made
again. So those that no sandbox uses are dropped when there are too many, and a stack that has grown deep is
replaced by its base and one layer with all changes since.
"""

import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ParamSpec

from midstream.envs.errors import EnvironmentFailure, RestoreMismatch
from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.directories import write_files
from midstream.envs.sandboxes.overlay.background import Background
from midstream.envs.sandboxes.overlay.bases import Bases
from midstream.envs.sandboxes.overlay.mounts import Mounts
from midstream.envs.sandboxes.overlay.places import LayerPlaces, remove_abandoned
from midstream.envs.sandboxes.overlay.stacks import Known, LayerBudget, Stack, Stacks
from midstream.envs.sandboxes.protocol import SandboxSpec
from midstream.envs.store.store import SnapshotStore

P = ParamSpec("P")

# A lookup asks the layers one by one, and a mount takes some 10 µs for each.
COMPACT_AT = 24
# 2000-01-01: some archives hold no earlier date.
BASE_TIME_NS = 946_684_800 * 10**9
# What a changed path takes on disk beside its content: an inode, a part of a directory.
PATH_BYTES = 4096


class Layers:
    """Any thread may call."""

    def __init__(
        self,
        root: Path,
        store: SnapshotStore,
        owner: tuple[int, int] | None,
        budget: LayerBudget | None = None,
        compact_at: int = COMPACT_AT,
    ) -> None:
        """Files are made for `owner`, a uid and a gid, where that is not this process' user.

        Raises EnvironmentFailure where the directory or the namespaces for mounts cannot be made.
        """
        self.store = store
        try:
            self.places = LayerPlaces(root)
            self.mounts = Mounts(self.places.path)
        except OSError as error:
            raise EnvironmentFailure(f"cannot keep layers in {root}: {error}") from error
        self.bases = Bases(store, self.places.path)
        self._owner = owner
        self._stacks = Stacks(budget or LayerBudget())
        self._compact_at = compact_at
        self._lock = threading.Lock()
        # Tasks' snapshots by `spec.base`, and those of whole trees by their layer.
        self._base_ids: dict[str, str] = {}
        self._trees: dict[str, Snapshot] = {}
        self._compacting: set[str] = set()
        self._making: dict[str, tuple[threading.Lock, int]] = {}
        # What nobody waits for: unmounting, removing, compacting.
        self._background = Background("midstream-layers")
        self.in_background(remove_abandoned, root)
        self.in_background(self.bases.unpin_abandoned)

    def base(self, spec: SandboxSpec) -> Known:
        """The tree that a new sandbox begins with, held; sandboxes of one `spec.base` share it.

        Raises EnvironmentFailure where it cannot be written, SnapshotError where it cannot be recorded.
        """
        if spec.base is None:
            return self._new_base(spec)
        with self._alone(f"base {spec.base}"):
            known = self._found(self._base_ids.get(spec.base, ""))
            if known is None:
                known = self._new_base(spec, kept=True)
                self._base_ids[spec.base] = known.snapshot.id
            return known

    def of(self, snapshot: Snapshot, spec: SandboxSpec | None = None) -> Known:
        """The layers of a snapshot, held: those it was taken from, or new ones written from the store.

        A layer here is trusted: its digest was taken after the last process that could write to it had lost
        it. What comes from the store is read back; it is what differs from the parent or, where that is not
        here, from the base of `spec`, and the whole tree otherwise. Raises SnapshotMissing, SnapshotDamaged,
        RestoreMismatch or SnapshotError.
        """
        with self._alone(f"snapshot {snapshot.id}"):
            return self._found(snapshot.id) or self._from_store(snapshot, spec)

    def record_again(self, stack: Stack) -> Snapshot:
        """A snapshot of the tree that these layers are, in place of one that the store lost to a collection.

        It is nobody else's: the caller deletes it.
        """
        live = self.places.new_live()
        try:
            mount = self.mounts.new_mount(stack, live)
            try:
                return self.store.put(f"/proc/self/fd/{mount}/.", state={"again": secrets.token_hex(8)})
            finally:
                os.close(mount)
        finally:
            self.places.remove(live)

    def shortened(self, stack: Stack) -> Stack:
        """The same tree, held, in fewer layers where that has been prepared."""
        return self._stacks.shortened(stack)

    def hold(self, stack: Stack) -> None:
        """Keeps the layers until `release`."""
        self._stacks.hold(stack)

    def release(self, stack: Stack) -> None:
        """Gives layers back; those that nobody needs any more are removed in the background."""
        self._remove(self._stacks.release(stack))

    def record(self, snapshot: Snapshot, stack: Stack, state: Mapping[str, str]) -> None:
        """Remembers the layers of a snapshot that the store has, of which the newest holds its changes.

        Makes room for them within the budget, and has a deep stack compacted.
        """
        known = Known(replace(snapshot, changes=()), stack, dict(state))
        content_bytes = sum(change.bytes + PATH_BYTES for change in snapshot.changes)
        self._remove(self._stacks.add(known, content_bytes))
        shorter = self.shortened(stack)
        with self._lock:
            # One at a time for a sandbox; what fails is tried again a turn later.
            compact = len(shorter) >= self._compact_at and self._compacting.isdisjoint(shorter)
            if compact:
                self._compacting.add(shorter[-1])
        if compact:
            self.in_background(self._compact, replace(known, stack=shorter))
        else:
            self.release(shorter)

    def forget(self, snapshots: Sequence[Snapshot]) -> list[Snapshot]:
        """Drops layers that these alone need, and returns those that the store may drop as well.

        Those that new sandboxes begin with keep their layers, and are pinned in the store.
        """
        bases = self.bases.forget(snapshots)
        self._remove(self._stacks.forget(snapshot.id for snapshot in snapshots if snapshot.id not in bases))
        return list(snapshots)

    def in_background(self, work: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Runs, in order, what may be slow and nobody waits for; what fails there is logged."""
        self._background.run(partial(work, *args, **kwargs))

    def settle(self) -> None:
        """Returns when all that was in the background is done."""
        self._background.settle()

    def close(self) -> None:
        """Removes everything; no sandbox is left. Raises OSError or SnapshotError where something stays."""
        self._background.close()
        try:
            self.bases.close()
        finally:
            self.mounts.close()
            self.places.close()

    def _found(self, snapshot_id: str) -> Known | None:
        known, unused = self._stacks.find(snapshot_id)
        self._remove(unused)
        return known

    def _new_base(self, spec: SandboxSpec, *, kept: bool = False) -> Known:
        layer = self.places.new_layer()
        try:
            write_files(self.places.workspace(layer), spec, self._owner)
            _settle_times(self.places.workspace(layer))
            put = partial(self.store.put, self.places.workspace(layer), state={})
            snapshot = self.bases.keep(layer, put) if kept else put()
        except BaseException:
            self.places.remove(layer)
            raise
        return self._added_tree(snapshot, layer, {})

    def _from_store(self, snapshot: Snapshot, spec: SandboxSpec | None) -> Known:
        state = self.store.state(snapshot)
        below = self._below(snapshot, spec)
        if below is None:
            return self._added_tree(snapshot, self._restored(snapshot), state)
        try:
            with self._in_store(below) as base:
                layer = self._delta(base, snapshot)
            stack = (*below.stack, layer)
            self.hold(stack)
            self.record(snapshot, stack, state)
        finally:
            self.release(below.stack)
        return Known(snapshot, stack, state)

    def _below(self, snapshot: Snapshot, spec: SandboxSpec | None) -> Known | None:
        """What is here of the tree, held."""
        known = None if snapshot.parent is None else self._found(snapshot.parent)
        if known is None and spec is not None and spec.base is not None:
            known = self.base(spec)
        return known

    def _added_tree(self, snapshot: Snapshot, layer: str, state: Mapping[str, str]) -> Known:
        known = Known(replace(snapshot, changes=()), (layer,), state)
        self._trees[layer] = known.snapshot
        self.hold(known.stack)
        self.record(snapshot, known.stack, state)
        return known

    @contextmanager
    def _in_store(self, known: Known) -> Iterator[Snapshot]:
        """The snapshot of these layers or, where a collection took it, another one for the time of the block."""
        if known.snapshot in self.store:
            yield known.snapshot
            return
        again = self.record_again(known.stack)
        try:
            yield again
        finally:
            self.store.delete([again])

    def _restored(self, snapshot: Snapshot) -> str:
        """A new layer with the whole tree of a snapshot."""
        layer = self.places.new_layer()
        try:
            digest = self.store.restore(snapshot, self.places.workspace(layer), owner=self._owner)
            _check(snapshot, digest)
        except BaseException:
            self.places.remove(layer)
            raise
        return layer

    def _delta(self, base: Snapshot, target: Snapshot) -> str:
        """A new layer with what differs between two snapshots, read back and checked together with its base."""
        layer = self.places.new_layer()
        try:
            into = self.places.workspace(layer)
            self.store.write_delta(base, target, into, owner=self._owner)
            _check(target, self.store.digest_of_layer(into, base))
        except BaseException:
            self.places.remove(layer)
            raise
        return layer

    def _compact(self, known: Known) -> None:
        """Prepares a base and one layer in place of a deep stack; sandboxes go over at their next snapshot."""
        base = known.stack[0]
        tree = Known(self._trees[base], (base,))
        try:
            with self._in_store(tree) as before, self._in_store(known) as after:
                layer = self._delta(before, after)
            self._remove(self._stacks.shorten(known, (base, layer)))
        finally:
            self.release(known.stack)
            with self._lock:
                self._compacting.discard(known.stack[-1])

    def _remove(self, layers: list[str]) -> None:
        with self._lock:
            for layer in layers:
                self._trees.pop(layer, None)
                self._compacting.discard(layer)
        if layers:
            self.in_background(self.bases.drop, layers)
        for layer in layers:
            self.in_background(self.places.remove, layer)

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Lets one thread at a time make the same thing, which the others then find."""
        with self._lock:
            lock, waiting = self._making.get(what, (threading.Lock(), 0))
            self._making[what] = lock, waiting + 1
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, waiting = self._making.pop(what)
                if waiting > 1:
                    self._making[what] = lock, waiting - 1


def _settle_times(tree: Path) -> None:
    """Makes a task's files as old as each other, so that its snapshot is the same wherever it is written."""
    times = (BASE_TIME_NS, BASE_TIME_NS)
    for _, _, files, fd in os.fwalk(tree, topdown=False, follow_symlinks=False):
        for name in files:
            os.utime(name, ns=times, dir_fd=fd, follow_symlinks=False)
        os.utime(fd, ns=times)


def _check(snapshot: Snapshot, digest: str) -> None:
    if digest != snapshot.digest:
        raise RestoreMismatch(
            f"snapshot {snapshot.id} has digest {snapshot.digest}, what was written for it has {digest}"
        )
