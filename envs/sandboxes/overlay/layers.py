"""Which layers make up which snapshot, who uses them, and when they go.

A stack is the names of its layers, the oldest first: a whole tree, then what changed, turn by turn. Layers are a
cache: each snapshot whose stack is known here is in the store as well, from which any stack can be made again.
So layers that no sandbox uses are dropped when there are too many, and a stack that has grown deep is replaced by
its base and one layer with all changes since.
"""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from midstream.envs.errors import EnvironmentFailure, RestoreMismatch
from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.directories import write_files
from midstream.envs.sandboxes.overlay.mounts import Mounts
from midstream.envs.sandboxes.overlay.places import LayerPlaces
from midstream.envs.sandboxes.protocol import SandboxSpec
from midstream.envs.store.store import Baseline, SnapshotStore

_logger = logging.getLogger(__name__)

Stack = tuple[str, ...]
# A lookup asks the layers one by one, and a mount takes some 10 µs for each.
COMPACT_AT = 24
# What a changed path takes on disk beside its content: an inode, a part of a directory.
PATH_BYTES = 4096


@dataclass(frozen=True)
class LayerBudget:
    """How much may be kept for snapshots that no sandbox uses; what is in use comes on top where it must."""

    bytes: int = 16 << 30
    layers: int = 20_000


@dataclass(frozen=True)
class Known:
    """A snapshot whose layers are here. Its changes are left out; `state` is what was recorded beside it."""

    snapshot: Snapshot
    stack: Stack
    state: Mapping[str, str] = field(default_factory=dict)


class Layers:
    """The layers of all sandboxes of one backend. Any thread may call."""

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
        self._owner = owner
        self._budget = budget or LayerBudget()
        self._compact_at = compact_at
        self._lock = threading.Lock()
        self._uses: Counter[str] = Counter()
        self._bytes: dict[str, int] = {}
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._bases: dict[str, str] = {}
        self._trees: dict[str, Snapshot] = {}
        self._shorter: dict[str, Stack] = {}
        self._compacting: set[str] = set()
        self._making: dict[str, tuple[threading.Lock, int]] = {}
        # What nobody waits for: unmounting, removing, compacting.
        self._sweeper = ThreadPoolExecutor(1, "midstream-layers")
        self.in_background(self.places.remove_abandoned)

    # Whoever gets a stack from one of these three holds it, and gives it back by `release`.

    def base(self, spec: SandboxSpec) -> Known:
        """The tree that a new sandbox begins with; sandboxes of one `spec.base` share it.

        Raises EnvironmentFailure where it cannot be written, SnapshotError where it cannot be recorded.
        """
        if spec.base is None:
            return self._new_base(spec)
        with self._alone(f"base {spec.base}"):
            known = self._held(self._bases.get(spec.base, ""))
            if known is None:
                known = self._new_base(spec)
                self._bases[spec.base] = known.snapshot.id
            return known

    def of(self, snapshot: Snapshot) -> Known:
        """The layers of a snapshot: those it was taken from, or new ones written from the store.

        A layer here is trusted: its digest was taken after the last process that could write to it had lost
        it. What comes from the store is read back. Raises SnapshotMissing, RestoreMismatch, SnapshotError.
        """
        with self._alone(f"snapshot {snapshot.id}"):
            return self._held(snapshot.id) or self._from_store(snapshot)

    def shortened(self, stack: Stack) -> Stack:
        """The same tree in fewer layers, where that has been prepared; takes the place of the other's hold."""
        with self._lock:
            for at in range(len(stack) - 1, 0, -1):
                if stack[at] in self._shorter:
                    shorter = self._shorter[stack[at]] + stack[at + 1 :]
                    self._uses.update(shorter)
                    break
            else:
                return stack
        self.release(stack)
        return shorter

    def hold(self, stack: Stack) -> None:
        """Keeps the layers until `release`."""
        with self._lock:
            self._uses.update(stack)

    def release(self, stack: Stack) -> None:
        """Gives layers back; those that nobody needs any more are removed in the background."""
        with self._lock:
            unused = self._released(stack)
        self._remove(unused)

    def record(self, snapshot: Snapshot, stack: Stack, state: Mapping[str, str]) -> None:
        """Remembers the layers of a snapshot that the store has, and makes room for them within the budget."""
        known = Known(replace(snapshot, changes=()), stack, dict(state))
        with self._lock:
            # Of a stack whose layers are counted already, the newest is what the changes are of.
            if stack[-1] not in self._bytes:
                content = sum(change.bytes + PATH_BYTES for change in snapshot.changes)
                self._bytes[stack[-1]] = content or snapshot.bytes
            if snapshot.id not in self._known:
                self._known[snapshot.id] = known
                self._uses.update(stack)
            unused = self._evicted()
            compact = len(stack) >= self._compact_at and stack[-1] not in self._compacting
            if compact:
                self._compacting.add(stack[-1])
        self._remove(unused)
        if compact:
            self.in_background(self._compact, known)

    def in_background(self, work: Callable[..., None], *arguments: object) -> None:
        """Runs what may be slow and nobody waits for; what fails there is logged."""
        self._sweeper.submit(_logged, work, *arguments)

    def settle(self) -> None:
        """Returns when all that was in the background is done."""
        self._sweeper.submit(lambda: None).result()

    def close(self) -> None:
        """Removes everything; no sandbox is left. Raises OSError where something stays."""
        self._sweeper.shutdown()
        self.mounts.close()
        self.places.close()

    def _new_base(self, spec: SandboxSpec) -> Known:
        layer = self.places.new_layer()
        try:
            write_files(self.places.workspace(layer), spec, self._owner)
            snapshot = self.store.put(self.places.workspace(layer), None, baseline=Baseline(), state={})
        except BaseException:
            self.places.remove(layer)
            raise
        return self._added(snapshot, (layer,), {}, base=True)

    def _from_store(self, snapshot: Snapshot) -> Known:
        state = self.store.state(snapshot)
        below = self._nearest(snapshot)
        layer = self.places.new_layer()
        into = self.places.workspace(layer)
        try:
            if below is None:
                digest = self.store.restore(snapshot, into, owner=self._owner)
            else:
                digest = self._write_delta(below.snapshot, snapshot, into, state)
            if digest != snapshot.digest:
                raise RestoreMismatch(
                    f"snapshot {snapshot.id} has digest {snapshot.digest}, what was restored has {digest}"
                )
        except BaseException:
            self.places.remove(layer)
            if below is not None:
                self.release(below.stack)
            raise
        if below is None:
            return self._added(snapshot, (layer,), state, base=True)
        known = self._added(snapshot, (*below.stack, layer), state, base=False)
        self.release(below.stack)
        return known

    def _write_delta(self, base: Snapshot, target: Snapshot, into: Path, state: Mapping[str, str]) -> str:
        """Writes what differs between two snapshots as a layer; returns the digest of both, as read back."""
        self.store.write_delta(base, target, into, owner=self._owner)
        return self.store.put_layer(into, base, baseline=Baseline(), state=state).digest

    def _nearest(self, snapshot: Snapshot) -> Known | None:
        """The closest ancestor whose layers are here, held; None where none is."""
        return None if snapshot.parent is None else self._held(snapshot.parent)

    def _added(self, snapshot: Snapshot, stack: Stack, state: Mapping[str, str], *, base: bool) -> Known:
        self.hold(stack)
        if base:
            with self._lock:
                self._trees[stack[0]] = replace(snapshot, changes=())
        self.record(snapshot, stack, state)
        return Known(replace(snapshot, changes=()), stack, dict(state))

    def _held(self, snapshot_id: str) -> Known | None:
        with self._lock:
            known = self._known.get(snapshot_id)
            if known is not None:
                self._known.move_to_end(snapshot_id)
                self._uses.update(known.stack)
            return known

    def _compact(self, known: Known) -> None:
        """Replaces a deep stack by its base and one layer. Sandboxes on it go over at their next snapshot."""
        top, base = known.stack[-1], known.stack[0]
        layer = self.places.new_layer()
        try:
            digest = self._write_delta(
                self._trees[base], known.snapshot, self.places.workspace(layer), known.state
            )
            if digest != known.snapshot.digest:
                raise RestoreMismatch(f"compacted, snapshot {known.snapshot.id} would be {digest}")
        except BaseException:
            self.places.remove(layer)
            raise
        stack = (base, layer)
        with self._lock:
            self._bytes[layer] = sum(self._bytes.get(name, 0) for name in known.stack[1:])
            self._uses.update(stack)
            if self._uses[top] == 0:  # Evicted meanwhile.
                unused = self._released(stack)
            else:
                self._shorter[top] = stack
                unused = []
                for snapshot_id, other in self._known.items():
                    if other.stack[-1] == top:
                        self._known[snapshot_id] = replace(other, stack=stack)
                        self._uses.update(stack)
                        unused += self._released(other.stack)
        self._remove(unused)

    def _released(self, stack: Stack) -> list[str]:
        """The layers that nobody uses any more. The lock is held."""
        self._uses.subtract(stack)
        unused = [layer for layer in stack if self._uses[layer] <= 0]
        for layer in unused:
            del self._uses[layer]
            self._bytes.pop(layer, None)
            self._trees.pop(layer, None)
            self._compacting.discard(layer)
            if layer in self._shorter:
                unused = unused + self._released(self._shorter.pop(layer))
        return unused

    def _evicted(self) -> list[str]:
        """The layers to remove for the budget's sake, of the snapshots used longest ago. The lock is held."""
        unused: list[str] = []
        while sum(self._bytes.values()) > self._budget.bytes or len(self._bytes) > self._budget.layers:
            oldest = next((known for known in self._known.values() if self._frees(known)), None)
            if oldest is None:
                break
            del self._known[oldest.snapshot.id]
            unused += self._released(oldest.stack)
        return unused

    def _frees(self, known: Known) -> bool:
        return any(self._uses[layer] == 1 for layer in known.stack)

    def _remove(self, layers: list[str]) -> None:
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


def _logged(work: Callable[..., None], *arguments: object) -> None:
    try:
        work(*arguments)
    except Exception:
        _logger.exception("layers: %s%s failed", getattr(work, "__name__", work), arguments)
