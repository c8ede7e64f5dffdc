"""Which layers make up which snapshot, who uses them, and which may go: the books, without the files.

A stack is the names of its layers, the oldest first: a whole tree, then what changed, turn by turn. A layer lives
as long as a sandbox or a snapshot that is remembered uses it.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from midstream.envs.protocol import Snapshot

Stack = tuple[str, ...]
# More are dropped than come: each snapshot that is added looks at so many others.
EVICTION_LOOKS = 64


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


class Stacks:
    """Any thread may call. What returns layers returns those that nobody uses any more: the caller removes them."""

    def __init__(self, budget: LayerBudget) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._uses: Counter[str] = Counter()
        self._bytes: dict[str, int] = {}
        self._total_bytes = 0
        # The one used longest ago comes first.
        self._known: OrderedDict[str, Known] = OrderedDict()
        # For the top of a stack, a shorter one of the same tree.
        self._shorter: dict[str, Stack] = {}

    def hold(self, stack: Stack) -> None:
        """Keeps the layers until `release`."""
        with self._lock:
            self._uses.update(stack)

    def release(self, stack: Stack) -> list[str]:
        with self._lock:
            return self._released(stack)

    def find(self, snapshot_id: str) -> tuple[Known | None, list[str]]:
        """The snapshot with its layers, as few as there are for it, which the caller holds from now on."""
        with self._lock:
            known = self._known.get(snapshot_id)
            if known is None:
                return None, []
            self._known.move_to_end(snapshot_id)
            unused = self._moved(known, self._short(known.stack))
            self._uses.update(self._known[snapshot_id].stack)
            return self._known[snapshot_id], unused

    def forget(self, snapshot_ids: Iterable[str]) -> list[str]:
        """Remembers these snapshots no longer; sandboxes that are built on them keep their layers."""
        unused: list[str] = []
        with self._lock:
            for snapshot_id in snapshot_ids:
                if (known := self._known.pop(snapshot_id, None)) is not None:
                    unused += self._released(known.stack)
        return unused

    def shortened(self, stack: Stack) -> Stack:
        """The same tree in as few layers as there are for it, which the caller holds from now on."""
        with self._lock:
            shorter = self._short(stack)
            self._uses.update(shorter)
            return shorter

    def add(self, known: Known, content_bytes: int) -> list[str]:
        """Remembers a snapshot. `content_bytes` is what its newest layer takes on disk."""
        with self._lock:
            # A layer may be the newest of several snapshots, of which the first has its changes.
            if known.stack[-1] not in self._bytes:
                self._count(known.stack[-1], content_bytes)
            known = replace(known, stack=self._short(known.stack))
            if known.snapshot.id not in self._known:
                self._known[known.snapshot.id] = known
                self._uses.update(known.stack)
            return self._evicted()

    def shorten(self, known: Known, shorter: Stack) -> list[str]:
        """Another stack of the snapshot's tree; what is built on the first goes over when it is asked for."""
        with self._lock:
            self._shorter[known.stack[-1]] = shorter
            self._uses.update(shorter)
            self._count(shorter[-1], sum(self._bytes.get(layer, 0) for layer in known.stack[1:]))
            remembered = self._known.get(known.snapshot.id)
            return [] if remembered is None else self._moved(remembered, self._short(remembered.stack))

    def _moved(self, known: Known, stack: Stack) -> list[str]:
        if stack == known.stack:
            return []
        self._known[known.snapshot.id] = replace(known, stack=stack)
        self._uses.update(stack)
        return self._released(known.stack)

    def _short(self, stack: Stack) -> Stack:
        for at in range(len(stack) - 1, 0, -1):
            if stack[at] in self._shorter:
                return self._shorter[stack[at]] + stack[at + 1 :]
        return stack

    def _count(self, layer: str, content_bytes: int) -> None:
        self._total_bytes += content_bytes - self._bytes.get(layer, 0)
        self._bytes[layer] = content_bytes

    def _released(self, stack: Stack) -> list[str]:
        unused: list[str] = []
        self._uses.subtract(stack)
        for layer in stack:
            if self._uses[layer] == 0:
                del self._uses[layer]
                self._total_bytes -= self._bytes.pop(layer, 0)
                unused += [layer, *self._released(self._shorter.pop(layer, ()))]
        return unused

    def _evicted(self) -> list[str]:
        """Drops snapshots for the budget's sake. One that alone keeps no layer gets another round."""
        unused: list[str] = []
        for _ in range(min(EVICTION_LOOKS, len(self._known))):
            if self._total_bytes <= self._budget.bytes and len(self._bytes) <= self._budget.layers:
                break
            oldest, known = next(iter(self._known.items()))
            if self._frees(known):
                del self._known[oldest]
                unused += self._released(known.stack)
            else:
                self._known.move_to_end(oldest)
        return unused

    def _frees(self, known: Known) -> bool:
        """Whether the snapshot alone keeps some layer."""
        return any(self._uses[layer] == 1 for layer in known.stack)
