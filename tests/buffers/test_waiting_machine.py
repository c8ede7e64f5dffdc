"""Whatever happens in whatever order: no group is lost or doubled, records agree, tokens and snapshots add up."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from midstream.buffers.holds import Holds
from midstream.buffers.lags import lags
from midstream.buffers.policies.base import goes_on
from midstream.buffers.policies.bounds import exceeded
from midstream.buffers.policies.ladder import trained_lag
from midstream.buffers.policies.load import load_policy
from midstream.buffers.queue import oldest_first
from midstream.buffers.rollout import PartialRollout, Phase, Span, Status
from midstream.buffers.waiting import Waiting
from midstream.conf.schema import BoundsConfig, LayerConfig
from midstream.conf.schema.policies import BUILT_IN
from midstream.envs.protocol import Change, Snapshot

MEMBERS = 3
REWIND_MAX_LAG = 2
SMALL_LAG = 1
PARAMETERS = {
    "rewind": {"max_lag": REWIND_MAX_LAG},
    "ladder": {"small_lag": SMALL_LAG, "max_lag": REWIND_MAX_LAG, "max_log_ratio": 0.5},
}
MOST_GROUPS = 8
ENDS = ["between turns", "in an action", "before a step", "without a snapshot", "completed", "failed"]

caps = st.none() | st.integers(1, 5)
WRITES = [{}, {}, {"a": "1"}, {"a": "2"}, {"a": ""}, {"b": "1"}, {"b": ""}]
PLAYED = 0.8  # of the members of the groups that run, in one play


def newest_first(groups: list[Any], count: int) -> list[Any]:
    return [groups.pop() for _ in range(min(count, len(groups)))]


class Slot:
    """One member: its rollout once it has begun, with every snapshot that was ever taken of its environment.

    ``files`` are those of all snapshots of the job, by their ids.
    """

    def __init__(self, name: str, files: dict[str, dict[str, str]]) -> None:
        self.name = name
        self.files = files
        self.taken: list[str] = []
        self.rollouts: Sequence[PartialRollout] = []
        self.made_tokens = 0
        self.lost_by_play = 0  # tokens that the play itself took back, to the last state that can be restored
        self.unrestorable: set[str] = set()

    def store(self, rollout: PartialRollout) -> None:
        assert [rollout] == list(self.rollouts)

    def fork(self, rollout: PartialRollout, source: "Slot") -> None:
        assert source is not self
        assert rollout.tokens == source.rollout.tokens[: len(rollout.tokens)]
        self.rollouts = [rollout]

    @property
    def rollout(self) -> PartialRollout:
        return self.rollouts[0]

    def begin(self) -> None:
        self.rollouts = [PartialRollout("prompt", "group", prompt_tokens=[7])]

    def enter(self, writes: dict[str, str]) -> None:
        """What a snapshot after these writes does to the record."""
        before = self.rollout.turns[-1].snapshot_before if self.rollout.turns else None
        old = self.files[before] if before is not None else {}
        changed = {path: after for path, after in writes.items() if old.get(path, "") != after}
        if before is not None and not changed:
            self.rollout.enter(self.rollout.snapshots[before])
            return
        changes = tuple(
            Change(path, "modified", 1, old.get(path, ""), after) for path, after in changed.items()
        )
        key = f"{self.name}/{len(self.taken)}"
        self.taken.append(key)
        self.files[key] = old | changed
        self.rollout.enter(Snapshot(key, key, before, () if before is None else changes))


class AnyBuffer(RuleBasedStateMachine):
    """A host that launches, plays, cuts off, takes and trains as it likes."""

    @initialize(
        policy=st.sampled_from(["rewind", "continue", "anchor", "ladder", *BUILT_IN]),
        prefix=st.sampled_from(["trained", "masked"]),
        bounds=st.fixed_dictionaries(
            {
                "trajectory": caps,
                "token": caps,
                "environment": st.none() | st.integers(REWIND_MAX_LAG, 5),
                "beyond": st.sampled_from(["restart", "drop"]),
                "passed_over": st.integers(1, 3),
                "resumed_share": st.sampled_from([0.25, 0.5, 1.0]),
            }
        ),
        select=st.sampled_from([oldest_first, newest_first]),
    )
    def make(self, policy: str, prefix: str, bounds: dict[str, Any], select: Any) -> None:
        parameters = PARAMETERS | {"anchor": {"prefix": prefix}}
        self.policy = load_policy(LayerConfig(resume_policy=policy, policies=parameters))
        self.prefix = prefix
        self.bounds = BoundsConfig(**bounds)
        self.abandoned: list[Snapshot] = []
        self.holds = Holds()
        self.files: dict[str, dict[str, str]] = {}
        self.made = itertools.count()  # every token of the model is another one
        self.asked: list[tuple[list[Slot], Callable[[float], None]]] = []
        self.waiting: Waiting[list[Slot]] = Waiting(
            self.policy,
            self.bounds,
            members=lambda group: group,
            begun=self.has_begun,
            select=select,
            abandon=self.release,
            share=self.holds.share,
            expect=self.expect,
        )
        self.version = 0
        self.launched: list[list[Slot]] = []
        self.running: list[list[Slot]] = []
        self.trained: list[list[Slot]] = []
        self.dropped: list[list[Slot]] = []

    @staticmethod
    def has_begun(group: list[Slot]) -> bool:
        return any(rollout.tokens for slot in group for rollout in slot.rollouts)

    def release(self, snapshots: Iterable[Snapshot]) -> None:
        self.abandoned += self.holds.release(snapshots)

    def expect(self, group: list[Slot], decide: Callable[[float], None] | None) -> None:
        if decide is not None:
            self.asked.append((group, decide))

    @precondition(lambda self: len(self.launched) < MOST_GROUPS)
    @rule(count=st.integers(1, 3))
    def launch(self, count: int) -> None:
        first = len(self.launched)
        groups = [
            [Slot(f"r{number}.{member}", self.files) for member in range(MEMBERS)]
            for number in range(first, first + count)
        ]
        self.launched += groups
        self.running += groups

    @rule(versions=st.integers(1, 3))
    def push_weights(self, versions: int) -> None:
        self.version += versions

    @precondition(lambda self: self.running)
    @rule(seed=st.integers(0, 2**32))
    def play(self, seed: int) -> None:
        # Seeded, not drawn: what hypothesis draws is mostly short and mostly the same, and such rollouts meet
        # no bound.
        dice = random.Random(seed)
        for slot in [slot for group in self.running for slot in group if dice.random() < PLAYED]:
            turns = [(dice.randint(0, 3), dice.choice(WRITES)) for _ in range(dice.randint(0, 3))]
            self.play_one(slot, turns, dice.choice(ENDS))

    @precondition(lambda self: self.running)
    @rule(seed=st.integers(0, 2**32), versions=st.integers(1, 2), count=st.integers(2, MOST_GROUPS))
    def a_whole_step(self, seed: int, versions: int, count: int) -> None:
        self.play(seed)
        self.train()
        if self.running:
            self.cut_off(MOST_GROUPS)
        self.push_weights(versions)
        self.take(count, knows_version=True, log_ratio=random.Random(seed).choice([None, 0.1, 0.9]))

    def play_one(self, slot: Slot, turns: list[tuple[int, dict[str, str]]], end: str) -> None:
        if not slot.rollouts:
            slot.begin()
        rollout = slot.rollout
        if rollout.status.finished:
            return
        before = rollout.discarded_tokens
        self.release(rollout.rewind_to_snapshot())
        slot.lost_by_play += rollout.discarded_tokens - before
        rollout.status = Status.PENDING
        if rollout.snapshot is None:
            slot.enter({})
        for tokens, writes in turns:
            self.play_action(slot, tokens)
            rollout.finish_action()
            rollout.append_observation([9])
            slot.enter(writes)
        if end in ("in an action", "before a step"):
            self.play_action(slot, 2)
            if end == "before a step":
                rollout.finish_action()
        elif end == "without a snapshot" and rollout.snapshot is not None:
            lost = rollout.snapshots[rollout.snapshot]
            slot.unrestorable.add(lost.id)
            rollout.forget(lost.id)
            self.release([lost])
        elif end in ("completed", "failed"):
            rollout.status = Status(end)
            self.release(rollout.snapshots.values())

    def play_action(self, slot: Slot, tokens: int) -> None:
        open_turn = slot.rollout.open_turn
        if open_turn is None or open_turn.phase is Phase.GENERATING:
            if open_turn is None:
                slot.rollout.begin_turn()
            made = list(itertools.islice(self.made, tokens))
            spans = [Span(self.version, 0, tokens)] if tokens else []
            slot.rollout.append_action(made, [-0.5] * tokens, spans)
            slot.made_tokens += tokens

    @rule()
    def train(self) -> None:
        done = [g for g in self.running if all(s.rollouts and s.rollout.status.finished for s in g)]
        self.trained += done
        self.running = [group for group in self.running if group not in done]

    @precondition(lambda self: self.running)
    @rule(count=st.integers(1, MOST_GROUPS))
    def cut_off(self, count: int) -> None:
        for group in self.running[:count]:
            for slot in group:
                if slot.rollouts and not slot.rollout.status.finished:
                    slot.rollout.status = Status.ABORTED
            waited = len(self.waiting)
            self.waiting.add([group])
            if len(self.waiting) == waited:
                self.dropped.append(group)
        del self.running[:count]

    @precondition(lambda self: len(self.waiting))
    @rule(
        count=st.integers(1, 4),
        knows_version=st.sampled_from([True, True, True, False]),
        log_ratio=st.sampled_from([None, 0.1, 0.9]),
    )
    def take(self, count: int, knows_version: bool, log_ratio: float | None) -> None:
        before = list(self.waiting.groups)
        begun = {id(group) for group in before if self.has_begun(group)}
        overdue = {
            id(group) for group in before if self.waiting.times_passed_over(group) >= self.bounds.passed_over
        }
        self.asked.clear()
        ended = {
            id(slot) for group in before for slot in group if slot.rollouts and slot.rollout.status.finished
        }
        taken = self.waiting.take(count, self.version if knows_version else None)
        resumed = self.waiting.tally.resumed
        left = {id(group) for group in self.waiting.groups}
        out = [group for group in before if id(group) not in left]
        self.running += taken
        self.dropped += [group for group in out if not any(group is other for other in taken)]
        assert len(out) <= count
        assert sum(id(g) in begun for g in out) <= max(1, math.floor(self.bounds.resumed_share * count))
        if self.bounds.resumed_share == 1.0:
            assert len(out) == min(count, len(before))
            assert not overdue & left or {id(group) for group in out} <= overdue
        assert not self.asked or (self.policy.name == "ladder" and knows_version)
        if knows_version:
            self.check_lags(taken)
        if self.policy.name == "anchor":
            for group in taken:
                self.check_forks(group, ended, masked=self.prefix == "masked")
        for group, decide in self.asked if log_ratio is not None else []:
            decide(log_ratio)
            if log_ratio > 0.5:
                self.check_forks(group, ended, masked=True)
        assert log_ratio == 0.9 or self.waiting.tally.resumed == resumed

    def check_forks(self, group: list[Slot], ended: set[int], masked: bool) -> None:
        """All that goes on begins at one state with one transcript, which nobody trains on twice.

        ``ended`` are the members that had ended before: a bound has such a one start anew.
        """
        rollouts = [slot.rollout for slot in group if slot.rollouts]
        open_ = [rollout for rollout in rollouts if goes_on(rollout)]
        assert not open_ or len(open_) == sum(id(slot) not in ended for slot in group)
        assert all(rollout.open_turn is None for rollout in open_)
        for rollout in open_[1:]:
            assert (rollout.tokens, rollout.snapshot) == (open_[0].tokens, open_[0].snapshot)
            assert (rollout.turns, rollout.snapshots) == (open_[0].turns, open_[0].snapshots)
            assert rollout.anchor == open_[0].anchor is not None
        trained = Counter(
            token
            for rollout in rollouts
            for token, mask in zip(rollout.tokens, rollout.loss_mask, strict=True)
            if mask
        )
        assert set(trained.values()) <= {1}
        assert not masked or not any(any(rollout.loss_mask) for rollout in open_)

    def check_lags(self, taken: list[list[Slot]]) -> None:
        rollouts = [rollout for group in taken for slot in group for rollout in slot.rollouts]
        for rollout in rollouts:
            found = lags(rollout, self.version)
            assert rollout.status is Status.FAILED or exceeded(found, self.bounds) is None
            if self.policy.name == "rewind" and not rollout.status.finished and rollout.tokens:
                assert found.environment <= REWIND_MAX_LAG
            if self.policy.name == "ladder" and goes_on(rollout):
                assert found.environment <= REWIND_MAX_LAG
                assert trained_lag(rollout, self.version) <= SMALL_LAG

    @invariant()
    def each_group_is_in_one_place(self) -> None:
        places = [*self.running, *self.waiting.groups, *self.trained, *self.dropped]
        assert sorted(map(id, places)) == sorted(map(id, self.launched))
        assert self.waiting.tally.dropped == MEMBERS * len(self.dropped)

    @invariant()
    def records_agree(self) -> None:
        for slot in self.begun_slots(self.launched):
            slot.rollout.check()
            assert slot.rollout.own_tokens + slot.rollout.discarded_tokens == slot.made_tokens
            first = slot.rollout.spans[0].version if slot.rollout.spans else None
            assert slot.rollout.dispatch_version == first

    @invariant()
    def every_token_is_somewhere(self) -> None:
        slots = self.begun_slots(self.launched)
        kept = self.begun_slots([*self.running, *self.waiting.groups, *self.trained])
        assert sum(slot.made_tokens for slot in slots) == (
            sum(slot.rollout.own_tokens for slot in kept)
            + sum(slot.lost_by_play for slot in slots)
            + self.waiting.tally.discarded_tokens.total()
        )

    @invariant()
    def every_snapshot_is_recorded_lost_or_given_up(self) -> None:
        gone = [snapshot.id for snapshot in self.abandoned]
        assert len(gone) == len(set(gone)), "given up twice"
        kept = self.begun_slots([*self.running, *self.waiting.groups, *self.trained])
        # Who has ended needs none of its snapshots any more, and keeps their records.
        needed = {key for slot in kept if not slot.rollout.status.finished for key in slot.rollout.snapshots}
        lost = {key for slot in self.begun_slots(self.launched) for key in slot.unrestorable}
        assert not needed & set(gone), "given up while somebody needs it"
        assert needed | lost | set(gone) == set(self.files)

    @staticmethod
    def begun_slots(groups: list[list[Slot]]) -> list[Slot]:
        return [slot for group in groups for slot in group if slot.rollouts]


TestAnyBuffer = AnyBuffer.TestCase
TestAnyBuffer.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
