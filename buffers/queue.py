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
    that they drain.
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
        self._limit = passed_over
        self._share = resumed_share
        self._groups: list[Group] = []
        self._passed: dict[int, int] = {}  # takes that left a group behind, by the group's id()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> list[Group]:
        """What waits, oldest first; not to be changed."""
        return self._groups

    @groups.setter
    def groups(self, groups: Iterable[Group]) -> None:
        self._groups = list(groups)
        self._passed = {}

    def add(self, group: Group) -> None:
        """Put a group behind those that wait already."""
        self._groups.append(group)

    def times_passed_over(self, group: Group) -> int:
        """How many takes have left this group behind."""
        return self._passed.get(id(group), 0)

    def take(self, count: int) -> list[Group]:
        """Remove and return at most ``count`` groups; those that stay were passed over once more.

        Raises:
            ValueError: the selection left a group in its list that it also returned, returned more than it
                was asked for, or lost one: each group must be in exactly one place.
        """
        pick = _Pick(count, self._begun, max(1, math.floor(self._share * count + _ROUNDING)))
        pick.take(group for group in self._groups if self.times_passed_over(group) >= self._limit)
        pick.take(self._selected(pick.left(self._groups), pick.room))
        if pick.refused and pick.room:
            fresh = [group for group in pick.left(self._groups) if not self._begun(group)]
            pick.take(self._selected(fresh, pick.room))
        self._groups = pick.left(self._groups)
        self._passed = {id(group): self.times_passed_over(group) + 1 for group in self._groups}
        return pick.chosen

    def _selected(self, groups: list[Group], count: int) -> list[Group]:
        if not groups or not count:
            return []
        before = {id(group) for group in groups}
        chosen = self._select(groups, count)
        after = {id(group) for group in groups}
        taken = {id(group) for group in chosen}
        if len(chosen) > count or taken & after or taken | after != before:
            raise ValueError(
                f"the buffer filter was asked for {count} of {len(before)} groups, returned {len(chosen)} "
                f"and left {len(after)}: it must return at most that many and remove exactly those from the buffer"
            )
        return chosen


class _Pick(Generic[Group]):
    """What one take has chosen so far, within its bounds."""

    def __init__(self, count: int, begun: Callable[[Group], bool], most_begun: int) -> None:
        self.chosen: list[Group] = []
        self.refused = False
        self._count = count
        self._begun = begun
        self._room_for_begun = most_begun

    @property
    def room(self) -> int:
        return self._count - len(self.chosen)

    def take(self, groups: Iterable[Group]) -> None:
        """Choose these, one by one, as far as there is room."""
        for group in groups:
            if not self.room:
                return
            begun = self._begun(group)
            if begun and not self._room_for_begun:
                self.refused = True
                continue
            self._room_for_begun -= begun
            self.chosen.append(group)

    def left(self, groups: list[Group]) -> list[Group]:
        """Those of ``groups`` that are not chosen."""
        taken = {id(group) for group in self.chosen}
        return [group for group in groups if id(group) not in taken]
