"""The groups that wait to go on, and all that becomes of them: who is let in, who goes next, and as what."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, Self, TypeVar

from midstream.buffers.deciding import chosen
from midstream.buffers.holds import held_by
from midstream.buffers.policies.base import Action, Choice, CutOff, Policy, goes_on
from midstream.buffers.policies.bounds import REASONS
from midstream.buffers.queue import Queue, Select, oldest_first
from midstream.buffers.rollout import PartialRollout
from midstream.buffers.tally import CUT_OFF, Tally
from midstream.conf.schema import BoundsConfig
from midstream.envs.protocol import Snapshot

Group = TypeVar("Group")

Decide = Callable[[float], None]
"""Takes a group's mean squared log-ratio, and makes of its rollouts what the policy says to that."""


class Member(Protocol):
    """One rollout of a host's group, as the host's samples hold it."""

    @property
    def rollouts(self) -> Sequence[PartialRollout]:
        """Its record; several where it was split into training samples, none before it began."""
        ...

    def store(self, rollout: PartialRollout) -> None:
        """Make the host's side of this member that one rollout, which has lost tokens or their place in the loss."""
        ...

    def fork(self, rollout: PartialRollout, source: Self) -> None:
        """Make the host's side of this member that one rollout, whose tokens are the first ones of ``source``."""
        ...


class Waiting(Generic[Group]):
    """One object for the whole contract on unfinished rollouts.

    ``add`` admits what came back, as ``policy.cut_off`` says. ``take`` hands out groups in their order (see
    ``Queue``), each rollout as the policy chooses for its group under the version of the day and the bounds
    allow. A group is handed out whole or dropped whole, and a member that was split into several samples has
    one choice (see ``deciding``).

    ``members`` opens a group; ``begun`` says cheaply whether it has tokens of the model; ``abandon`` is told
    of snapshots that a record no longer refers to, ``dropped`` of groups that do not go on, with the reason,
    ``share`` of ids that one more record refers to. ``expect`` is told of each group that leaves, with what
    decides again once its log-ratio is measured, or None where the policy does not ask for that.
    """

    def __init__(
        self,
        policy: Policy,
        bounds: BoundsConfig,
        *,
        members: Callable[[Group], Sequence[Member]],
        begun: Callable[[Group], bool],
        select: Select[Group] = oldest_first,
        tally: Tally | None = None,
        abandon: Callable[[list[Snapshot]], None] = lambda snapshots: None,
        dropped: Callable[[Group, str], None] = lambda group, reason: None,
        share: Callable[[Iterable[str]], None] = lambda snapshots: None,
        expect: Callable[[Group, Decide | None], None] = lambda group, decide: None,
    ) -> None:
        self._policy = policy
        self._members = members
        self._abandon = abandon
        self._dropped = dropped
        self._share = share
        self._expect = expect
        self._queue: Queue[Group] = Queue(
            begun=begun,
            select=select,
            passed_over=bounds.passed_over,
            resumed_share=bounds.resumed_share,
        )
        self.bounds = bounds
        self.tally = Tally() if tally is None else tally

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def groups(self) -> list[Group]:
        """The groups that wait, oldest first; not to be changed."""
        return self._queue.groups

    @groups.setter
    def groups(self, groups: Iterable[Group]) -> None:
        self._queue.groups = list(groups)
        self.tally.groups = len(self)

    @property
    def bounds(self) -> BoundsConfig:
        """The bounds that hold from the next group on that comes or goes."""
        return self._bounds

    @bounds.setter
    def bounds(self, bounds: BoundsConfig) -> None:
        self._bounds = bounds
        self._queue.passed_over, self._queue.resumed_share = bounds.passed_over, bounds.resumed_share

    def times_passed_over(self, group: Group) -> int:
        """How many takes have left this group behind."""
        return self._queue.times_passed_over(group)

    def add(self, groups: Iterable[Group]) -> list[Group]:
        """Take back groups that nobody trained on, each as the policy's cut-off says; returns those that wait now."""
        kept = []
        for group in groups:
            members = self._members(group)
            if self._policy.cut_off is CutOff.DROPPED:
                self._drop(members, Choice(Action.DROP, reason=CUT_OFF))
                self._dropped(group, CUT_OFF)
                continue
            if self._policy.cut_off is CutOff.EMPTIED:
                for member in members:
                    if member.rollouts and not any(rollout.status.finished for rollout in member.rollouts):
                        self._change(member, Choice(Action.RESTART, reason=CUT_OFF), members)
            self.tally.buffered += len(members)
            self._queue.add(group)
            kept.append(group)
        self.tally.groups = len(self)
        return kept

    def put_back(self, groups: Iterable[Group]) -> None:
        """Let groups wait again that were taken and could not be handed out, before all others."""
        self.groups = [*groups, *self.groups]

    def take(self, count: int, version: int | None) -> list[Group]:
        """Remove and return at most ``count`` groups; fewer where some are dropped on the way.

        ``version`` is the policy's now; where it is None, nobody has been seen to be older than the engine.

        Raises:
            ValueError: the host's selection does not keep each group in exactly one place, or the policy's
                choices do not fit the group.
        """
        if count <= 0:
            return []
        groups = self._queue.take(count)
        self.tally.passed_over += len(self)
        self.tally.groups = len(self)
        return [group for group in groups if self._is_handed_out(group, version)]

    def _is_handed_out(self, group: Group, version: int | None) -> bool:
        members = self._members(group)
        choices = self._choices(members, version, self._policy.choose_group)
        drop = next((choice for choice in choices if choice.action is Action.DROP), None)
        if drop is not None:
            self._expect(group, None)
            self._drop(members, drop)
            self._dropped(group, drop.reason)
            return False
        self.tally.taken += len(members)
        for member, choice in zip(members, choices, strict=True):
            self._measure(member, choice)
        self._apply(members, choices)
        asks = any(choice.measured for choice in choices)
        self._expect(group, functools.partial(self._decide, group, version) if asks else None)
        return True

    def _decide(self, group: Group, version: int | None, log_ratio: float) -> None:
        members = self._members(group)
        choices = self._choices(
            members,
            version,
            lambda rollouts, now: self._policy.choose_measured(rollouts, now, log_ratio),
        )
        if any(choice.action is Action.DROP for choice in choices):
            raise ValueError(
                f"midstream.resume_policy: {self._policy.name}, or with it midstream.bounds.beyond="
                f"{self._bounds.beyond}, drops a group that is on its way; choose_measured may resume, rewind, fork "
                "or restart, within the bounds"
            )
        self.tally.ratio_checked += 1
        self.tally.ratio_anchored += any(choice.changes for choice in choices)
        # Counted when they were taken; now what they really do counts.
        self.tally.resumed -= sum(_goes_on(member) for member in members)
        self._apply(members, choices)

    def _choices(
        self,
        members: Sequence[Member],
        version: int | None,
        ask: Callable[[Sequence[PartialRollout], int], list[Choice]],
    ) -> list[Choice]:
        return chosen([member.rollouts for member in members], version, ask, self._policy.name, self._bounds)

    def _apply(self, members: Sequence[Member], choices: Sequence[Choice]) -> None:
        pairs = list(zip(members, choices, strict=True))
        # Forks first: they begin with what their source is now.
        for member, choice in sorted(pairs, key=lambda pair: pair[1].action is not Action.FORK):
            self.tally.resumed += choice.action is Action.RESUME and _goes_on(member)
            if choice.changes:
                self._change(member, choice, members)

    def _change(self, member: Member, choice: Choice, members: Sequence[Member]) -> None:
        kept, *others = member.rollouts or [PartialRollout("", "")]
        made = sum(rollout.own_tokens for rollout in member.rollouts)
        has_given_up = kept.status.finished
        before = set(kept.snapshots)
        if choice.action is Action.FORK:
            source = members[choice.source]
            left = choice.apply(kept, source.rollouts[0])
            self._share(kept.snapshots.keys() - before)
            member.fork(kept, source)
        else:
            left = choice.apply(kept)
            if has_given_up:
                left = []
            left += held_by(others)
            member.store(kept)
        self.tally.discarded_tokens[choice.reason] += made - kept.own_tokens
        self.tally.count(choice.action)
        self._abandon(left)

    def _drop(self, members: Sequence[Member], choice: Choice) -> None:
        rollouts = [rollout for member in members for rollout in member.rollouts]
        self.tally.dropped += len(members)
        self.tally.dropped_resumes += sum(rollout.resumes for rollout in rollouts)
        self.tally.discarded_tokens[choice.reason] += sum(rollout.own_tokens for rollout in rollouts)
        for member in members:
            self._measure(member, choice)
        self._abandon(held_by(rollouts))

    def _measure(self, member: Member, choice: Choice) -> None:
        """Count the length of what a bound takes away, and of what goes on; what a policy takes is neither."""
        made = sum(rollout.generated_tokens for rollout in member.rollouts)
        if made and choice.reason in REASONS.values():
            self.tally.beyond.add(made)
        elif made and choice.action in (Action.RESUME, Action.REWIND):
            self.tally.within.add(made)


def _goes_on(member: Member) -> bool:
    return any(goes_on(rollout) for rollout in member.rollouts)
