"""Groups come back, wait and go out again: what becomes of each rollout, and what is counted."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from midstream.buffers.lags import lags
from midstream.buffers.policies.load import load_policy
from midstream.buffers.rollout import PartialRollout, Status
from midstream.buffers.tally import DISCARDS, Tally
from midstream.buffers.waiting import Waiting
from midstream.conf.schema import BoundsConfig, LayerConfig
from midstream.envs.protocol import Snapshot
from tests.buffers.made import played

NOW = 20
OLD = (0, {"b": "b1"})
YOUNG = (19, {"b": "b1"})


@dataclass
class Slot:
    """A member of a group: the records of one rollout, several where it was split."""

    rollouts: Sequence[PartialRollout]
    stored: int = 0

    def store(self, rollout: PartialRollout) -> None:
        self.rollouts = [rollout]
        self.stored += 1


Group = list[Slot]


@dataclass
class Scene:
    policy: str = "continue"
    bounds: dict[str, Any] = field(default_factory=dict)
    abandoned: list[Snapshot] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting: Waiting[Group] = Waiting(
            load_policy(LayerConfig(resume_policy=self.policy)),
            BoundsConfig(**self.bounds),
            members=lambda group: group,
            begun=lambda group: any(rollout.tokens for slot in group for rollout in slot.rollouts),
            abandon=self.abandoned.extend,
        )

    @property
    def tally(self) -> Tally:
        return self.waiting.tally


def group_of(*rollouts: PartialRollout) -> Group:
    return [Slot([rollout]) for rollout in rollouts]


def ended(*turns: Any) -> PartialRollout:
    rollout = played(*turns)
    rollout.status, rollout.reward = Status.COMPLETED, 1.0
    return rollout


def cut_off(*turns: Any, action: int | None = None) -> PartialRollout:
    rollout = played(*turns, action=action)
    rollout.status = Status.ABORTED
    return rollout


def test_continue_hands_out_what_came_back() -> None:
    scene = Scene("continue")
    group = [*group_of(cut_off(YOUNG), ended(YOUNG)), Slot([])]
    before = [rollout.to_json() for slot in group for rollout in slot.rollouts]
    scene.waiting.add([group])
    assert scene.waiting.take(4, NOW) == [group]
    assert [rollout.to_json() for slot in group for rollout in slot.rollouts] == before
    assert (scene.tally.buffered, scene.tally.taken, scene.tally.resumed) == (3, 3, 1)
    assert [slot.stored for slot in group] == [0, 0, 0]


def test_restart_empties_what_is_cut_off_and_leaves_what_has_ended() -> None:
    scene = Scene("restart")
    group = group_of(cut_off(YOUNG, action=19), ended(YOUNG))
    scene.waiting.add([group])
    assert scene.waiting.take(1, NOW) == [group]
    assert (group[0].rollouts[0].tokens, group[0].rollouts[0].status) == ([], Status.PENDING)
    assert group[1].rollouts[0].reward == 1.0
    assert (scene.tally.restarted, scene.tally.discarded_tokens) == (1, {"cut_off": 4})
    assert {snapshot.id for snapshot in scene.abandoned} == {"s0", "s1"}


def test_discard_lets_nothing_in() -> None:
    scene = Scene("discard")
    scene.waiting.add([group_of(cut_off(YOUNG), ended(YOUNG, YOUNG))])
    assert len(scene.waiting) == 0
    assert (scene.tally.dropped, scene.tally.discarded_tokens) == (2, {"cut_off": 6})


def test_rewind_takes_tokens_and_environment_back_together() -> None:
    scene = Scene("rewind", bounds={"trajectory": None, "token": None})
    group = group_of(cut_off((10, {}), (11, {"b": "b1"}), (19, {"c": "c1"}), action=19), cut_off(YOUNG))
    scene.waiting.add([group])
    scene.waiting.take(1, NOW)
    old, young = (slot.rollouts[0] for slot in group)
    assert (len(old.turns), len(old.tokens), old.generated_tokens, old.discarded_tokens) == (1, 3, 2, 6)
    assert (old.snapshot, lags(old, NOW).environment) == ("s0", 0)
    assert young.generated_tokens == 2
    assert (scene.tally.rewound, scene.tally.resumed, scene.tally.discarded_tokens) == (1, 1, {"policy": 6})
    assert [snapshot.id for snapshot in scene.abandoned] == ["s1", "s2"], (
        "a turn that only reads has no state of its own"
    )
    assert [slot.stored for slot in group] == [1, 0]


def test_a_bound_restarts_the_member_that_exceeds_it_one_that_has_ended_too() -> None:
    scene = Scene("continue")
    group = group_of(cut_off(OLD, OLD), ended(OLD), cut_off(YOUNG))
    scene.waiting.add([group])
    scene.waiting.take(1, NOW)
    assert [slot.rollouts[0].generated_tokens for slot in group] == [0, 0, 2]
    assert [slot.rollouts[0].status for slot in group[:2]] == [Status.PENDING] * 2
    assert group[1].rollouts[0].reward is None
    assert (scene.tally.restarted, scene.tally.discarded_tokens) == (2, {"trajectory_lag": 6})


def test_a_bound_that_drops_takes_the_group() -> None:
    scene = Scene("continue", bounds={"beyond": "drop"})
    old, young = group_of(cut_off(OLD), ended(YOUNG)), group_of(cut_off(YOUNG), cut_off(YOUNG))
    old[0].rollouts[0].resumes = 3
    scene.waiting.add([old, young])
    assert scene.waiting.take(2, NOW) == [young]
    assert (scene.tally.dropped, scene.tally.dropped_resumes) == (2, 3)
    assert scene.tally.discarded_tokens == {"trajectory_lag": 4}
    assert len(scene.waiting) == 0


def test_what_a_bound_takes_is_measured_against_what_goes_on() -> None:
    scene = Scene("continue")
    scene.waiting.add([group_of(cut_off(OLD, OLD, OLD), cut_off(OLD)), group_of(cut_off(YOUNG), cut_off())])
    scene.waiting.take(2, NOW)
    metrics = scene.tally.metrics()
    assert metrics["buffer/beyond_bounds_length"] == 4.0
    assert metrics["buffer/within_bounds_length"] == 2.0, "what has no token yet has no length"


def test_without_a_version_nothing_is_too_old() -> None:
    scene = Scene("rewind", bounds={"beyond": "drop"})
    scene.waiting.add([group_of(cut_off(OLD), cut_off(OLD))])
    assert len(scene.waiting.take(1, None)) == 1
    assert scene.tally.resumed == 2


def test_what_waited_under_another_policy_gets_the_choice_of_this_one() -> None:
    scene = Scene("restart")
    group = group_of(cut_off(YOUNG))
    scene.waiting.groups = [group]
    scene.waiting.take(1, NOW)
    assert group[0].rollouts[0].tokens == []
    assert scene.tally.discarded_tokens == {"policy": 2}


@pytest.mark.parametrize(
    ("policy", "rollouts", "left"),
    [
        ("continue", (ended(YOUNG), ended(YOUNG)), 2),
        ("continue", (ended(YOUNG), ended(OLD)), 1),
        ("rewind", (cut_off((16, {"b": "b1"})), cut_off((11, {}), (11, {"b": "b1"}))), 1),
    ],
    ids=["handed on together", "too old together", "a rewind of one is a restart of all"],
)
def test_samples_of_one_rollout_stay_together(policy: str, rollouts: Any, left: int) -> None:
    scene = Scene(policy)
    split = Slot([PartialRollout.from_json(rollout.to_json()) for rollout in rollouts])
    made = sum(rollout.generated_tokens for rollout in rollouts)
    scene.waiting.add([[split]])
    scene.waiting.take(1, NOW)
    assert len(split.rollouts) == left
    assert scene.tally.taken == 1
    if left == 1:
        assert split.rollouts[0].tokens == []
        assert scene.tally.discarded_tokens.total() == made


def test_zeros_are_logged() -> None:
    metrics = Tally().metrics()
    assert set(metrics.values()) == {0.0}
    assert {f"buffer/discarded_tokens/{reason}" for reason in DISCARDS} < metrics.keys()
    assert {"buffer/groups", "buffer/rewound", "buffer/passed_over", "buffer/stuck"} < metrics.keys()


def test_groups_left_behind_are_counted() -> None:
    scene = Scene("continue")
    scene.waiting.add([group_of(cut_off(YOUNG)) for _ in range(3)])
    scene.waiting.take(1, NOW)
    scene.waiting.take(0, NOW)
    assert (scene.tally.passed_over, scene.tally.groups) == (2, 2)
