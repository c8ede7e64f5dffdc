"""The rungs of the ladder: as it is, forked with what is there out of the loss, back, anew."""

from collections.abc import Callable
from typing import Any

import pytest

from midstream.buffers.policies.base import RESTART, RESUME, Action, Choice
from midstream.buffers.policies.ladder import Ladder, trained_lag
from midstream.buffers.rollout import PartialRollout, Status
from midstream.buffers.waiting import Waiting
from midstream.conf.schema import BoundsConfig
from tests.buffers.made import World, act
from tests.buffers.test_anchor import Slot, cut_off, ended

NOW = 20
MEASURED = Choice(Action.RESUME, measured=True)
OFF = BoundsConfig(trajectory=None, token=None, environment=None)


def fork_of(source: int, turn: int) -> Choice:
    return Choice(Action.FORK, turn, source=source, masked=True)


def ladder(max_log_ratio: float | None = 0.04) -> Ladder:
    return Ladder(small_lag=2, max_lag=8, max_log_ratio=max_log_ratio)


def test_what_is_young_goes_on_as_it_is_once_it_is_measured() -> None:
    group = [cut_off((18, {"b": "b1"}), name="a", action=19), cut_off((20, {}), name="b"), cut_off(name="c")]
    group.append(ended((3, {"z": "z1"}), name="e"))
    assert ladder().choose_group(group, NOW) == [MEASURED, MEASURED, RESUME, RESUME]
    assert ladder(max_log_ratio=None).choose_group(group, NOW) == [RESUME] * 4


def test_what_the_policy_of_the_day_made_needs_no_measurement() -> None:
    assert ladder().choose_group([cut_off((NOW, {"b": "b1"}), name="a")], NOW) == [RESUME]


def test_one_old_member_has_the_group_forked_and_masked() -> None:
    group = [cut_off((17, {"b": "b1"}), name="a"), cut_off((19, {"b": "b1"}), (19, {}), name="b")]
    assert ladder().choose_group(group, NOW) == [
        fork_of(1, 2),
        Choice(Action.RESUME, anchors=True, masked=True),
    ]


def test_one_that_is_old_and_alone_goes_on_with_its_prefix_out_of_the_loss() -> None:
    rollout = cut_off((17, {"b": "b1"}), name="a", action=19)
    assert ladder().choose(rollout, NOW) == Choice(Action.REWIND, 1, masked=True)
    ladder().choose(rollout, NOW).apply(rollout)
    assert (rollout.tokens, rollout.loss_mask, rollout.anchor) == ([1, 1, 9], [0, 0, 0], None)


def test_a_state_with_too_old_a_write_is_no_anchor() -> None:
    old_write = cut_off((11, {}), (11, {"b": "b1"}), (12, {"c": "c1"}), (13, {"d": "d1"}), name="a")
    group = [old_write, cut_off((18, {"b": "b1"}), name="b")]
    # Of the first only the turn that read is left, as much as the whole of the second.
    assert ladder().choose_group(group, NOW) == [
        Choice(Action.REWIND, 1, anchors=True, masked=True),
        fork_of(0, 1),
    ]


def test_without_any_young_state_all_start_anew() -> None:
    rollout = cut_off((1, {"b": "b1"}), name="a", action=19)
    rollout.forget("as0")
    assert ladder().choose_group([rollout, cut_off(name="b")], NOW) == [RESTART, RESUME]


def test_a_masked_prefix_has_no_age_and_an_old_state_still_has_one() -> None:
    rollout = cut_off((10, {"b": "b1"}), name="a")
    rollout.loss_mask = [0, 0, 0]
    World("w").turn(rollout, 19, c="c1")
    assert (trained_lag(rollout, NOW), trained_lag(rollout, 19)) == (1, 0)
    assert ladder().choose(rollout, 18) == RESUME
    assert ladder().choose(rollout, 19).masked, "the write of version 10 is older than 8 versions"


@pytest.mark.parametrize(("log_ratio", "forks"), [(0.0, 0), (0.04, 0), (0.041, 1), (float("nan"), 1)])
def test_the_measurement_decides_between_the_first_rungs(log_ratio: float, forks: int) -> None:
    group = [cut_off((19, {"b": "b1"}), name="a"), cut_off((19, {}), (19, {}), name="b", action=19)]
    choices = ladder().choose_measured(group, NOW, log_ratio)
    assert [choice.action for choice in choices].count(Action.FORK) == forks
    assert all(choice.masked for choice in choices) == bool(forks)


def handed_out(
    *members: PartialRollout, version: int = NOW
) -> tuple[Waiting[list[Slot]], list[Slot], list[Callable[[float], None] | None]]:
    asked: list[Any] = []
    waiting: Waiting[list[Slot]] = Waiting(
        ladder(),
        OFF,
        members=lambda group: group,
        begun=lambda group: True,
        expect=lambda group, decide: asked.append(decide),
    )
    group = [Slot([member]) for member in members]
    waiting.add([group])
    assert waiting.take(1, version) == [group]
    return waiting, group, asked


def test_a_group_that_differs_too_much_is_forked_while_it_is_on_its_way() -> None:
    waiting, group, [decide] = handed_out(
        cut_off((19, {"b": "b1"}), name="a"), cut_off((19, {}), (19, {}), name="b", action=19)
    )
    assert waiting.tally.resumed == 2
    decide(0.05)
    first, second = (slot.rollouts[0] for slot in group)
    assert first.tokens == second.tokens == [1, 1, 9, 1, 1, 9]
    assert first.loss_mask == second.loss_mask == [0] * 6
    counts = waiting.tally
    assert (counts.ratio_checked, counts.ratio_anchored) == (1, 1)
    assert (counts.resumed, counts.forked, counts.rewound) == (0, 1, 1)
    assert counts.discarded_tokens == {"policy": 4}


def test_a_group_that_differs_little_stays_what_it_is() -> None:
    waiting, group, [decide] = handed_out(cut_off((19, {"b": "b1"}), name="a"))
    before = group[0].rollouts[0].to_json()
    decide(0.03)
    assert group[0].rollouts[0].to_json() == before
    assert (waiting.tally.ratio_checked, waiting.tally.ratio_anchored, waiting.tally.resumed) == (1, 0, 1)


@pytest.mark.parametrize("version", [19, 30, None], ids=["fresh", "old", "unknown"])
def test_nothing_is_measured_where_the_lag_has_decided(version: int | None) -> None:
    _, _, asked = handed_out(cut_off((19, {"b": "b1"}), name="a"), version=version)
    assert asked == [None]


class DropsLate(Ladder):
    name = "mine:DropsLate"

    def choose_measured(self, rollouts, version, log_ratio):
        return [Choice(Action.DROP)] * len(rollouts)


def test_a_group_on_its_way_cannot_be_dropped() -> None:
    asked: list[Any] = []
    waiting: Waiting[list[Slot]] = Waiting(
        DropsLate(2, 8, 0.04),
        OFF,
        members=lambda group: group,
        begun=lambda group: True,
        expect=lambda group, decide: asked.append(decide),
    )
    waiting.add([[Slot([cut_off((19, {}), name="a")])]])
    waiting.take(1, NOW)
    with pytest.raises(
        ValueError, match="mine:DropsLate, .*drops a group that is on its way; choose_measured may"
    ):
        asked[0](1.0)


def test_a_failed_member_is_no_part_of_it() -> None:
    failed = cut_off((1, {"b": "b1"}), name="f")
    failed.status = Status.FAILED
    assert ladder().choose_group([failed, cut_off((19, {}), name="a")], NOW) == [RESUME, MEASURED]


def test_an_open_action_counts_by_its_own_version() -> None:
    rollout = cut_off(name="a")
    act(rollout, 17)
    assert ladder().choose_group([rollout], NOW) == [Choice(Action.REWIND, 0, masked=True)]
