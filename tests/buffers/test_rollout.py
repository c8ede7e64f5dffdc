"""Property tests of the records: whatever happens to a rollout, its parts agree."""

import copy
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from midstream.buffers.rollout import PartialRollout, Phase, RecordError, Span, Status, Turn
from midstream.envs.protocol import Change, Snapshot


def snapshot(number: int) -> Snapshot:
    changes = (Change(path=f"f{number}", kind="modified", bytes=number),)
    return Snapshot(id=f"s{number}", digest=f"d{number}", parent=None, changes=changes, bytes=number)


@st.composite
def generations(draw: st.DrawFn) -> tuple[list[int], list[float], list[Span]]:
    """Tokens with log-probs and spans of non-decreasing versions that tile them."""
    lengths = draw(st.lists(st.integers(1, 5), max_size=3))
    version = draw(st.integers(0, 3))
    spans, position = [], 0
    for length in lengths:
        spans.append(Span(version, position, position + length))
        position += length
        version += draw(st.integers(0, 2))
    tokens = draw(st.lists(st.integers(0, 500), min_size=position, max_size=position))
    log_probs = draw(st.lists(st.floats(-20, 0), min_size=position, max_size=position))
    return tokens, log_probs, spans


class AnyRollout(RuleBasedStateMachine):
    """Any order of what the turn loop, the buffer and the policies do to a rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.rollout = PartialRollout("prompt", "group", prompt_tokens=[1, 2])
        self.made = 0
        self.snapshots = 0

    def phase(self) -> Phase | None:
        turn = self.rollout.open_turn
        return None if turn is None else turn.phase

    @precondition(lambda self: self.phase() is None)
    @rule()
    def begin(self) -> None:
        self.rollout.begin_turn()

    @precondition(lambda self: self.phase() is Phase.GENERATING)
    @rule(generation=generations())
    def generate(self, generation: tuple[list[int], list[float], list[Span]]) -> None:
        self.made += len(generation[0])
        self.rollout.append_action(*generation)

    @precondition(lambda self: self.phase() is Phase.GENERATING)
    @rule()
    def finish_action(self) -> None:
        self.rollout.finish_action()

    @precondition(lambda self: self.phase() is Phase.ACTING)
    @rule(tokens=st.lists(st.integers(0, 500), max_size=6))
    def observe(self, tokens: list[int]) -> None:
        self.rollout.append_observation(tokens, seconds=0.5)

    @rule()
    def enter(self) -> None:
        self.snapshots += 1
        self.rollout.enter(snapshot(self.snapshots))

    @rule()
    def rewind(self) -> None:
        self.leaving(self.rollout.rewind_to_snapshot)
        assert self.rollout.snapshot is not None or not self.rollout.turns

    @precondition(lambda self: self.rollout.turns)
    @rule(data=st.data())
    def rewind_to_any_turn(self, data: st.DataObject) -> None:
        turn = data.draw(st.integers(0, len(self.rollout.turns) - 1))
        start, snapshot = self.rollout.turns[turn].start, self.rollout.turns[turn].snapshot_before
        kept = [field[:start] for field in (self.rollout.tokens, self.rollout.log_probs)]
        turns = self.rollout.turns[:turn]
        self.leaving(lambda: self.rollout.rewind_to(turn))
        assert [self.rollout.tokens, self.rollout.log_probs] == kept
        assert (self.rollout.turns, self.rollout.snapshot) == (turns, snapshot)

    @rule()
    def restart(self) -> None:
        self.leaving(self.rollout.restart)
        assert not self.rollout.tokens and not self.rollout.turns

    @precondition(lambda self: self.rollout.snapshot is not None)
    @rule()
    def lose_the_snapshot(self) -> None:
        self.rollout.forget(self.rollout.snapshot)

    def leaving(self, change) -> None:
        """What ``change`` returns is what leaves the record; a shallow copy taken before keeps all it had."""
        copied, before = copy.copy(self.rollout), copy.deepcopy(self.rollout)
        left = {snapshot.id: snapshot for snapshot in change()}
        assert left | self.rollout.snapshots == before.snapshots
        assert not left.keys() & self.rollout.snapshots.keys()
        assert copied == before

    @invariant()
    def parts_agree(self) -> None:
        self.rollout.check()

    @invariant()
    def no_generated_token_is_unaccounted_for(self) -> None:
        assert self.rollout.generated_tokens + self.rollout.discarded_tokens == self.made

    @invariant()
    def the_first_token_says_when_it_was_dispatched(self) -> None:
        first = self.rollout.spans[0].version if self.rollout.spans else None
        assert self.rollout.dispatch_version == first

    @invariant()
    def masks_and_spans_cover_the_same_tokens(self) -> None:
        covered = {position for span in self.rollout.spans for position in range(span.start, span.end)}
        assert covered == {position for position, mask in enumerate(self.rollout.loss_mask) if mask}

    @invariant()
    def neighbouring_spans_differ(self) -> None:
        begins = {turn.start for turn in self.rollout.turns}
        for left, right in zip(self.rollout.spans, self.rollout.spans[1:], strict=False):
            assert left.end < right.start or left.version != right.version or right.start in begins

    @invariant()
    def round_trips_are_the_identity(self) -> None:
        assert PartialRollout.from_json(json.loads(json.dumps(self.rollout.to_json()))) == self.rollout
        assert pickle.loads(pickle.dumps(self.rollout)) == self.rollout


TestAnyRollout = AnyRollout.TestCase
TestAnyRollout.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def played() -> PartialRollout:
    rollout = PartialRollout("prompt", "group", prompt_tokens=[7])
    rollout.enter(snapshot(0))
    rollout.begin_turn()
    rollout.append_action([10, 11], [-0.1, -0.2], [Span(3, 0, 1), Span(4, 1, 2)])
    rollout.finish_action()
    rollout.append_observation([20], seconds=0.25)
    rollout.enter(snapshot(1))
    rollout.begin_turn()
    rollout.append_action([12], [-0.3], [Span(5, 0, 1)])
    return rollout


def test_a_hand_written_rollout_reads_as_it_was_played() -> None:
    rollout = played()
    assert rollout.tokens == [10, 11, 20, 12]
    assert rollout.loss_mask == [1, 1, 0, 1]
    assert rollout.log_probs == [-0.1, -0.2, 0.0, -0.3]
    assert rollout.spans == [Span(3, 0, 1), Span(4, 1, 2), Span(5, 3, 4)]
    assert rollout.turns == [
        Turn(0, 2, 3, Phase.OBSERVED, snapshot_before="s0", seconds=0.25),
        Turn(3, 4, 4, Phase.GENERATING, snapshot_before="s1"),
    ]
    assert rollout.dispatch_version == 3
    assert rollout.snapshot == "s1"


def test_rewind_drops_a_transcript_that_is_ahead_of_the_environment() -> None:
    rollout = played()
    rollout.finish_action()
    rollout.append_observation([21])
    assert rollout.snapshot is None
    rollout.rewind_to_snapshot()
    assert rollout.tokens == [10, 11, 20]
    assert rollout.snapshot == "s1"
    assert rollout.discarded_tokens == 1


def test_a_rewind_takes_tokens_and_environment_back_together() -> None:
    rollout = played()
    rollout.status, rollout.reward = Status.COMPLETED, 1.0
    assert rollout.rewind_to(1) == []
    assert (rollout.tokens, rollout.log_probs, rollout.loss_mask) == (
        [10, 11, 20],
        [-0.1, -0.2, 0.0],
        [1, 1, 0],
    )
    assert (rollout.spans, rollout.discarded_tokens) == ([Span(3, 0, 1), Span(4, 1, 2)], 1)
    assert (rollout.snapshot, rollout.status, rollout.reward) == ("s1", Status.ABORTED, None)
    assert [left.id for left in rollout.rewind_to(0)] == ["s1"]
    assert (rollout.tokens, rollout.dispatch_version, rollout.snapshot) == ([], None, "s0")
    rollout.check()


def test_a_turn_after_an_answer_without_tokens_can_be_taken_back() -> None:
    rollout = PartialRollout("prompt", "group", prompt_tokens=[7])
    for _ in range(2):
        rollout.begin_turn()
        rollout.append_action([1, 1], [-0.5, -0.5], [Span(3, 0, 2)])
        rollout.finish_action()
        rollout.append_observation([])
    assert rollout.spans == [Span(3, 0, 2), Span(3, 2, 4)]
    rollout.rewind_to(1)
    rollout.check()
    assert (rollout.spans, rollout.discarded_tokens) == ([Span(3, 0, 2)], 2)


@pytest.mark.parametrize("turn", [-1, 2])
def test_a_rewind_to_a_turn_that_is_not_there_is_refused(turn: int) -> None:
    with pytest.raises(RecordError, match=f"cannot rewind to turn {turn}: the rollout has 2"):
        played().rewind_to(turn)


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: r.log_probs.pop(),
        lambda r: r.loss_mask.append(1),
        lambda r: r.spans.pop(),
        lambda r: r.spans.append(Span(6, 4, 9)),
        lambda r: r.spans.insert(0, Span(1, 0, 2)),
        lambda r: r.turns.pop(),
        lambda r: r.snapshots.pop("s0"),
        lambda r: setattr(r, "snapshot", "s9"),
        lambda r: r.turns.__setitem__(0, Turn(0, 3, 3, Phase.OBSERVED)),
        lambda r: r.turns.__setitem__(0, Turn(0, 2, 3, Phase.ACTING)),
    ],
)
def test_damaged_records_are_refused(damage) -> None:
    rollout = played()
    damage(rollout)
    with pytest.raises(RecordError):
        rollout.check()
    with pytest.raises(RecordError):
        PartialRollout.from_json(rollout.to_json())


def test_a_record_of_another_version_is_refused_by_name() -> None:
    with pytest.raises(RecordError, match="future_field"):
        PartialRollout.from_json(played().to_json() | {"future_field": 1})


@given(generation=generations())
def test_tokens_without_a_version_are_refused(generation) -> None:
    tokens, log_probs, spans = generation
    rollout = PartialRollout("prompt", "group")
    rollout.begin_turn()
    with pytest.raises(RecordError):
        rollout.append_action([*tokens, 1], [*log_probs, -1.0], spans)
    assert rollout.tokens == []


def test_only_an_open_turn_takes_tokens() -> None:
    rollout = PartialRollout("prompt", "group")
    with pytest.raises(RecordError, match="begin_turn"):
        rollout.append_action([1], [-1.0], [Span(0, 0, 1)])
    rollout.begin_turn()
    with pytest.raises(RecordError, match="finish_action"):
        rollout.append_observation([1])
    with pytest.raises(RecordError, match="still generating"):
        rollout.begin_turn()


@pytest.mark.parametrize("status", list(Status))
def test_only_pending_and_aborted_rollouts_go_on(status: Status) -> None:
    assert status.finished == (status.value not in ("pending", "aborted"))
