"""A host's group, member by member, as the buffer sees it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from midstream.buffers.rollout import PartialRollout, Status
from midstream.hooks.slime.foreign import is_foreign, rollout_of
from midstream.hooks.slime.sample import RECORD_KEY, Group, rewrite, samples_of, store

Decode = Callable[[list[int]], str]


class SampleMember:
    """The sample, or the samples, of one rollout in a group. ``decode`` makes text of response tokens."""

    def __init__(self, group: Group, position: int, decode: Decode) -> None:
        self._group = group
        self._position = position
        self._decode = decode
        self._samples: list[Any] = list(samples_of([group[position]]))

    @cached_property
    def rollouts(self) -> Sequence[PartialRollout]:
        """The records, read when they are asked for: that takes a while where rollouts are long."""
        found = [rollout_of(sample) for sample in self._samples]
        return [rollout for rollout in found if rollout is not None]

    def store(self, rollout: PartialRollout) -> None:
        """Write a rollout that has lost tokens into the first sample, which then is the member alone."""
        self._write(rollout, self._samples[0])

    def fork(self, rollout: PartialRollout, source: "SampleMember") -> None:
        """Write a rollout that begins like ``source`` into the first sample, which then is the member alone.

        What is the sample's own, its index and its session, stays.
        """
        self._write(rollout, source._samples[0])

    def _write(self, rollout: PartialRollout, source: Any) -> None:
        sample = self._samples[0]
        was_foreign = is_foreign(sample)
        rewrite(sample, rollout, self._decode(rollout.tokens) if rollout.tokens else "", source)
        if was_foreign:
            # Its generate function would not keep a record of ours up to date.
            sample.status, sample.reward = type(sample).Status(rollout.status.value), rollout.reward
        else:
            store(sample, rollout)
        sample.remove_sample = rollout.status is Status.FAILED
        self._group[self._position] = sample
        self.rollouts = [rollout]


def members_of(group: Group, decode: Decode) -> list[SampleMember]:
    """The members of a group, in order."""
    return [SampleMember(group, position, decode) for position in range(len(group))]


def shared_snapshots(groups: Iterable[Group]) -> Iterator[str]:
    """The snapshots of these groups to which several records refer, once for each after the first."""
    seen: set[str] = set()
    for snapshot in recorded_snapshots(groups):
        if snapshot in seen:
            yield snapshot
        seen.add(snapshot)


def recorded_snapshots(groups: Iterable[Group]) -> Iterator[str]:
    """The snapshots of these groups, once for each record that refers to one; opens no record."""
    for sample in (sample for group in groups for sample in samples_of(group)):
        yield from (sample.metadata or {}).get(RECORD_KEY, {}).get("snapshots", ())


def has_begun(group: Group) -> bool:
    """Whether the group has response tokens; reads no record."""
    return any(sample.response_length for sample in samples_of(group))
