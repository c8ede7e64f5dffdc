"""Who owns each group of a run, written into the journal wherever that changes."""

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from midstream.buffers.journal.errors import JournalDamaged, OwnershipError
from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.records import Group as Journaled
from midstream.buffers.journal.records import Member

Group = TypeVar("Group")
Seen = TypeVar("Seen", contravariant=True)

BY_HOST = "host"
"""Why a group is dropped that the host neither trained on nor gave back: its filters, or an abort."""
DAMAGED = "damaged"
# A host that generates beside training may keep what is finished for the step after next.
_MOST_ABSENCES = 2

_logger = logging.getLogger(__name__)


class Groups(Protocol[Seen]):
    """A host's groups, as the ledger sees them."""

    def key(self, group: Seen) -> str:
        """The name of a group, which no other group of the run has."""
        ...

    def size(self, group: Seen) -> int:
        """How many rollouts it has."""
        ...

    def member(self, group: Seen, position: int) -> Member:
        """One of its rollouts, for the journal."""
        ...

    def is_at_rest(self, group: Seen, position: int) -> bool:
        """Whether nobody generates this rollout, or is about to, so that it may be written down."""
        ...

    def is_finished(self, group: Seen) -> bool:
        """Whether all of its rollouts have come to their end."""
        ...

    def free(self, snapshots: Iterable[str]) -> None:
        """The journal no longer refers to snapshots with these ids."""
        ...


class Ledger(Generic[Group]):
    """The journal of a host's groups. Threads may use it at once.

    What the journal refers to stays in the store: ``is_in_use`` says so to whoever would delete a snapshot.
    """

    def __init__(self, journal: Journal, groups: Groups[Group]) -> None:
        self._journal = journal
        self._groups = groups
        self._lock = threading.RLock()
        self._in_flight: dict[str, Group] = {}
        self._absences: dict[str, int] = {}  # hand-overs that a group at rest was not part of
        self._waiting: set[str] = set()
        self._is_told = False  # of what is handed to training

    def is_in_use(self, snapshot_id: str) -> bool:
        """Whether the journal refers to a snapshot, now or at a checkpoint."""
        return self._journal.is_in_use(snapshot_id)

    def snapshots_in_use(self) -> frozenset[str]:
        """The ids of all snapshots to which the journal refers."""
        return self._journal.snapshots_in_use()

    def taken(self, groups: Sequence[Group]) -> None:
        """Somebody generates these groups now: ones that waited, changed or not, or new ones.

        Raises:
            OwnershipError: one is in flight already.
        """
        with self._lock:
            self._free(self._journal.taken([self._journaled(group) for group in groups]))
            for group in groups:
                self._in_flight[self._groups.key(group)] = group
                self._waiting.discard(self._groups.key(group))

    def check_new(self, groups: Sequence[Group]) -> None:
        """Raise OwnershipError where the key of a new group is one that is there already."""
        with self._lock:
            keys = [self._groups.key(group) for group in groups]
            twice = [key for key in keys if key in self._in_flight or key in self._waiting]
        if twice:
            raise OwnershipError(
                f"the prompts count anew: group {twice[0]} is handed out as new, and waits or is in flight "
                "already; load the state of the prompts that was saved with the buffer, or set another run_dir"
            )

    def buffered(self, groups: Sequence[Group]) -> None:
        """These groups wait now."""
        with self._lock:
            self._free(self._journal.buffered([self._journaled(group) for group in groups]))
            for group in groups:
                self._leave(self._groups.key(group))
                self._waiting.add(self._groups.key(group))

    def dropped(self, group: Group, reason: str) -> None:
        """A group is given up."""
        with self._lock:
            self._drop([self._groups.key(group)], reason)

    def handed(self, keys: Iterable[str], rollout_id: int) -> None:
        """These groups are trained on in step ``rollout_id``; the second step before it is over by now.

        A group at rest that was not in the last two hand-overs is one that the host has given up.
        """
        with self._lock:
            self._is_told = True
            known = [key for key in keys if key in self._in_flight]
            self._hand(known, rollout_id)
            self._free(self._journal.trained(rollout_id - _MOST_ABSENCES))
            self._drop(self._absent(), BY_HOST)

    def checkpoint(self, rollout_id: int) -> None:
        """Mark this moment as that of the host's checkpoint ``rollout_id``; that step is over."""
        with self._lock:
            if not self._is_told:
                self._guess_hand_over(rollout_id)
            self._free(self._journal.trained(rollout_id))
            for key, group in self._in_flight.items():
                at_rest = [p for p in range(self._groups.size(group)) if self._groups.is_at_rest(group, p)]
                if at_rest:
                    members = {position: self._groups.member(group, position) for position in at_rest}
                    self._free(self._journal.updated(key, members))
            self._free(self._journal.checkpoint(rollout_id))

    def restore(self, rollout_id: int | None) -> dict[str, tuple[Member, ...]]:
        """Return to a checkpoint, or to nothing; gives the rollouts of what waits then, by key, oldest first.

        Damaged groups are dropped, and said. A journal that has not seen a checkpoint is emptied.

        Raises:
            JournalError: the journal has checkpoints, but not this one.
        """
        with self._lock:
            if rollout_id is not None and rollout_id >= 0 and not self._journal.status().checkpoints:
                _logger.warning(
                    "the journal in %s has no checkpoint, so no group waits to go on; if checkpoint %d was made "
                    "with another midstream.run_dir, set that one",
                    self._journal.directory,
                    rollout_id,
                )
                rollout_id = None
            restored = self._journal.roll_back(rollout_id)
            self._in_flight, self._absences, self._is_told = {}, {}, False
            self._waiting = {waiting.key for waiting in restored.waiting}
            found: dict[str, tuple[Member, ...]] = {}
            for waiting in restored.waiting:
                try:
                    found[waiting.key] = self._journal.load(waiting.key)
                except JournalDamaged as damage:
                    self.lost(waiting.key, damage)
            return found

    def lost(self, key: str, damage: Exception) -> None:
        """A group that waited cannot be read."""
        _logger.warning("group %s is lost: %s", key, damage)
        with self._lock:
            self._drop([key], DAMAGED)

    def close(self) -> None:
        """Let go of the journal."""
        self._journal.close()

    def _journaled(self, group: Group) -> Journaled:
        members = (self._groups.member(group, position) for position in range(self._groups.size(group)))
        return Journaled(self._groups.key(group), tuple(members))

    def _hand(self, keys: Sequence[str], rollout_id: int) -> None:
        self._journal.handed(keys, rollout_id)
        for key in keys:
            self._leave(key)

    def _guess_hand_over(self, rollout_id: int) -> None:
        finished = [key for key, group in self._in_flight.items() if self._groups.is_finished(group)]
        if finished:
            _logger.warning(
                "%d groups are finished and nobody said which were trained on: all count as trained in step %d; "
                "have midstream.hooks.slime.log.log_rollout called with what is trained on",
                len(finished),
                rollout_id,
            )
        self._hand(finished, rollout_id)

    def _absent(self) -> list[str]:
        for key, group in self._in_flight.items():
            if all(self._groups.is_at_rest(group, position) for position in range(self._groups.size(group))):
                self._absences[key] = self._absences.get(key, 0) + 1
        return [key for key, absences in self._absences.items() if absences >= _MOST_ABSENCES]

    def _drop(self, keys: Sequence[str], reason: str) -> None:
        if keys:
            self._free(self._journal.dropped(keys, reason))
        for key in keys:
            self._leave(key)
            self._waiting.discard(key)

    def _leave(self, key: str) -> None:
        self._in_flight.pop(key, None)
        self._absences.pop(key, None)

    def _free(self, released: frozenset[str]) -> None:
        if released:
            self._groups.free(released)
