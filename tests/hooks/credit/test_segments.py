"""From records to segments: where a response is cut, and how stale each piece is."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.buffers.rollout import Anchor, PartialRollout, Phase, Span, Turn
from midstream.envs.protocol import Change, Snapshot
from midstream.hooks.credit.batch import NONE, per_token
from midstream.hooks.credit.segments import Earned, batch_of, passed_by, segments_of
from tests.buffers.test_anchor import Scene, anchored_twice

NOW = 10


def written(key: str, parent: str | None, version: int, turn: int, **sizes: int) -> Snapshot:
    """A snapshot in which files of these sizes have changed."""
    changes = tuple(
        Change(path, "modified", size, f"{path}-before", f"{path}-{key}") for path, size in sizes.items()
    )
    return Snapshot(key, f"digest-{key}", parent, changes, version=version, turn=turn)


def rollout() -> PartialRollout:
    """An observation, a turn by version 4 that two versions made, a turn by version 9, and one that was cut off."""
    snapshots = [
        Snapshot("s0", "digest-s0"),
        written("s1", "s0", 6, 0, a=30),
        written("s2", "s1", 9, 1, b=10),
    ]
    return PartialRollout(
        prompt_key="p",
        group_key="g",
        tokens=[0] * 12,
        log_probs=[0.0] * 12,
        loss_mask=[0, 1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1],
        spans=[Span(4, 1, 3), Span(6, 3, 4), Span(9, 5, 7), Span(10, 9, 12)],
        turns=[
            Turn(1, 4, 5, Phase.OBSERVED, "s0"),
            Turn(5, 7, 9, Phase.OBSERVED, "s1"),
            Turn(9, 12, 12, Phase.GENERATING, "s2"),
        ],
        snapshots={snapshot.id: snapshot for snapshot in snapshots},
        snapshot="s2",
        dispatch_version=4,
    )


def test_a_response_is_cut_where_turn_or_version_changes():
    segments = segments_of(rollout(), NOW)
    assert [(s.length, s.version) for s in segments] == [
        (1, NONE), (2, 4), (1, 6), (1, NONE), (2, 9), (2, NONE), (3, 10),
    ]  # fmt: skip
    assert [s.state for s in segments] == [
        None, *["digest-s0"] * 3, *["digest-s1"] * 2, "digest-s2",
    ]  # fmt: skip
    assert [s.at_snapshot for s in segments] == [False, True, False, False, True, False, True]


def test_lags_are_of_three_levels():
    lags = [segment.lags for segment in segments_of(rollout(), NOW)]
    assert {trajectory for trajectory, _, _ in lags} == {6}
    assert [token for _, token, _ in lags] == [0, 6, 4, 0, 1, 0, 0]
    # 30 bytes by version 6, then beside them 10 by version 9.
    assert [state for _, _, state in lags] == pytest.approx([0, 0, 0, 0, 4, 4, (30 * 4 + 10 * 1) / 40])


def test_a_file_that_is_changed_back_is_nobodys():
    record = rollout()
    back = Snapshot("s2", "d", "s1", (Change("a", "modified", 30, "a-s1", "a-before"),), version=9, turn=1)
    record.snapshots["s2"] = back
    assert segments_of(record, NOW)[-1].lags[2] == 0


def test_a_turn_whose_state_is_unknown_counts_by_the_last_one_known_and_has_no_hash():
    record = rollout()
    record.turns[2] = dataclasses.replace(record.turns[2], snapshot_before=None)
    last = segments_of(record, NOW)[-1]
    assert (last.state, last.at_snapshot, last.lags[2]) == (None, False, 4)


def test_records_that_do_not_lead_back_to_the_start_have_no_state_lag():
    record = rollout()
    del record.snapshots["s0"]
    record.turns[0] = dataclasses.replace(record.turns[0], snapshot_before=None)
    assert [segment.lags[2] for segment in segments_of(record, NOW)] == [0] * 7


def test_states_of_an_environment_that_started_anew_have_no_lag_of_their_own():
    record = rollout()
    # As where no earlier state could be restored: its first snapshot has no parent, though two turns led to it.
    record.snapshots["s2"] = dataclasses.replace(record.snapshots["s2"], parent=None)
    assert segments_of(record, NOW)[-1].lags[2] == 4, "that of the last state that is known"


def test_what_lies_before_the_anchor_is_shared():
    record = rollout()
    record.anchor = Anchor("s1", 5)
    record.spans[0] = Span(4, 1, 3, inherited=True)
    record.loss_mask[1:3] = [0, 0]
    segments = segments_of(record, NOW)
    assert [s.shared for s in segments] == [True] * 4 + [False] * 3
    assert [s.inherited for s in segments] == [False, True, False, False, False, False, False]


def test_who_was_forked_twice_continues_both_anchors():
    rollouts = anchored_twice(Scene())
    second = rollouts[0].anchor
    [first] = {state for rollout in rollouts for state in passed_by(rollout) if state.tokens == 3}
    for rollout in rollouts:
        earned = Earned("g", 1.0, True, rollout.anchor, segments_of(rollout, NOW), passed_by(rollout))
        assert earned.continues([second, first]) == [first, second]
    stranger = PartialRollout("p", "g")
    assert Earned("g", 1.0, True, None, [], passed_by(stranger)).continues([first, second]) == []


def test_tokens_of_a_later_version_are_fresh():
    assert [segment.lags for segment in segments_of(rollout(), 5)][1:3] == [(1, 1, 0), (1, 0, 0)]


def test_a_rollout_without_a_token_has_no_segment():
    assert segments_of(PartialRollout("p", "g"), NOW) == []


def test_a_batch_numbers_groups_anchors_and_states_apart():
    segments = segments_of(rollout(), NOW)
    earned = [
        Earned("g", 1.0, True, None, segments),
        Earned("g", 0.0, True, Anchor("s1", 5), segments),
        Earned("h", 0.0, False, Anchor("s1", 5), segments),
        Earned("h", 0.0, True, Anchor("s2", 9), segments),
    ]
    batch = batch_of(earned)
    assert batch.groups.tolist() == [0, 0, 1, 1]
    assert batch.families.tolist() == [NONE, 0, 1, 1]
    assert batch.anchors.tolist() == [NONE, 0, 1, 2]
    assert batch.states.reshape(4, 7)[:, 1].tolist() == [0, 0, 3, 3], "a state of another prompt is another"
    assert (
        per_token(batch.versions, batch.lengths).tolist()
        == [NONE, 4, 4, 6, NONE, 9, 9, NONE, NONE, 10, 10, 10] * 4
    )


@given(
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    versions=st.lists(st.integers(0, 12), min_size=6),
)
def test_segments_tile_the_response_and_their_versions_are_the_spans(cuts: list[int], versions: list[int]):
    record = PartialRollout("p", "g")
    for length, version in zip(cuts, versions, strict=False):
        record.begin_turn()
        record.append_action([1] * length, [-1.0] * length, [Span(version, 0, length)])
        record.finish_action()
        record.append_observation([2] * (length % 3))
    segments = segments_of(record, NOW)
    assert sum(segment.length for segment in segments) == len(record.tokens)
    assert all(segment.length > 0 for segment in segments)
    of_tokens = [segment.version for segment in segments for _ in range(segment.length)]
    expected = [NONE] * len(record.tokens)
    for span in record.spans:
        expected[span.start : span.end] = [span.version] * span.length
    assert of_tokens == expected
