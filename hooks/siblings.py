"""The members of a group, each played on its own, and what one learns from the others: that its group is given up."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from midstream.buffers.curriculum.early_stop import Decide, tokens_saved
from midstream.buffers.rollout import PartialRollout
from midstream.hooks.turns import Play

# Groups that nobody plays are remembered while members of theirs wait, for a slot or in the buffer. Some never come
# back, and nobody says so; to forget one only means that it is played to its end.
_REMEMBERED = 4096

_logger = logging.getLogger(__name__)


@dataclass
class _Group:
    """What is known of a group whose members have not all ended; members go by what the host numbers them with.

    ``rewards`` are of members that ended with one, ``unknown`` the members whose rewards the host computes later,
    ``failed`` those whose infrastructure did. ``tokens`` of those that ended or were stopped are the model's.
    """

    size: int
    playing: dict[int, Play] = field(default_factory=dict)
    rewards: dict[int, float] = field(default_factory=dict)
    unknown: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    tokens: dict[int, int] = field(default_factory=dict)
    is_given_up: bool = False

    @property
    def ended(self) -> int:
        return len(self.rewards) + len(self.unknown) + len(self.failed) + len(self.stopped)

    def forget(self, member: int) -> None:
        """A member that had ended begins anew: what it ended with is nothing any more."""
        if member in self.rewards:
            self.is_given_up = False
        for of_members in (self.rewards, self.tokens):
            of_members.pop(member, None)
        for members in (self.unknown, self.failed, self.stopped):
            members.discard(member)

    def note(self, member: int, rollout: PartialRollout) -> None:
        """A member has left its play; one that was cut off has not ended."""
        if not rollout.status.finished:
            return
        self.tokens[member] = rollout.own_tokens
        if rollout.failure == "stopped":
            self.stopped.add(member)
        elif rollout.failure is not None:
            self.failed.add(member)
        elif rollout.reward is None:
            self.unknown.add(member)
        else:
            self.rewards[member] = rollout.reward

    def saved(self) -> float:
        """The estimate of ``tokens_saved``, once all have ended."""
        ended = [self.tokens[member] for member in self.rewards]
        return tokens_saved(ended, [self.tokens[member] for member in self.stopped])


class Siblings:
    """The groups that are played in one event loop, as far as ``decide`` needs them.

    Whenever a member ends it is asked whether the rest of the group is given up. Who plays then is stopped at once,
    who comes later ends without playing, and whoever had its result keeps it: none of them is waited for. Rewards are
    known while members of their group rest in the buffer, but not after a restart of the process. ``decide`` None
    means that nothing is noted. It may be replaced at any time.

    ``groups_stopped`` counts groups that have ended with members that were stopped, ``members_stopped`` those members.
    Without that they would have cost ``tokens_saved`` more, which is an estimate.
    """

    def __init__(self, decide: Decide | None) -> None:
        self.decide = decide
        self.groups_stopped = 0
        self.members_stopped = 0
        self.tokens_saved = 0.0
        self._groups: dict[str, _Group] = {}

    @contextmanager
    def playing(self, play: Play, member: int, size: int) -> Iterator[None]:
        """While ``play`` runs: have it stopped when its group is given up, and note how it ended.

        ``member`` is the host's number of the rollout, ``size`` how many its group has.
        """
        if self.decide is None:
            yield
            return
        key = play.rollout.group_key
        group = self._group(key, size)
        group.forget(member)
        group.playing[member] = play
        if group.is_given_up:
            play.stop()
        try:
            yield
        finally:
            del group.playing[member]
            group.note(member, play.rollout)
            self._settle(key, group, play)

    def _group(self, key: str, size: int) -> _Group:
        # The last that was touched is the last to be forgotten.
        group = self._groups.pop(key, None) or _Group(size)
        self._groups[key] = group
        if len(self._groups) > _REMEMBERED:
            idle = next((k for k, known in self._groups.items() if not known.playing and k != key), None)
            if idle is not None:
                del self._groups[idle]
        return group

    def _settle(self, key: str, group: _Group, ended: Play) -> None:
        if group.ended == group.size:
            self._groups.pop(key, None)
            self.groups_stopped += bool(group.stopped)
            self.members_stopped += len(group.stopped)
            self.tokens_saved += group.saved()
            return
        if group.is_given_up or group.unknown or not group.rewards or self.decide is None:
            return
        counted = group.size - len(group.failed) - len(group.stopped)
        rewards = list(group.rewards.values())
        if self.decide(ended.rollout.prompt_key, rewards, counted, ended.engine.version):
            group.is_given_up = True
            _logger.info("group %s is given up: the rewards of %d members are %s", key, len(rewards), rewards)
            for play in group.playing.values():
                play.stop()
