"""Groups that wait for their turn to go on."""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Group = TypeVar("Group")
Select = Callable[[list[Group], int], list[Group]]


def oldest_first(groups: list[Group], count: int) -> list[Group]:
    """Remove and return the ``count`` groups that have waited longest."""
    chosen = groups[:count]
    del groups[:count]
    return chosen


class PartialBuffer(Generic[Group]):
    """Groups in the order in which they came back, handed out by ``select``.

    ``select(groups, count)`` removes what it returns from ``groups``, as slime's buffer filters do.
    """

    def __init__(self, select: Select[Group] = oldest_first) -> None:
        self._select = select
        self.groups: list[Group] = []

    def __len__(self) -> int:
        return len(self.groups)

    def add(self, groups: Iterable[Group]) -> None:
        """Put groups behind those that wait already."""
        self.groups.extend(groups)

    def take(self, count: int) -> list[Group]:
        """Remove and return at most ``count`` groups.

        Raises:
            ValueError: the selection left a group in the buffer that it also returned, returned more
                than ``count``, or lost one: each group must be in exactly one place.
        """
        if count <= 0 or not self.groups:
            return []
        before = {id(group) for group in self.groups}
        chosen = self._select(self.groups, count)
        after = {id(group) for group in self.groups}
        taken = {id(group) for group in chosen}
        if len(chosen) > count or taken & after or taken | after != before:
            raise ValueError(
                f"the buffer filter was asked for {count} of {len(before)} groups, returned {len(chosen)} "
                f"and left {len(after)}: it must return at most that many and remove exactly those from the buffer"
            )
        return chosen
