"""What it costs to add groups to those that wait and to take them out, however many there are.

Twice: with the rollouts' records at hand, which is the buffer alone, and with the samples of a slime job, out of
which the record of each group that is taken is read. Token lists are shared between groups; nothing changes them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from midstream.buffers.policies.load import load_policy
from midstream.buffers.queue import Select, oldest_first
from midstream.buffers.rollout import PartialRollout
from midstream.buffers.waiting import Member, Waiting
from midstream.conf.schema import LayerConfig
from midstream.hooks.slime.members import has_begun, members_of
from midstream.hooks.slime.sample import store
from midstream.local.sample import Sample

BATCH = 64
# So many takes, of which one is of a batch.
TAKES_PER_BATCH = 10
# Within the bounds for all records, so that every group that is taken goes on.
VERSION = 5
AT_HAND, BY_A_FILTER, OF_SAMPLES = "at hand", "by a host's filter", "out of a host's samples"
KINDS = (AT_HAND, BY_A_FILTER, OF_SAMPLES)
ONE, MANY, ADD = "take one that waits", f"take {BATCH}, for each", "add one"
TIMED = tuple(f"{what}, {kind}" for kind in KINDS for what in (ONE, MANY, ADD))

Group = list[Any]
Times = dict[str, list[float]]


@dataclass
class Slot:
    """A member whose record is at hand."""

    rollouts: Sequence[PartialRollout]

    def store(self, rollout: PartialRollout) -> None:
        self.rollouts = [rollout]


def filter_of_a_host(groups: list[Group], count: int) -> list[Group]:
    """A selection that the buffer has to check, since it is not its own."""
    return oldest_first(groups, count)


class Waiters:
    """So many groups of one rollout that wait, for each of the kinds."""

    def __init__(self, records: list[PartialRollout], count: int) -> None:
        samples = [sample_of(record) for record in records]
        self._kinds = {
            AT_HAND: waiting_of(lambda group: group, lambda group: True),
            BY_A_FILTER: waiting_of(lambda group: group, lambda group: True, filter_of_a_host),
            OF_SAMPLES: waiting_of(lambda group: members_of(group, str), has_begun),
        }
        for kind, waiting in self._kinds.items():
            for number in range(count):
                which = number % len(records)
                waiting.add([[samples[which] if kind == OF_SAMPLES else Slot([records[which]])]])

    def play(self, operations: int) -> Times:
        """Takes groups and adds them again, so often for each kind; milliseconds by the names of TIMED."""
        times: Times = {name: [] for name in TIMED}
        for kind, waiting in self._kinds.items():
            for number in range(operations):
                what, count = (MANY, BATCH) if number % TAKES_PER_BATCH == 0 else (ONE, 1)
                started = time.perf_counter()
                groups = waiting.take(count, VERSION)
                taken = time.perf_counter()
                waiting.add(groups)
                added = time.perf_counter()
                assert len(groups) == count, "the bounds dropped some of what was to go on"
                times[f"{what}, {kind}"].append((taken - started) * 1000 / count)
                times[f"{ADD}, {kind}"].append((added - taken) * 1000 / count)
        return times


def waiting_of(
    members: Callable[[Group], Sequence[Member]],
    begun: Callable[[Group], bool],
    select: Select[Group] = oldest_first,
) -> Waiting[Group]:
    layer = LayerConfig(resume_policy="continue")
    return Waiting(load_policy(layer), layer.bounds, members=members, begun=begun, select=select)


def sample_of(record: PartialRollout) -> Sample:
    """The record as a job's host holds it."""
    sample = Sample(
        tokens=record.prompt_tokens + record.tokens,
        response_length=len(record.tokens),
        loss_mask=list(record.loss_mask),
        rollout_log_probs=list(record.log_probs),
    )
    store(sample, record)
    return sample
