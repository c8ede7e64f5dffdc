"""What `midstream status` finds: a run's journal, who has it open, and its snapshots in the store."""

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from midstream.buffers.journal.lock import Holder, holder_of
from midstream.buffers.journal.records import GroupStatus, JournalStatus, Owned, State, versions_of
from midstream.buffers.journal.runs import journals_of
from midstream.buffers.journal.status import status_of
from midstream.envs.store.presence import Presence, presence_of

STATES = {State.BUFFERED: "waiting", State.TAKEN: "in flight", State.HANDED: "in training"}


@dataclass(frozen=True)
class FoundRun:
    """One run. `presence` is None where there is no snapshot store at `store`."""

    run_dir: Path
    journal: JournalStatus
    holder: Holder | None
    store: Path
    presence: Presence | None

    @property
    def waiting(self) -> tuple[GroupStatus, ...]:
        return self.journal.among(State.BUFFERED)

    @property
    def missing(self) -> frozenset[str]:
        """Snapshots that the journal refers to and the store does not have."""
        return frozenset() if self.presence is None else self.presence.missing

    @property
    def is_degraded(self) -> bool:
        return self.journal.is_damaged or bool(self.missing or self.lost_packs)

    @property
    def lost_packs(self) -> frozenset[str]:
        """Files of the store that are gone, with the contents of snapshots in them."""
        return frozenset() if self.presence is None else self.presence.lost_packs

    def lag(self, group: GroupStatus) -> int | None:
        """How many policy versions its oldest token is behind the newest that the journal shows."""
        if group.versions is None or self.journal.newest_version is None:
            return None
        return self.journal.newest_version - group.versions[0]

    def age_s(self, group: GroupStatus) -> float:
        """Since it was first taken."""
        return max(0.0, self.journal.at_s - group.begun_s)

    def to_json(self) -> dict[str, Any]:
        journal, waiting = self.journal, self.waiting
        rollouts = [member for group in waiting for member in group.members]
        return {
            "run_dir": str(self.run_dir),
            "held_by": None if self.holder is None else asdict(self.holder),
            "waiting": asdict(journal.buffered),
            "in_flight": asdict(journal.taken),
            "in_training": asdict(journal.handed),
            "trained": asdict(journal.trained),
            "dropped": asdict(sum_of(journal.dropped.values())),
            "dropped_by_reason": {reason: asdict(owned) for reason, owned in journal.dropped.items()},
            "waiting_age_s": spread(map(self.age_s, waiting)),
            "waiting_tokens": spread(rollout.tokens for rollout in rollouts),
            "waiting_turns": spread(rollout.turns for rollout in rollouts),
            "waiting_lag_versions": spread(lag for group in waiting if (lag := self.lag(group)) is not None),
            "waiting_versions": versions_of(rollouts),
            "newest_version": journal.newest_version,
            "snapshots": {
                "waiting": sorted(snapshots_of(waiting)),
                "in_use": len(journal.snapshots_in_use),
                "missing": None if self.presence is None else sorted(self.missing),
                "lost_packs": None if self.presence is None else sorted(self.lost_packs),
            },
            "checkpoints": list(journal.checkpoints),
            "journal_bytes": journal.file_bytes,
            "snapshots_bytes": None if self.presence is None else self.presence.bytes,
            "damaged_rows": journal.damaged_rows,
            "damaged_groups": [group.key for group in journal.groups if group.lost],
            "groups": [self._group_to_json(group) for group in journal.groups],
        }

    def _group_to_json(self, group: GroupStatus) -> dict[str, Any]:
        oldest, newest = group.versions or (None, None)
        return {
            "key": group.key,
            "state": STATES[group.state].replace(" ", "_"),
            "step": group.step,
            "rollouts": len(group.members),
            "tokens": group.tokens,
            "turns": group.turns,
            "oldest_version": oldest,
            "newest_version": newest,
            "lag_versions": self.lag(group),
            "age_s": round(self.age_s(group), 1),
            "snapshots": sorted(snapshots_of([group])),
            "payload_bytes": group.payload_bytes,
        }


def look_at(run: Path, store: Path | None) -> list[FoundRun]:
    """The run, or each of those in its folders; `store` is for all of them. Raises JournalError, SnapshotError."""
    return [_look_at(run_dir, buffer, store) for run_dir, buffer in journals_of(run).items()]


def _look_at(run_dir: Path, buffer: Path, store: Path | None) -> FoundRun:
    beside = buffer.parent if run_dir == buffer else run_dir
    store = store or beside / "snapshots"
    journal = status_of(buffer)
    presence = presence_of(store, journal.snapshots_in_use)
    if presence is not None and presence.missing:
        # A job drops a snapshot once the journal does not refer to it any more: look again.
        journal = status_of(buffer)
        presence = replace(presence, missing=presence.missing & journal.snapshots_in_use)
    return FoundRun(run_dir, journal, holder_of(buffer), store, presence)


def snapshots_of(groups: Iterable[GroupStatus]) -> set[str]:
    return {snapshot for group in groups for member in group.members for snapshot in member.snapshots}


def sum_of(parts: Iterable[Owned]) -> Owned:
    rows = [tuple(asdict(part).values()) for part in parts]
    return Owned(*map(sum, zip(*rows, strict=True))) if rows else Owned()


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """The median and the largest; None without any."""
    found = list(values)
    return {"median": statistics.median(found), "most": max(found)} if found else None
