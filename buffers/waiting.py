"""The groups that wait to go on, and all that becomes of them: who is let in, who goes next, and as what."""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from midstream.buffers.policies.base import RESUME, Action, Choice, CutOff, Policy
from midstream.buffers.policies.bounds import REASONS, bounded
from midstream.buffers.queue import Queue, Select, oldest_first
from midstream.buffers.rollout import PartialRollout
from midstream.buffers.tally import CUT_OFF, Tally
from midstream.conf.schema import BoundsConfig
from midstream.envs.protocol import Snapshot

Group = TypeVar("Group")

_SEVERITY = (Action.RESUME, Action.REWIND, Action.RESTART, Action.DROP)


class Member(Protocol):
    """One rollout of a host's group, as the host's samples hold it."""

    @property
    def rollouts(self) -> Sequence[PartialRollout]:
        """Its record; several where it was split into training samples, none before it began."""
        ...

    def store(self, rollout: PartialRollout) -> None:
        """Make the host's side of this member that one rollout, which was changed."""
        ...


class Waiting(Generic[Group]):
    """One object for the whole contract on unfinished rollouts.

    ``add`` admits what came back, as ``policy.cut_off`` says. ``take`` hands out groups in their order (see
    ``Queue``), each rollout as the policy chooses under the version of the day and the bounds allow. A group
    is handed out whole or dropped whole, and a member that was split into several samples has one choice: the
    most severe of theirs, where a rewind is a restart, since a split cannot be taken back by turns.

    ``members`` opens a group; ``begun`` says cheaply whether it has tokens of the model; ``abandon`` is told
    of snapshots that nobody will resume from, ``dropped`` of groups that do not go on, with the reason.
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
    ) -> None:
        self._policy = policy
        self._bounds = bounds
        self._members = members
        self._abandon = abandon
        self._dropped = dropped
        self._queue: Queue[Group] = Queue(
            begun=begun,
            select=select,
            passed_over=bounds.passed_over,
            resumed_share=bounds.resumed_share,
        )
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
                        self._apply(member, Choice(Action.RESTART, reason=CUT_OFF))
            self.tally.buffered += len(members)
            self._queue.add(group)
            kept.append(group)
        self.tally.groups = len(self)
        return kept

    def take(self, count: int, version: int | None) -> list[Group]:
        """Remove and return at most ``count`` groups; fewer where some are dropped on the way.

        ``version`` is the policy's now; where it is None, nobody has been seen to be older than the engine.

        Raises:
            ValueError: the host's selection does not keep each group in exactly one place.
        """
        if count <= 0:
            return []
        groups = self._queue.take(count)
        self.tally.passed_over += len(self)
        self.tally.groups = len(self)
        return [group for group in groups if self._is_handed_out(group, version)]

    def _is_handed_out(self, group: Group, version: int | None) -> bool:
        members = self._members(group)
        choices = [self._choice(member, version) for member in members]
        drop = next((choice for choice in choices if choice.action is Action.DROP), None)
        if drop is not None:
            self._drop(members, drop)
            self._dropped(group, drop.reason)
            return False
        self.tally.taken += len(members)
        for member, choice in zip(members, choices, strict=True):
            self._measure(member, choice)
            if choice.action is not Action.RESUME:
                self._apply(member, choice)
            elif any(not rollout.status.finished and rollout.generated_tokens for rollout in member.rollouts):
                self.tally.resumed += 1
        return True

    def _choice(self, member: Member, version: int | None) -> Choice:
        choices = [self._choice_of_one(rollout, version) for rollout in member.rollouts]
        worst = max(choices, key=lambda choice: _SEVERITY.index(choice.action), default=RESUME)
        if len(choices) > 1 and worst.action is Action.REWIND:
            return Choice(Action.RESTART, reason=worst.reason)
        return worst

    def _choice_of_one(self, rollout: PartialRollout, version: int | None) -> Choice:
        now = (rollout.dispatch_version or 0) if version is None else version
        goes_on = not rollout.status.finished and rollout.generated_tokens > 0
        choice = self._policy.choose(rollout, now) if goes_on else RESUME
        return bounded(choice, rollout, now, self._bounds)

    def _apply(self, member: Member, choice: Choice) -> None:
        kept, *others = member.rollouts
        made = sum(rollout.generated_tokens for rollout in member.rollouts)
        left = choice.apply(kept) + _snapshots(others)
        member.store(kept)
        self.tally.discarded_tokens[choice.reason] += made - kept.generated_tokens
        if choice.action is Action.REWIND:
            self.tally.rewound += 1
        else:
            self.tally.restarted += 1
        self._abandon(left)

    def _drop(self, members: Sequence[Member], choice: Choice) -> None:
        rollouts = [rollout for member in members for rollout in member.rollouts]
        self.tally.dropped += len(members)
        self.tally.dropped_resumes += sum(rollout.resumes for rollout in rollouts)
        self.tally.discarded_tokens[choice.reason] += sum(rollout.generated_tokens for rollout in rollouts)
        for member in members:
            self._measure(member, choice)
        self._abandon(_snapshots(rollouts))

    def _measure(self, member: Member, choice: Choice) -> None:
        """Count the length of what a bound takes away, and of what goes on; what a policy takes is neither."""
        made = sum(rollout.generated_tokens for rollout in member.rollouts)
        if made and choice.reason in REASONS.values():
            self.tally.beyond.add(made)
        elif made and choice.action in (Action.RESUME, Action.REWIND):
            self.tally.within.add(made)


def _snapshots(rollouts: Iterable[PartialRollout]) -> list[Snapshot]:
    return [snapshot for rollout in rollouts for snapshot in rollout.snapshots.values()]
