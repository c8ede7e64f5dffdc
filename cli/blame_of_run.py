"""What `midstream blame` finds: what a run has kept of its rollouts, and those that wait in its buffer."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midstream.buffers.journal.encoding import decode
from midstream.buffers.journal.errors import JournalError
from midstream.buffers.journal.records import Member
from midstream.buffers.journal.runs import FOLDER, has_journal
from midstream.buffers.journal.status import look_at_waiting, status_of
from midstream.buffers.rollout import RecordError
from midstream.buffers.runs import named_below, runs_with
from midstream.hooks.credit.kept import KeptRollout, described, has_kept, kept_rollouts
from midstream.hooks.credit.lines import KeptError
from midstream.hooks.credit.measured import Measured, measured_in, rollout_key
from midstream.hooks.slime.looking import records_in

# Rollouts that wait, and what could not be read.
Waiting = tuple[list[KeptRollout], list[str]]


@dataclass
class FoundRun:
    """A run and those of its rollouts that were asked for; `damaged` says what could not be read."""

    run_dir: Path
    rollouts: list[KeptRollout] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    _measured: dict[int, dict[str, Measured]] = field(default_factory=dict, init=False, repr=False)

    def kept(self) -> Iterator[KeptRollout]:
        """All that were trained on, newest step first."""
        return kept_rollouts(self.run_dir, lambda error: self.damaged.append(str(error)))

    def look_at_waiting(self, index: int | None, limit: int) -> None:
        """Take the first ``limit`` that wait, of this index if any; lags count from the journal's newest version."""
        if not has_journal(self.run_dir):
            return
        buffer = self.run_dir / FOLDER
        try:
            version = status_of(buffer).newest_version or 0
            found, damaged = look_at_waiting(buffer, lambda members: _waiting(members, index, limit, version))
        except JournalError as error:
            found, damaged = [], [str(error)]
        self.rollouts += found
        self.damaged += damaged

    def measured(self, rollout: KeptRollout) -> Measured | None:
        """What the trainer measured of one; None where it trained without our hook, or without log-probs."""
        if rollout.step is None:
            return None
        if rollout.step not in self._measured:
            self._measured[rollout.step] = self._measured_in(rollout.step)
        return self._measured[rollout.step].get(rollout_key(rollout.group_key, rollout.index))

    def _measured_in(self, step: int) -> dict[str, Measured]:
        try:
            return measured_in(self.run_dir, step)
        except KeptError as error:
            self.damaged.append(str(error))
            return {}

    def to_json(self) -> dict[str, Any]:
        return {
            "run_dir": str(self.run_dir),
            "rollouts": [self._told(rollout) for rollout in self.rollouts],
            "damaged": self.damaged,
        }

    def _told(self, rollout: KeptRollout) -> dict[str, Any]:
        measured = self.measured(rollout)
        return {
            **rollout.to_json(),
            "shares": _shares(rollout),
            "measured": None if measured is None else vars(measured),
        }


def runs_of(run: Path) -> list[FoundRun]:
    """The run, or each of those in its folders. Raises KeptError where none has rollouts."""
    try:
        found = runs_with(run, _has_rollouts)
        below = "" if found else named_below(run, _has_rollouts)
    except OSError as error:
        raise KeptError(
            f"cannot read {run} ({error.strerror}): look as the user of the job, or mend access"
        ) from error
    if below:
        raise KeptError(f"{run} holds no rollouts, but there are some in {below}: name it")
    if not found:
        raise KeptError(
            f"{run} holds no rollouts: its job has trained no step yet, midstream.run_dir is not set to this directory,"
            " or midstream.credit.keep_rollouts is off"
        )
    return [FoundRun(run_dir) for run_dir in found]


def newest(run: Path, limit: int) -> list[FoundRun]:
    """The last `limit` rollouts that each run has trained on. Raises KeptError."""
    found = runs_of(run)
    for each in found:
        each.rollouts = list(itertools.islice(each.kept(), limit))
    return found


def waiting(run: Path, limit: int) -> list[FoundRun]:
    """The first `limit` rollouts that wait in each run. Raises KeptError."""
    found = runs_of(run)
    for each in found:
        each.look_at_waiting(None, limit)
    return found


def with_index(run: Path, index: int) -> list[FoundRun]:
    """The runs that have a rollout of this index, as it was last trained on, else as it waits.

    Raises KeptError where none has, and which there are.
    """
    runs = runs_of(run)
    for each in runs:
        found = next((rollout for rollout in each.kept() if rollout.index == index), None)
        if found is None:
            each.look_at_waiting(index, 1)
        else:
            each.rollouts.append(found)
    if any(each.rollouts for each in runs):
        return [each for each in runs if each.rollouts or each.damaged]
    others = [f"{each.run_dir} {_others(each.run_dir)}" for each in runs]
    damaged = [text for each in runs for text in each.damaged]
    raise KeptError(f"there is no rollout {index}: {'; '.join([*others, *damaged])}")


def _others(run_dir: Path) -> str:
    indices = [rollout.index for rollout in FoundRun(run_dir).kept() if rollout.index is not None]
    if not indices:
        return "trained on none that can be told"
    return f"trained on {len(indices):,}, numbered {min(indices)} to {max(indices)}"


def _waiting(members: Iterator[Member], index: int | None, limit: int, version: int) -> Waiting:
    found, damaged = [], []
    for member in members:
        try:
            for number, record in records_in(member.payload):
                if index is None or number == index:
                    found.append(described(decode(record), version=version, index=number))
        except (JournalError, RecordError) as error:
            damaged.append(str(error))
        if len(found) >= limit:
            break
    return found[:limit], damaged


def _shares(rollout: KeptRollout) -> list[dict[str, Any]]:
    return [{"version": version, "share": share} for version, share in rollout.blame.shares.items()]


def _has_rollouts(run_dir: Path) -> bool:
    return has_kept(run_dir) or has_journal(run_dir)
