"""Lags at three levels, by hand-computed cases."""

import dataclasses

import pytest

from midstream.buffers.lags import Lags, lags, state_lag, token_lags
from midstream.buffers.rollout import PartialRollout
from tests.buffers.made import act, played

NOW = 10


def test_nothing_is_not_old() -> None:
    assert lags(PartialRollout("p", "g"), NOW) == Lags(0, 0, 0)


def test_each_level_counts_by_its_own_oldest() -> None:
    rollout = played((3, {}), (4, {"b": "b1"}), (6, {"c": "c1"}), action=8)
    # First token by version 3; of what is on disk, b is the oldest and by version 4.
    assert lags(rollout, NOW) == Lags(trajectory=7, token=7, environment=6)
    assert token_lags(rollout, NOW) == {7: 2, 6: 2, 4: 2, 2: 2}


@pytest.mark.parametrize(
    ("turns", "environment"),
    [
        ([(0, {}), (1, {})], 0),
        ([(0, {"a": "a1"})], 10),
        ([(0, {"a": "a1"}), (9, {"a": "a2"})], 1),
        ([(0, {"a": "a1"}), (9, {"b": "b1"})], 10),
        ([(0, {"a": "a1"}), (9, {"a": "a0"})], 0),
        ([(0, {"a": ""}), (3, {"b": "b1"}), (9, {"a": "a1"})], 7),
    ],
    ids=["nothing written", "written", "overwritten", "added to", "changed back", "deleted, then made anew"],
)
def test_only_writes_that_survive_make_a_state_old(turns, environment: int) -> None:
    assert lags(played(*turns), NOW).environment == environment


def test_a_transcript_ahead_of_its_environment_counts_by_the_state_it_resumes_in() -> None:
    rollout = played((2, {"b": "b1"}), (5, {"a": "a1"}))
    rollout.forget("s2")
    assert rollout.snapshot is None
    assert lags(rollout, NOW).environment == 8


def test_every_earlier_state_has_its_own_lag() -> None:
    rollout = played((1, {}), (2, {"b": "b1"}), (6, {"b": "b2"}))
    assert [state_lag(rollout.snapshots, f"s{number}", NOW) for number in range(3)] == [0, 8, 4]


def test_a_lineage_with_a_gap_counts_by_the_oldest_record() -> None:
    rollout = played((2, {"b": "b1"}), (5, {"b": "b2"}), (7, {"b": "b3"}))
    assert lags(rollout, NOW).environment == 3
    rollout.forget("s2")
    assert lags(rollout, NOW).environment == 8


def test_an_environment_without_lineage_counts_by_the_oldest_record() -> None:
    rollout = played((2, {"b": "b1"}), (5, {"b": "b2"}))
    rollout.snapshots = {
        key: dataclasses.replace(snapshot, parent=None) for key, snapshot in rollout.snapshots.items()
    }
    assert lags(rollout, NOW).environment == 8
    assert state_lag(rollout.snapshots, "s0", NOW) == 0, "the task's start is nobody's"


def test_tokens_of_an_action_that_changed_hands_have_their_own_lags() -> None:
    rollout = played(action=4)
    act(rollout, 9, tokens=3)
    assert token_lags(rollout, NOW) == {6: 2, 1: 3}
    assert lags(rollout, NOW) == Lags(6, 6, 0)
