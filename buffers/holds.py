"""Which snapshots must stay although a rollout that refers to them has ended."""

from collections import Counter
from collections.abc import Callable, Iterable

from midstream.buffers.rollout import PartialRollout
from midstream.envs.protocol import Snapshot


def held_by(rollouts: Iterable[PartialRollout]) -> list[Snapshot]:
    """The snapshots that these have not given up: who has ended has done so, and keeps the records."""
    unfinished = [rollout for rollout in rollouts if not rollout.status.finished]
    return [snapshot for rollout in unfinished for snapshot in rollout.snapshots.values()]


class Holds:
    """Counts the records that refer to a snapshot where they are several, as after a fork.

    One thread may ``recheck`` while another releases.

    ``in_use`` says by id which snapshots must stay for other reasons, such as the journal's: they are kept
    back until ``recheck`` is told that they are free.
    """

    def __init__(self) -> None:
        self.in_use: Callable[[str], bool] = lambda snapshot_id: False
        self._others: Counter[str] = Counter()  # records that refer to a snapshot, beside the first
        self._kept_back: dict[str, Snapshot] = {}

    def share(self, snapshots: Iterable[str]) -> None:
        """One more record refers to each of these."""
        self._others.update(snapshots)

    def release(self, snapshots: Iterable[Snapshot]) -> list[Snapshot]:
        """A record no longer refers to these; returns those that nobody needs any more."""
        free = []
        for snapshot in snapshots:
            if self._others[snapshot.id] > 0:
                self._others[snapshot.id] -= 1
                continue
            del self._others[snapshot.id]
            if self.in_use(snapshot.id):
                self._kept_back[snapshot.id] = snapshot
                if not self.in_use(snapshot.id):
                    # Freed just now, by somebody who did not find it here yet.
                    free += self.recheck([snapshot.id])
            else:
                free.append(snapshot)
        return free

    def inherit(self, snapshots: Iterable[str]) -> None:
        """No record refers to these, which are in use all the same: an earlier process has released them."""
        self._kept_back.update((key, Snapshot(key, digest="")) for key in snapshots)

    def recheck(self, freed: Iterable[str]) -> list[Snapshot]:
        """Those of the kept back that are no longer in use, now that these have been ``freed``."""
        kept = (self._kept_back.pop(key, None) for key in freed)
        return [snapshot for snapshot in kept if snapshot is not None]
