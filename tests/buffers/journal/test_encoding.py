"""A rollout goes through bytes unchanged, and bytes that are none are refused."""

import dataclasses
import math
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.buffers.journal.encoding import decode, encode, member_of
from midstream.buffers.journal.errors import JournalDamaged, JournalError
from midstream.buffers.rollout import PartialRollout, RecordError, Span, Status
from midstream.envs.protocol import Change, Snapshot

numbers = st.integers(0, 200_000)


@st.composite
def rollouts(draw: st.DrawFn) -> PartialRollout:
    """Rollouts of a few turns, some tokens of which do not count."""
    key = draw(st.sampled_from(["prompt", "prömpt\0", "prompt\udc80"]))
    rollout = PartialRollout(key, "group", prompt_tokens=draw(st.lists(numbers, max_size=5)))
    for turn in range(draw(st.integers(0, 3))):
        change = Change(draw(st.text(max_size=5)), "modified", turn)
        rollout.enter(Snapshot(id=f"s{turn}", digest=f"d{turn}", changes=(change,)))
        rollout.begin_turn()
        tokens = draw(st.lists(numbers | st.just(2**31 + 1), min_size=1, max_size=9))
        log_probs = draw(st.lists(st.floats(allow_nan=False), min_size=len(tokens), max_size=len(tokens)))
        rollout.append_action(tokens, log_probs, [Span(turn, 0, len(tokens))])
        rollout.finish_action()
        rollout.append_observation(draw(st.lists(numbers, max_size=5)), seconds=0.25)
    for position in draw(st.lists(st.integers(0, 40), max_size=3)):
        if position < len(rollout.loss_mask):
            rollout.loss_mask[position] = 0
    rollout.status = draw(st.sampled_from(Status))
    rollout.reward = draw(st.none() | st.floats(allow_nan=False))
    return rollout


@settings(deadline=None)
@given(rollouts())
def test_a_rollout_goes_through_bytes_unchanged(rollout: PartialRollout) -> None:
    assert decode(encode(rollout)) == rollout


def long_rollout(tokens: int) -> PartialRollout:
    draws = random.Random(0)
    rollout = PartialRollout("prompt", "group", status=Status.ABORTED)
    rollout.enter(Snapshot(id="s", digest="d"))
    rollout.begin_turn()
    single = struct.unpack(f"{tokens}f", struct.pack(f"{tokens}f", *(-draws.random() for _ in range(tokens))))
    spans = [Span(3, 0, tokens // 2), Span(5, tokens // 2, tokens)]
    rollout.append_action([draws.randrange(150_000) for _ in range(tokens)], list(single), spans)
    return rollout


def test_a_token_takes_about_seven_bytes() -> None:
    tokens = 32_768
    assert len(encode(long_rollout(tokens))) < 7.1 * tokens


def test_log_probs_keep_every_bit() -> None:
    rollout = long_rollout(4)
    rollout.log_probs = [-0.0, -math.inf, math.nan, -1 / 3]
    assert [struct.pack("d", value) for value in decode(encode(rollout)).log_probs] == [
        struct.pack("d", value) for value in rollout.log_probs
    ]


def test_log_probs_outside_the_spans_keep_every_bit() -> None:
    rollout = long_rollout(4)
    rollout.finish_action()
    rollout.append_observation([5, 6])
    assert len(encode(rollout)) < len(encode(dataclasses.replace(rollout, log_probs=[0.5] * 6)))
    for odd in (-0.0, 0.1, -math.inf):
        rollout.log_probs[5] = odd
        assert [struct.pack("d", value) for value in decode(encode(rollout)).log_probs] == [
            struct.pack("d", value) for value in rollout.log_probs
        ]


def test_spans_that_leave_the_tokens_are_refused() -> None:
    rollout = long_rollout(10)
    rollout.spans.append(Span(7, 10, 11))
    with pytest.raises(RecordError, match="leaves the 10 response tokens"):
        encode(rollout)


def test_the_summary_is_the_rollouts() -> None:
    summary = member_of(long_rollout(1000)).summary
    assert (summary.tokens, summary.turns, summary.snapshots, summary.status) == (1000, 1, ("s",), "aborted")
    assert (summary.oldest_version, summary.newest_version) == (3, 5)


@pytest.mark.parametrize("kept", [0, 3, 12, 100, -5])
def test_bytes_that_are_cut_off_are_refused(kept: int) -> None:
    with pytest.raises(JournalDamaged, match="drop its group"):
        decode(encode(long_rollout(1000))[:kept])


def test_other_bytes_are_refused() -> None:
    payload = encode(long_rollout(10))
    with pytest.raises(JournalDamaged, match="1 bytes too many"):
        decode(payload + b"x")
    with pytest.raises(JournalError, match="has format 9, this version of midstream reads 2"):
        decode(payload[:4] + b"\x09" + payload[5:])


def test_a_rollout_that_contradicts_itself_is_refused() -> None:
    rollout = long_rollout(10)
    rollout.spans.pop()
    with pytest.raises(RecordError):
        decode(encode(rollout))


def test_a_column_that_holds_no_numbers_is_refused() -> None:
    rollout = long_rollout(2)
    rollout.tokens = ["a", "b"]  # type: ignore[list-item]
    with pytest.raises(JournalError, match="tokens of a rollout cannot be written down"):
        encode(rollout)
