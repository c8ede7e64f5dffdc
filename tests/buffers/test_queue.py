"""Who goes next among those that wait."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.buffers.queue import Queue, oldest_first


def newest_first(groups: list[str], count: int) -> list[str]:
    return [groups.pop() for _ in range(min(count, len(groups)))]


def host_oldest_first(groups: list[Any], count: int) -> list[Any]:
    return [groups.pop(0) for _ in range(min(count, len(groups)))]


def queue_of(
    *groups: str, begun: str = "", select: Callable[..., Any] = oldest_first, **limits: Any
) -> Queue[str]:
    queue: Queue[str] = Queue(
        begun=lambda group: group in begun,
        select=select,
        **({"passed_over": 3, "resumed_share": 1.0} | limits),
    )
    for group in groups:
        queue.add(group)
    return queue


def passes(queue: Queue[str]) -> dict[str, int]:
    return {group: queue.times_passed_over(group) for group in queue.groups}


def test_the_oldest_go_first() -> None:
    queue = queue_of(*"abc")
    assert queue.take(2) == ["a", "b"]
    assert queue.take(2) == ["c"]
    assert queue.take(2) == []


def test_the_hosts_selection_chooses() -> None:
    queue = queue_of(*"abc", select=newest_first)
    assert queue.take(2) == ["c", "b"]
    assert queue.groups == ["a"]


def test_a_group_passed_over_k_times_goes_before_what_the_selection_wants() -> None:
    queue = queue_of("a", "b", select=newest_first, passed_over=2)
    for new in "cd":
        queue.add(new)
        assert queue.take(1) == [new]
    assert passes(queue) == {"a": 2, "b": 2}
    queue.add("e")
    assert queue.take(2) == ["a", "b"]
    assert passes(queue) == {"e": 1}


def test_nobody_starves_under_a_selection_that_always_prefers_the_new() -> None:
    queue = queue_of("slow", select=newest_first, passed_over=3)
    for number in range(3):
        queue.add(f"new {number}")
        assert queue.take(1) == [f"new {number}"]
    queue.add("new 3")
    assert queue.take(1) == ["slow"]


@pytest.mark.parametrize(
    ("share", "count", "taken"),
    [
        (1.0, 4, "abcd"),
        (0.5, 4, "abxy"),  # two of four may have begun, and two wait that have not
        (0.25, 4, "axy"),
        (0.01, 4, "axy"),  # one may always, so that what has begun drains
        (0.29, 100, "abcdxyz"),
    ],
)
def test_a_share_bounds_what_has_begun(share: float, count: int, taken: str) -> None:
    waiting = "abcdxy" if count < 100 else "abcdxyz"
    queue = queue_of(*waiting, begun="abcd", resumed_share=share)
    assert queue.take(count) == list(taken)
    assert queue.groups == [group for group in waiting if group not in taken]


def test_a_share_holds_for_those_passed_over_too() -> None:
    queue = queue_of(*"abc", begun="abc", passed_over=1, resumed_share=0.5)
    assert queue.take(2) == ["a"]
    assert queue.take(4) == ["b", "c"]


def test_the_largest_share_that_has_a_whole_number_is_not_rounded_away() -> None:
    queue = queue_of(*map(str, range(100)), begun="".join(map(str, range(100))), resumed_share=0.29)
    assert len(queue.take(100)) == 29


def test_what_was_passed_over_forgets_it_when_it_leaves() -> None:
    queue = queue_of("a", "b", select=newest_first)
    queue.take(1)
    assert passes(queue) == {"a": 1}
    [group] = queue.take(1)
    queue.add(group)
    assert passes(queue) == {"a": 0}


def greedy(groups: list[str], count: int) -> list[str]:
    return list(groups)


def copying(groups: list[str], count: int) -> list[str]:
    return groups[:count]


def losing(groups: list[str], count: int) -> list[str]:
    groups.clear()
    return []


def inventing(groups: list[str], count: int) -> list[str]:
    groups.pop()
    return ["new"]


@pytest.mark.parametrize("select", [greedy, copying, losing, inventing])
def test_a_selection_that_does_not_keep_each_group_in_one_place_is_refused(select) -> None:
    with pytest.raises(ValueError, match="remove exactly those"):
        queue_of(*"abc", select=select).take(1)


@given(
    st.lists(st.tuples(st.text("BF", max_size=4), st.integers(1, 5)), max_size=12),
    st.integers(1, 3),
    st.sampled_from([1.0, 0.5, 0.29, 0.01]),
)
def test_the_oldest_go_first_as_if_a_host_selected_them(
    steps: list[tuple[str, int]], passed_over: int, resumed_share: float
) -> None:
    limits = {"passed_over": passed_over, "resumed_share": resumed_share}
    queues = [
        Queue[list[str]](begun=lambda group: group == ["B"], select=select, **limits)
        for select in (oldest_first, host_oldest_first)
    ]
    for new, count in steps:
        for group in map(list, new):
            for queue in queues:
                queue.add(group)
        own, selected = ([id(group) for group in queue.take(count)] for queue in queues)
        assert own == selected
