"""Which of the groups that wait goes next."""

import math
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Group = TypeVar("Group")
Select = Callable[[list[Group], int], list[Group]]

# So that a share such as 0.29 of 100 is 29, whatever its binary fraction.
_ROUNDING = 1e-9


def oldest_first(groups: list[Group], count: int) -> list[Group]:
    """Remove and return the ``count`` groups that have waited longest."""
    chosen = groups[:count]
    del groups[:count]
    return chosen


class Queue(Generic[Group]):
    """Groups in the order in which they came.

    A group that was left behind by ``passed_over`` takes goes before all others, oldest first; among the rest
    ``select(groups, count)`` chooses, which removes what it returns from ``groups``, as slime's buffer filters
    do. At most ``resumed_share`` of what a take asks for are groups that have ``begun``, but one at least, so
    that they drain. ``begun`` is asked when a group comes.

    A take costs by what it returns, not by what waits; a selection of the host's is given all that waits.
    """

    def __init__(
        self,
        *,
        begun: Callable[[Group], bool],
        select: Select[Group] = oldest_first,
        passed_over: int,
        resumed_share: float,
    ) -> None:
        self._begun = begun
        self._select = select
        self.passed_over = passed_over
        self.resumed_share = resumed_share
        # By the group's id(), in the order in which they came. Those that came first were passed over most often.
        self._groups: dict[int, Group] = {}
        self._fresh: dict[int, Group] = {}  # of these the ones that have not begun
        self._takes_before: dict[int, int] = {}  # how many takes there had been when a group came
        self._takes = 0

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> list[Group]:
        """What waits, oldest first; not to be changed."""
        return list(self._groups.values())

    @groups.setter
    def groups(self, groups: Iterable[Group]) -> None:
        waiting = list(groups)
        self._groups, self._fresh, self._takes_before = {}, {}, {}
        for group in waiting:
            self.add(group)

    def add(self, group: Group) -> None:
        """Put a group behind those that wait already."""
        self._groups[id(group)] = group
        self._takes_before[id(group)] = self._takes
        if not self._begun(group):
            self._fresh[id(group)] = group

    def times_passed_over(self, group: Group) -> int:
        """How many takes have left this group behind."""
        return self._takes - self._takes_before.get(id(group), self._takes)

    def take(self, count: int) -> list[Group]:
        """Remove and return at most ``count`` groups; those that stay were passed over once more.

        Raises:
            ValueError: the selection left a group in its list that it also returned, returned more than it
                was asked for, or lost one: each group must be in exactly one place.
        """
        pick: _Pick[Group] = _Pick(count, max(1, math.floor(self.resumed_share * count + _ROUNDING)))
        if self._select is oldest_first:
            self._pick_oldest(pick, passed_over=0)
        else:
            self._pick_oldest(pick, passed_over=self.passed_over)
            self._pick_selected(pick, self._groups)
            if pick.refused and pick.room:
                self._pick_selected(pick, self._fresh)
        for key in pick.chosen:
            del self._groups[key], self._takes_before[key]
            self._fresh.pop(key, None)
        self._takes += 1
        return list(pick.chosen.values())

    def _pick_oldest(self, pick: "_Pick[Group]", *, passed_over: int) -> None:
        """Choose from the front those that were passed over so often; of what has begun, as many as may be."""
        for groups in (self._groups, self._fresh):
            for key, group in groups.items():
                too_new = self._takes - self._takes_before[key] < passed_over
                if too_new or not pick.room or not pick.offer(key, group, begun=key not in self._fresh):
                    break
            if not pick.refused:
                return

    def _pick_selected(self, pick: "_Pick[Group]", among: dict[int, Group]) -> None:
        """Choose what the host selects ``among`` those that are not chosen yet."""
        if pick.chosen:
            among = {key: group for key, group in among.items() if key not in pick.chosen}
        if not among or not pick.room:
            return
        groups = list(among.values())
        chosen = self._select(groups, pick.room)
        left, taken = set(map(id, groups)), set(map(id, chosen))
        each_once = len(left) + len(taken) == len(among) and taken.isdisjoint(left)
        if len(chosen) > pick.room or not (each_once and left <= among.keys() and taken <= among.keys()):
            raise ValueError(
                f"the buffer filter was asked for {pick.room} of {len(among)} groups, returned {len(chosen)} "
                f"and left {len(left)}: it must return at most that many and remove exactly those from the buffer"
            )
        for group in chosen:
            pick.offer(id(group), group, begun=id(group) not in self._fresh)


class _Pick(Generic[Group]):
    """What one take has chosen so far, within its bounds."""

    def __init__(self, count: int, most_begun: int) -> None:
        self.chosen: dict[int, Group] = {}
        self.refused = False
        self._count = count
        self._room_for_begun = most_begun

    @property
    def room(self) -> int:
        return self._count - len(self.chosen)

    def offer(self, key: int, group: Group, *, begun: bool) -> bool:
        """Choose a group, unless it has begun and is too much; whether it is chosen."""
        if key not in self.chosen:
            if begun and not self._room_for_begun:
                self.refused = True
                return False
            self._room_for_begun -= begun
            self.chosen[key] = group
        return True
