"""Who owns each group of a run, written into the journal wherever that changes."""

import json
import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from midstream.buffers.journal.errors import JournalDamaged, JournalError, OwnershipError
from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.records import Group as Journaled
from midstream.buffers.journal.records import Member
from midstream.buffers.journal.rollback import DAMAGED

Group = TypeVar("Group")
Seen = TypeVar("Seen", contravariant=True)

BY_HOST = "host"
"""Why a group is dropped that the host neither trained on nor gave back: its filters, or an abort."""
# A host that generates beside training may hand over so many steps ahead of the one that is trained.
_STEPS_AHEAD = 2
# Queues of finished groups are shorter than that; who waits for longer may have been given up.
_MANY_ABSENCES = 32

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

    def has_ended(self, group: Seen, position: int) -> bool:
        """Whether this rollout has come to its end and nobody changes it any more."""
        ...

    def free(self, snapshots: Iterable[str]) -> None:
        """The journal no longer refers to snapshots with these ids."""
        ...


class Ledger(Generic[Group]):
    """The journal of a host's groups. Threads may use it at once.

    What the journal refers to stays in the store: ``is_in_use`` says so to whoever would delete a snapshot.

    ``hand_overs`` counts the steps that were given to training; ``step`` is the number of the next one.

    ``host_keeps`` says whether groups may stay with the host from one hand-over to the next, finished or not. One
    that is then not handed over is not given up: it may be next, and nothing but the host's word tells. Where
    the host keeps nothing, a hand-over ends all groups in flight.
    """

    def __init__(self, journal: Journal, groups: Groups[Group], *, host_keeps: bool) -> None:
        self._journal = journal
        self._groups = groups
        self._host_keeps = host_keeps
        self._lock = threading.RLock()
        self._in_flight: dict[str, Group] = {}
        self._absences: dict[str, int] = {}  # hand-overs that a finished group was not part of
        self._has_said = False
        self._waiting: set[str] = set()
        self.hand_overs = 0
        self.step = 0
        self.version: int | None = None
        self._next: int | None = None  # the number of the new group that comes next, where that is known

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
        """Raise OwnershipError where a new group is one that is there already, or not the one that comes next.

        What comes next is known where the host counts its groups one by one.
        """
        with self._lock:
            for key in map(self._groups.key, groups):
                is_twice = key in self._in_flight or key in self._waiting
                is_next = self._next is None or key == str(self._next)
                if is_twice or not is_next:
                    raise OwnershipError(
                        f"the prompts are not where the buffer is: group {key} is handed out as new, "
                        + ("and is there already" if is_twice else f"and group {self._next} comes next")
                        + "; load the state of the prompts that was saved with the buffer (where the host died while "
                        "it saved, that of the checkpoint before), or set another run_dir"
                    )
                self._next = int(key) + 1 if key.isdecimal() else None

    def check_in_flight(self, groups: Sequence[Group]) -> None:
        """Raise OwnershipError where the host does not have one of these groups, or names it twice."""
        with self._lock:
            keys = [self._groups.key(group) for group in groups]
            for key in keys:
                if key not in self._in_flight or keys.count(key) > 1:
                    raise OwnershipError(
                        f"group {key} is given back or given up, and is not in flight: that was done already, it was "
                        "trained on, or it was never handed out"
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

        Raises:
            OwnershipError: one was given back as well.
        """
        with self._lock:
            self.hand_overs += 1
            self.step = rollout_id + 1
            handed = list(keys)
            if waiting := [key for key in handed if key in self._waiting]:
                raise OwnershipError(
                    f"group {waiting[0]} is trained on in step {rollout_id}, and was given back to wait: a rollout "
                    "function returns a group or gives it back, not both"
                )
            self._hand([key for key in handed if key in self._in_flight], rollout_id)
            self._free(self._journal.trained(rollout_id - _STEPS_AHEAD))

    def checkpoint(self, rollout_id: int, version: int | None = None) -> None:
        """Mark this moment as that of the host's checkpoint ``rollout_id``; that step is over.

        ``version`` is the policy's, as far as it is known; ``restore`` gives it back as ``self.version``.

        Of the groups in flight, rollouts that have ended are written down; others may be changing at this moment,
        and stay as they were taken.

        Raises:
            OwnershipError: groups are finished, and nobody has ever said what is trained on.
        """
        with self._lock:
            finished = [key for key, group in self._in_flight.items() if self._is_finished(group)]
            if finished and not self.hand_overs:
                raise OwnershipError(
                    f"{len(finished)} groups are finished, and nobody has said which of them were trained on: "
                    "have midstream.hooks.slime.log.log_rollout called with what is trained on, by "
                    "--custom-rollout-log-function-path or by the function that stands there"
                )
            self._free(self._journal.trained(rollout_id))
            for key, group in self._in_flight.items():
                ended = self._ended(group)
                if ended:
                    members = {position: self._groups.member(group, position) for position in ended}
                    self._free(self._journal.updated(key, members))
            note = json.dumps({"version": version, "next": self._next})
            self._free(self._journal.checkpoint(rollout_id, note))

    def restore(self, rollout_id: int | None) -> dict[str, tuple[Member, ...]]:
        """Return to a checkpoint, or to nothing; gives the rollouts of what waits then, by key, oldest first.

        Damaged groups are dropped, and said. A journal that has not seen a checkpoint is emptied.

        Raises:
            JournalError: the journal has checkpoints, but not this one, or none was asked for.
        """
        with self._lock:
            notes = self._journal.notes()
            if rollout_id is not None and rollout_id >= 0 and not notes:
                self._check_empty()
                _logger.warning(
                    "the journal in %s has no checkpoint, so no group waits to go on; if checkpoint %d was made "
                    "with another midstream.run_dir, set that one",
                    self._journal.directory,
                    rollout_id,
                )
                rollout_id = None
            if rollout_id is None or rollout_id < 0:
                self._check_may_go(list(notes))
            restored = self._journal.roll_back(rollout_id)
            self.step = 0 if rollout_id is None else rollout_id + 1
            note = json.loads(notes[rollout_id]) if rollout_id in notes else {"version": None, "next": None}
            self.version, self._next = note["version"], note["next"]
            self._in_flight, self._absences = {}, {}
            self._waiting = {waiting.key for waiting in restored.waiting}
            found: dict[str, tuple[Member, ...]] = {}
            for waiting in restored.waiting:
                try:
                    found[waiting.key] = self._journal.load(waiting.key)
                except JournalDamaged as damage:
                    self.lost(waiting.key, damage)
            return found

    def _check_may_go(self, checkpoints: Sequence[int]) -> None:
        """Raise JournalError where a job that goes on from nothing would throw away what another could go on from."""
        # With a single checkpoint the host may have died before its own was complete, and has none to load.
        if len(checkpoints) > 1:
            raise JournalError(
                f"{len(self._journal.waiting())} groups wait in {self._journal.directory}, which has the checkpoints "
                f"{', '.join(map(str, checkpoints))}, and the job loads none: load one of these (--load), or "
                "begin anew in another run_dir, or without that folder"
            )

    def _check_empty(self) -> None:
        """Raise JournalError where there are groups and no checkpoint, although the host has one."""
        if self._journal.waiting():
            raise JournalError(
                f"groups wait in {self._journal.directory}, but it has no checkpoint: they are of another run, or "
                "damage took its checkpoints. Set another run_dir, or move that folder away to begin with an empty "
                "buffer"
            )

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
        if self._host_keeps:
            self._note_absent()
        else:
            self._drop(list(self._in_flight), BY_HOST)

    def _note_absent(self) -> None:
        for key, group in self._in_flight.items():
            if self._is_finished(group):
                self._absences[key] = self._absences.get(key, 0) + 1
        forgotten = sum(absences >= _MANY_ABSENCES for absences in self._absences.values())
        if forgotten and not self._has_said:
            self._has_said = True
            _logger.warning(
                "%d groups have been finished for %d steps and were not trained on. They stay in memory, and wait "
                "after a restart. If the rollout function has dropped them, let it call "
                "data_source.drop_samples(groups), or, if it keeps no group from one step to the next, set "
                "midstream.journal.host_keeps_groups=false",
                forgotten,
                _MANY_ABSENCES,
            )

    def _ended(self, group: Group) -> list[int]:
        return [p for p in range(self._groups.size(group)) if self._groups.has_ended(group, p)]

    def _is_finished(self, group: Group) -> bool:
        return len(self._ended(group)) == self._groups.size(group)

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
