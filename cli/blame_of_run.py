"""What `midstream blame` finds: what a run has kept of its rollouts, and those that wait in its buffer."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midstream.buffers.journal.encoding import decode
from midstream.buffers.journal.records import Member
from midstream.buffers.journal.runs import FOLDER, has_journal
from midstream.buffers.journal.status import look_at_waiting, status_of
from midstream.buffers.runs import named_below, runs_with
from midstream.hooks.credit.kept import KeptError, KeptRollout, described, has_kept, kept_rollouts
from midstream.hooks.slime.looking import records_in


@dataclass
class FoundRun:
    """A run and those of its rollouts that were asked for; `damaged` says what could not be read."""

    run_dir: Path
    rollouts: list[KeptRollout] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def kept(self) -> Iterator[KeptRollout]:
        """All that were trained on, newest step first."""
        return kept_rollouts(self.run_dir, lambda error: self.damaged.append(str(error)))

    def to_json(self) -> dict[str, Any]:
        return {
            "run_dir": str(self.run_dir),
            "rollouts": [{**rollout.to_json(), "shares": _shares(rollout)} for rollout in self.rollouts],
            "damaged": self.damaged,
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
    """The first `limit` rollouts that wait in each run. Raises KeptError, JournalError."""
    found = runs_of(run)
    for each in found:
        each.rollouts = _waiting(each.run_dir, None, limit)
    return found


def with_index(run: Path, index: int) -> list[FoundRun]:
    """The runs that have a rollout of this index, as it was last trained on, else as it waits.

    Raises KeptError where none has, and which there are; JournalError.
    """
    runs = runs_of(run)
    for each in runs:
        found = next((rollout for rollout in each.kept() if rollout.index == index), None)
        each.rollouts = _waiting(each.run_dir, index, 1) if found is None else [found]
    if any(each.rollouts for each in runs):
        return [each for each in runs if each.rollouts or each.damaged]
    raise KeptError(f"there is no rollout {index} in {run}: {'; '.join(map(_which, runs))}")


def _shares(rollout: KeptRollout) -> list[dict[str, Any]]:
    return [{"version": version, "share": share} for version, share in rollout.blame.shares.items()]


def _has_rollouts(run_dir: Path) -> bool:
    return has_kept(run_dir) or has_journal(run_dir)


def _which(run: FoundRun) -> str:
    run.damaged.clear()
    indices = [rollout.index for rollout in run.kept() if rollout.index is not None]
    text = f"{len(indices):,} were trained on"
    if indices:
        text += f", between {min(indices)} and {max(indices)}"
    damage = f", and {len(run.damaged)} files cannot be read" if run.damaged else ""
    return f"{run.run_dir} has others, {text}{damage}; `midstream blame` without ROLLOUT lists them"


def _waiting(run_dir: Path, index: int | None, limit: int) -> list[KeptRollout]:
    """Those that wait, with their lags from the newest version that the journal shows."""
    if not has_journal(run_dir):
        return []
    version = status_of(run_dir / FOLDER).newest_version or 0

    def look(members: Iterator[Member]) -> list[KeptRollout]:
        records = itertools.chain.from_iterable(records_in(member.payload) for member in members)
        wanted = (each for each in records if index is None or each[0] == index)
        return [
            described(decode(record), version=version, index=number)
            for number, record in itertools.islice(wanted, limit)
        ]

    return look_at_waiting(run_dir / FOLDER, look)
