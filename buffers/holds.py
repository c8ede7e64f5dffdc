"""Which snapshots must stay although a rollout that refers to them has ended."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from midstream.envs.protocol import Snapshot


class Holds:
    """Counts the records that refer to a snapshot where they are several, as after a fork.

    ``in_use`` gives the ids of snapshots that must stay for other reasons, such as the journal's: they are
    kept back until ``recheck`` finds that they are not in use any more.
    """

    def __init__(self) -> None:
        self.in_use: Callable[[], Collection[str]] = frozenset
        self._others: Counter[str] = Counter()  # records that refer to a snapshot, beside the first
        self._kept_back: dict[str, Snapshot] = {}

    def share(self, snapshots: Iterable[str]) -> None:
        """One more record refers to each of these."""
        self._others.update(snapshots)

    def release(self, snapshots: Iterable[Snapshot]) -> list[Snapshot]:
        """A record no longer refers to these; returns those that nobody needs any more."""
        in_use = self.in_use()
        free = []
        for snapshot in snapshots:
            if self._others[snapshot.id] > 0:
                self._others[snapshot.id] -= 1
                continue
            del self._others[snapshot.id]
            if snapshot.id in in_use:
                self._kept_back[snapshot.id] = snapshot
            else:
                free.append(snapshot)
        return free

    def recheck(self, released: Iterable[str]) -> list[Snapshot]:
        """Those of the kept back that are no longer in use, given which have just been ``released``."""
        return [self._kept_back.pop(key) for key in released if key in self._kept_back]
