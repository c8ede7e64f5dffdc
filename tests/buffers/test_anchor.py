"""Groups that go on as forks of one member: who is the anchor, and what everybody's record says then."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from midstream.buffers.fork import fork
from midstream.buffers.holds import Holds
from midstream.buffers.policies.anchor import Anchoring
from midstream.buffers.policies.base import RESTART, RESUME, Action, Choice, Policy, rewind_to
from midstream.buffers.policies.load import load_policy
from midstream.buffers.rollout import Anchor, PartialRollout, RecordError, Span, Status
from midstream.buffers.waiting import Waiting
from midstream.conf.schema import BoundsConfig, LayerConfig
from midstream.envs.protocol import Snapshot
from tests.buffers.made import World, played

NOW = 10
READ: dict[str, str] = {}


def cut_off(*turns: Any, name: str, action: int | None = None) -> PartialRollout:
    rollout = played(*turns, name=name, action=action)
    rollout.status = Status.ABORTED
    return rollout


def ended(*turns: Any, name: str) -> PartialRollout:
    rollout = played(*turns, name=name)
    rollout.status, rollout.reward = Status.COMPLETED, 1.0
    return rollout


@dataclass
class Slot:
    """A member of a group, which says whose tokens it got."""

    rollouts: Sequence[PartialRollout]
    source: "Slot | None" = None

    def store(self, rollout: PartialRollout) -> None:
        self.rollouts = [rollout]

    def fork(self, rollout: PartialRollout, source: "Slot") -> None:
        self.rollouts, self.source = [rollout], source


Group = list[Slot]


@dataclass
class Scene:
    """A group goes out under a policy, and its snapshots are held as long as a record refers to them."""

    policy: str | Policy = "anchor"
    prefix: str = "trained"
    bounds: dict[str, Any] = field(default_factory=dict)
    given_up: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        named = isinstance(self.policy, str)
        layer = LayerConfig(
            resume_policy=self.policy if named else "continue", policies={"anchor": {"prefix": self.prefix}}
        )
        self.holds = Holds()
        self.waiting: Waiting[Group] = Waiting(
            load_policy(layer) if named else self.policy,
            BoundsConfig(**self.bounds),
            members=lambda group: group,
            begun=lambda group: True,
            abandon=self.release,
            share=self.holds.share,
        )
        self.tally = self.waiting.tally

    def release(self, snapshots: Sequence[Snapshot]) -> None:
        self.given_up += [snapshot.id for snapshot in self.holds.release(snapshots)]

    def hand_out(self, *members: PartialRollout | None, version: int = NOW) -> list[PartialRollout]:
        group = [Slot([] if member is None else [member]) for member in members]
        self.waiting.add([group])
        assert self.waiting.take(1, version) == [group]
        for slot in group:
            slot.rollouts[0].check()
            assert PartialRollout.from_json(slot.rollouts[0].to_json()) == slot.rollouts[0]
        self.group = group
        return [slot.rollouts[0] for slot in group]


def masks(rollouts: Sequence[PartialRollout]) -> list[list[int]]:
    return [rollout.loss_mask for rollout in rollouts]


FURTHEST = [(8, {"b": "b1"}), (9, {"c": "c1"})]


def group_of_four() -> list[PartialRollout | None]:
    """One member has ended, one came furthest and is in an action, one is behind, one has not begun."""
    return [
        ended((8, {"z": "z1"}), name="e"),
        cut_off((7, READ), name="l", action=9),
        cut_off(*FURTHEST, name="f", action=9),
        None,
    ]


def test_all_that_go_on_continue_the_member_that_came_furthest() -> None:
    scene = Scene()
    members = group_of_four()
    before = members[0].to_json()
    done, late, furthest, new = scene.hand_out(*members)
    assert done.to_json() == before
    assert scene.group[2].source is None
    assert [slot.source for slot in scene.group] == [None, scene.group[2], None, scene.group[2]]
    for rollout in (late, furthest, new):
        assert rollout.tokens == [1, 1, 9, 1, 1, 9]
        assert rollout.log_probs == [-0.5, -0.5, 0.0, -0.5, -0.5, 0.0]
        assert (rollout.turns, list(rollout.snapshots)) == (furthest.turns, ["fs0", "fs1", "fs2"])
        assert (rollout.snapshot, rollout.anchor) == ("fs2", Anchor("fs2", 6))
        assert (rollout.dispatch_version, rollout.status) == (8, Status.ABORTED)
        assert (rollout.prompt_key, rollout.group_key, rollout.prompt_tokens) == ("prompt", "group", [7])
    assert furthest.spans == [Span(8, 0, 2), Span(9, 3, 5)]
    assert late.spans == new.spans == [Span(8, 0, 2, inherited=True), Span(9, 3, 5, inherited=True)]
    assert masks([late, furthest, new]) == [[0] * 6, [1, 1, 0, 1, 1, 0], [0] * 6]


def test_what_forks_throw_away_and_share_is_counted_once() -> None:
    scene = Scene()
    _, late, furthest, new = scene.hand_out(*group_of_four())
    assert [rollout.own_tokens for rollout in (late, furthest, new)] == [0, 4, 0]
    assert [rollout.generated_tokens for rollout in (late, furthest, new)] == [4, 4, 4]
    assert [rollout.discarded_tokens for rollout in (late, furthest, new)] == [4, 2, 0]
    assert (scene.tally.forked, scene.tally.rewound, scene.tally.resumed) == (2, 1, 0)
    assert scene.tally.discarded_tokens == {"policy": 6}
    assert scene.given_up == ["ls0"]
    for last, rollout in ((False, late), (False, furthest), (True, new)):
        scene.release(list(rollout.snapshots.values()))
        assert scene.given_up[1:] == (["fs0", "fs1", "fs2"] if last else [])


def test_a_masked_prefix_is_out_of_the_loss_in_the_anchor_too() -> None:
    scene = Scene(prefix="masked")
    _, *others = scene.hand_out(*group_of_four())
    assert masks(others) == [[0] * 6] * 3
    assert [rollout.own_tokens for rollout in others] == [0, 4, 0]


def test_what_a_fork_makes_itself_is_its_own() -> None:
    _, late, _, _ = Scene().hand_out(*group_of_four())
    world = World("l2")
    world.turn(late, 10, d="d1")
    late.check()
    assert (late.own_tokens, late.generated_tokens) == (2, 6)
    assert late.loss_mask == [0, 0, 0, 0, 0, 0, 1, 1, 0]
    assert late.spans[2] == Span(10, 6, 8)
    late.rewind_to(1)
    assert (late.anchor, late.own_tokens, late.discarded_tokens) == (Anchor("fs1", 3), 0, 6)
    assert late.spans == [Span(8, 0, 2, inherited=True)]
    late.restart()
    assert (late.anchor, late.spans, late.discarded_tokens) == (None, [], 6)


def anchored_twice(scene: Scene) -> list[PartialRollout]:
    """The second anchor is a fork of the first, which has gone on less far since; the third member is behind."""
    owner, fork_, behind = scene.hand_out(
        cut_off((8, {"b": "b1"}), name="o"), cut_off(name="f"), cut_off(name="x")
    )
    for rollout, turns in ((owner, 1), (fork_, 2)):
        world = World("O" if rollout is owner else "F")
        for turn in range(turns):
            world.turn(rollout, 9, **{f"n{turn}": "1"})
    return scene.hand_out(owner, fork_, behind, version=11)


def test_a_second_fork_leaves_each_token_in_the_loss_where_it_was() -> None:
    owner, anchor, behind = anchored_twice(Scene())
    assert owner.tokens == anchor.tokens == behind.tokens == [1, 1, 9] * 3
    # What the first anchor made before the first fork is still its own; the rest the second anchor made.
    assert owner.spans == [
        Span(8, 0, 2),
        Span(9, 3, 5, inherited=True),
        Span(9, 6, 8, inherited=True),
    ]
    assert anchor.spans == [Span(8, 0, 2, inherited=True), Span(9, 3, 5), Span(9, 6, 8)]
    assert all(span.inherited for span in behind.spans)
    assert masks([owner, anchor, behind]) == [
        [1, 1, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 1, 1, 0],
        [0] * 9,
    ]
    assert [rollout.discarded_tokens for rollout in (owner, anchor, behind)] == [2, 0, 0]
    assert {rollout.anchor for rollout in (owner, anchor, behind)} == {Anchor("Fs1", 9)}


def test_after_a_second_fork_the_last_to_end_gives_the_snapshots_up() -> None:
    scene = Scene()
    members = anchored_twice(scene)
    assert scene.given_up == ["fs0", "xs0", "Os0"]
    for rollout in members:
        assert set(scene.given_up) == {"fs0", "xs0", "Os0"}
        scene.release(list(rollout.snapshots.values()))
    assert sorted(scene.given_up[3:]) == ["Fs0", "Fs1", "os0", "os1"]


def test_a_group_that_is_at_its_anchor_already_goes_on_as_it_is() -> None:
    scene = Scene()
    before = [rollout.to_json() for rollout in scene.hand_out(*group_of_four())]
    again = scene.hand_out(*(slot.rollouts[0] for slot in scene.group))
    assert [rollout.to_json() for rollout in again] == before
    assert scene.tally.forked == 2


@pytest.mark.parametrize(
    ("member", "choice"),
    [
        (cut_off((8, {"b": "b1"}), name="a"), RESUME),
        (cut_off((8, {"b": "b1"}), name="a", action=9), rewind_to(1)),
        (cut_off(name="a", action=9), rewind_to(0)),
        (cut_off(name="a"), RESUME),
        (PartialRollout("prompt", "group"), RESUME),
        (ended((8, READ), name="a"), RESUME),
    ],
    ids=["at a state", "in an action", "in the first action", "at the start", "not begun", "ended"],
)
def test_one_that_goes_on_alone_does_so_from_its_newest_snapshot(
    member: PartialRollout, choice: Choice
) -> None:
    assert Anchoring("trained").choose(member, NOW) == choice


def test_without_any_state_each_starts_anew() -> None:
    stateless = cut_off((8, READ), name="a")
    for snapshot in list(stateless.snapshots):
        stateless.forget(snapshot)
    choices = Anchoring("trained").choose_group([stateless, cut_off(name="b", action=9)], NOW)
    assert choices == [RESTART, rewind_to(0)]


def test_the_anchor_is_who_keeps_the_most_not_who_made_the_most() -> None:
    lost = cut_off((8, {"b": "b1"}), (8, {"c": "c1"}), (8, {"d": "d1"}), name="a")
    for snapshot in ("as1", "as2", "as3"):
        lost.forget(snapshot)
    behind = cut_off((9, {"b": "b1"}), name="b")
    assert Anchoring("trained").choose_group([lost, behind], NOW) == [
        Choice(Action.FORK, 1, source=1),
        Choice(Action.RESUME, anchors=True),
    ]


def test_a_member_too_old_to_go_on_becomes_a_fork_of_one_that_may() -> None:
    scene = Scene(bounds={"trajectory": 5})
    old, young = scene.hand_out(cut_off((1, READ), (1, READ), name="o"), cut_off((8, {"b": "b1"}), name="y"))
    assert old.tokens == young.tokens == [1, 1, 9]
    assert (old.own_tokens, young.own_tokens) == (0, 2)
    assert scene.tally.forked == 1


@pytest.mark.parametrize("beyond", ["restart", "drop"])
def test_a_group_without_any_member_within_the_bounds(beyond: str) -> None:
    scene = Scene(bounds={"trajectory": 5, "beyond": beyond})
    group = [Slot([cut_off((1, READ), name="a")]), Slot([cut_off((2, READ), name="b")]), Slot([])]
    scene.waiting.add([group])
    taken = scene.waiting.take(1, NOW)
    assert len(taken) == (beyond == "restart")
    assert scene.tally.discarded_tokens == {"trajectory_lag": 4}
    assert sorted(scene.given_up) == ["as0", "bs0"]
    assert (scene.tally.restarted, scene.tally.dropped) == ((2, 0) if beyond == "restart" else (0, 3))


def test_a_split_rollout_is_no_anchor_and_no_fork() -> None:
    scene = Scene()
    split = Slot([cut_off(*FURTHEST, FURTHEST[0], name="s"), cut_off(*FURTHEST, name="s", action=9)])
    whole = Slot([cut_off((8, READ), name="w")])
    scene.waiting.add([[split, whole]])
    scene.waiting.take(1, NOW)
    assert [rollout.tokens for rollout in split.rollouts] == [[]]
    assert (whole.rollouts[0].tokens, whole.source) == ([1, 1, 9], None)
    assert (scene.tally.restarted, scene.tally.forked) == (1, 0)


def test_a_fork_begins_at_a_state() -> None:
    source = cut_off((8, {"b": "b1"}), name="s")
    source.forget("ss1")
    rollout = cut_off(name="r")
    with pytest.raises(
        RecordError, match="cannot fork at turn 1: no snapshot of the state before it is known"
    ):
        fork(rollout, source, 1)
    with pytest.raises(RecordError, match="cannot rewind to turn 4: the rollout has 1"):
        fork(rollout, source, 4)


def test_inherited_tokens_are_never_trained() -> None:
    _, late, _, _ = Scene().hand_out(*group_of_four())
    late.loss_mask[0] = 1
    with pytest.raises(RecordError, match="inherited tokens are trained"):
        late.check()


class Says(Policy):
    """Whatever the test wants."""

    name = "mine:Says"

    def __init__(self, *choices: Choice) -> None:
        self.choices = list(choices)

    def choose(self, rollout: PartialRollout, version: int) -> Choice:
        return RESUME

    def choose_group(self, rollouts: Sequence[PartialRollout], version: int) -> list[Choice]:
        return self.choices


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([RESUME], "mine:Says made 1 choices for 2 rollouts; choose_group must return one for each"),
        ([Choice(Action.FORK, 1, source=5), RESUME], "from rollout 5 of 2; name the position of a sibling"),
        (
            [Choice(Action.FORK, 1, source=0), RESUME],
            "forks rollout 0 from rollout 0 of 2; name the position",
        ),
        (
            [Choice(Action.FORK, 1, source=1), Choice(Action.FORK, 1, source=0)],
            "which becomes a fork itself; fork both from the same one",
        ),
        (
            [Choice(Action.FORK, 7, source=1), RESUME],
            "at turn 7, where it has no snapshot; fork where it has",
        ),
    ],
)
def test_choices_that_do_not_fit_the_group_are_named(choices: list[Choice], message: str) -> None:
    scene = Scene(policy=Says(*choices))
    group = [cut_off((8, {"b": "b1"}), name="a"), cut_off((8, {"b": "b1"}), name="b")]
    with pytest.raises(ValueError, match=message):
        scene.hand_out(*group)


def test_a_policy_of_the_users_own_can_fork() -> None:
    scene = Scene(policy=Says(Choice(Action.FORK, 1, source=1), Choice(Action.RESUME, anchors=True)))
    first, second = scene.hand_out(cut_off(name="a"), cut_off(*FURTHEST, name="b"))
    assert first.tokens == second.tokens[:3] == [1, 1, 9]
    assert (first.anchor, second.anchor) == (Anchor("bs1", 3), Anchor("bs2", 6))
