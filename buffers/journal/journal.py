"""The journal of unfinished rollouts: who owns which group, on disk, so that a killed job goes on where it was.

A group is written down whenever it changes hands: taken, buffered, handed to training, trained, dropped. Each
change is one short transaction. ``checkpoint`` marks the moment to which ``roll_back`` returns.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from midstream.buffers.journal import rollback
from midstream.buffers.journal.change import Change
from midstream.buffers.journal.errors import JournalDamaged, JournalError, OwnershipError
from midstream.buffers.journal.file import JournalFile
from midstream.buffers.journal.ownership import CHANGEABLE, coming_to, present_in
from midstream.buffers.journal.reading import checkpoints, groups_in, journaled_members, waiting_groups
from midstream.buffers.journal.records import Group, JournalStatus, Member, Restored, State, Waiting
from midstream.buffers.journal.schema import GroupRow
from midstream.buffers.journal.status import read_status

_logger = logging.getLogger(__name__)

# The host's own checkpoint is written after the journal's and may fail, so the one before it must still be there.
LEAST_CHECKPOINTS = 2


class Journal:
    """The journal in a directory, open for writing by this process alone. Its threads may use it at once.

    Methods that change it return the ids of the snapshots to which nothing refers any more. All raise
    JournalError where the disk fails, and then nothing has changed.
    """

    def __init__(
        self, directory: Path, *, keep_checkpoints: int = 3, clock: Callable[[], float] = time.time
    ) -> None:
        """Opens or creates it; ``clock`` gives seconds since the epoch.

        Raises:
            ValueError: ``keep_checkpoints`` is below 2.
            JournalError: another job has it open, it is of another version, or cannot be written.
        """
        if keep_checkpoints < LEAST_CHECKPOINTS:
            raise ValueError(
                f"keep_checkpoints: got {keep_checkpoints}; set it to {LEAST_CHECKPOINTS} or more, since the host may"
                " fail to write the newest"
            )
        self._keep = keep_checkpoints
        self._clock = clock
        self._file = JournalFile(directory)

    @property
    def directory(self) -> Path:
        """Where it lies."""
        return self._file.path.parent

    def taken(self, groups: Iterable[Group]) -> frozenset[str]:
        """Notes that somebody generates these groups now: new ones, or ones that waited.

        Raises:
            OwnershipError: one is in flight or in training already, or is new and comes without members.
        """
        with self._file.changing() as change:
            for group in groups:
                self._own(change, group, State.TAKEN)
        return change.released

    def updated(self, key: str, members: Mapping[int, Member]) -> frozenset[str]:
        """Writes new records of some rollouts of a group, by position, while it is in flight or waits.

        Raises:
            OwnershipError: it is neither, or has no rollout at a position.
        """
        with self._file.changing() as change:
            _, row = present_in(change, key, CHANGEABLE)
            if absent := sorted(position for position in members if not 0 <= position < row.size):
                raise OwnershipError(f"group {key!r} has {row.size} rollouts, and none at {absent}")
            change.put_members(key, members, row.size)
        return change.released

    def buffered(self, groups: Iterable[Group]) -> frozenset[str]:
        """Notes that these groups wait now, behind the others: cut off, given back by training, or new.

        Raises:
            OwnershipError: one waits already, or is new and comes without members.
        """
        with self._file.changing() as change:
            for group in groups:
                self._own(change, group, State.BUFFERED)
        return change.released

    def handed(self, keys: Iterable[str], rollout_id: int) -> None:
        """Notes that these groups are trained on in step ``rollout_id``.

        Raises:
            OwnershipError: one is in training already, or the journal does not have it.
        """
        with self._file.changing() as change:
            for key in keys:
                self._own(change, Group(key), State.HANDED, step=rollout_id)

    def trained(self, rollout_id: int) -> frozenset[str]:
        """Notes that step ``rollout_id`` and those before it are over: what was handed to them is done."""
        with self._file.changing() as change:
            for number, row in groups_in(change.connection, (State.HANDED,)):
                if row.step is not None and row.step <= rollout_id:
                    change.end_group(number, row, State.TRAINED)
        return change.released

    def dropped(self, keys: Iterable[str], reason: str) -> frozenset[str]:
        """Notes that these groups are given up. ``reason`` is one of a few words, by which they are counted.

        Raises:
            OwnershipError: the journal does not have one.
        """
        with self._file.changing() as change:
            for key in keys:
                present = coming_to(change, key, State.DROPPED)
                assert present is not None
                change.end_group(*present, State.DROPPED, reason)
        return change.released

    def checkpoint(self, rollout_id: int, note: str = "") -> frozenset[str]:
        """Marks this moment as that of the host's checkpoint ``rollout_id``; it outlasts a power cut.

        Call it before the host writes its own. Older checkpoints than the last ``keep_checkpoints`` go. ``note``
        is whatever the caller wants to know after a return to it, see ``notes``.

        Raises:
            JournalError: also where the files were removed or replaced while they were open.
        """
        self._file.check_there()
        with self._file.changing(durable=True) as change:
            rollback.mark(change, rollout_id, self._keep, note)
        try:
            self._file.settle()
        except JournalDamaged:
            raise
        except JournalError as error:
            _logger.warning("checkpoint %d is written, but %s", rollout_id, error)
        return change.released

    def roll_back(self, rollout_id: int | None) -> Restored:
        """Returns to the checkpoint ``rollout_id``, or to an empty journal where that is None or negative.

        What was in flight then waits now, as it was written last; what had been handed to a step up to
        ``rollout_id`` is trained. Every record is read and compared with its checksum. Groups that are
        damaged are dropped, and said.

        Raises:
            JournalError: there is no such checkpoint.
        """
        try:
            damaged = self._rolled_back(rollout_id)
        except JournalDamaged as damage:
            self._file.rebuild(damage)
            damaged = self._rolled_back(rollout_id)
        waiting = self.waiting()
        if damaged:
            _logger.warning(
                "%s: damage cost %d groups (%s); %d wait",
                self._file.path,
                len(damaged),
                ", ".join(damaged),
                len(waiting),
            )
        return Restored(tuple(waiting), tuple(damaged))

    def notes(self) -> dict[int, str]:
        """The checkpoints, oldest first, each with its note."""
        with self._file.reading() as connection:
            return {row.id: row.note for row in checkpoints(connection)}

    def waiting(self) -> list[Waiting]:
        """The groups that wait, in the order in which they came."""
        with self._file.reading() as connection:
            return waiting_groups(connection)

    def load(self, key: str) -> tuple[Member, ...]:
        """The rollouts of a group, with their records.

        Raises:
            OwnershipError: the journal does not have the group.
            JournalDamaged: a record is not what was written: drop the group.
        """
        with self._file.reading() as connection:
            return journaled_members(connection, key)

    def snapshots_in_use(self) -> frozenset[str]:
        """The ids of all snapshots to which a group, now or at a checkpoint, refers: they must stay."""
        return self._file.references

    def is_in_use(self, snapshot_id: str) -> bool:
        """Whether ``snapshots_in_use`` has this id."""
        return self._file.refers_to(snapshot_id)

    def status(self) -> JournalStatus:
        """What ``status.status_of`` sees from outside."""
        with self._file.reading() as connection:
            return read_status(connection, self._file.path, self._clock())

    def close(self) -> None:
        """Lets go of the directory; fine where that is done already."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _own(self, change: Change, group: Group, state: State, *, step: int | None = None) -> None:
        """Gives a group to its next owner, with what is new of it."""
        present = coming_to(change, group.key, state)
        now_s = float(self._clock())
        if present is None:
            if group.members is None:
                raise OwnershipError(f"group {group.key!r} is new to the journal: give its members, too")
            row = GroupRow(
                group.key, change.number, None, state.value, step, self._file.next_place(), 0, now_s, now_s
            )
        else:
            row = present[1]._replace(since=change.number, state=state.value, step=step, at_s=now_s)
            if state is State.BUFFERED:
                row = row._replace(place=self._file.next_place())
        if group.members is not None:
            row = row._replace(size=len(group.members))
            change.put_members(group.key, dict(enumerate(group.members)), row.size)
        change.put_group(row, present)

    def _rolled_back(self, rollout_id: int | None) -> list[str]:
        with self._file.changing(durable=True) as change:
            return rollback.roll_back(change, rollout_id)
