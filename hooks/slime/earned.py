"""What the rollouts of a host's batch earned, as the estimators take it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from midstream.buffers.rollout import Anchor
from midstream.hooks.credit.segments import Earned, Segment, passed_by, segments_of
from midstream.hooks.slime.foreign import rollout_of
from midstream.hooks.slime.sample import RECORD_KEY


@dataclass(frozen=True)
class Batch:
    """The rollouts of a batch; where a rollout was split into several samples, these follow one another.

    ``rollouts`` are in the order of their first samples. ``samples`` are the positions of the samples in the order of
    ``segments``, which has those of each. ``whose`` is the rollout of each sample, by position in the batch.
    """

    rollouts: list[Earned]
    samples: list[int]
    segments: list[list[Segment]]
    whose: list[int]


def training_version(samples: Sequence[Any], served: int | None) -> int:
    """The policy version that trains on a batch: the one that the engine serves, as far as that is known.

    Tokens of a later version count as its own, and are no reason to call the others older. Where the engine has not
    answered yet in this process, it is the newest that made a token.
    """
    if served is not None:
        return served
    records = [(sample.metadata or {}).get(RECORD_KEY) or {} for sample in samples]
    return max((span[0] for record in records for span in record.get("spans", ())), default=0)


def earned_by(samples: Sequence[Any], rewards: Sequence[float], version: int) -> Batch:
    """Group samples by rollout. ``rewards`` has one entry for each.

    Samples that a host marks as parts of one rollout (``rollout_id``) count once where their rewards are equal, and
    each on its own where they differ. Of a sample that the host's own generate made, all tokens count as of the
    version that the host noted first.
    """
    parts: dict[Any, list[int]] = {}
    for position, sample in enumerate(samples):
        parts.setdefault(_rollout_key(sample, position, rewards[position]), []).append(position)
    rollouts: list[Earned] = []
    order: list[int] = []
    segments: list[list[Segment]] = []
    whose = [0] * len(samples)
    for positions in parts.values():
        first = samples[positions[0]]
        anchor, passed = None, frozenset[Anchor]()
        of_rollout: list[Segment] = []
        for position in positions:
            record = rollout_of(samples[position])
            found = [] if record is None else segments_of(record, version)
            if record is not None and record.anchor is not None:
                anchor, passed = record.anchor, passed_by(record)
            whose[position] = len(rollouts)
            order.append(position)
            segments.append(found)
            of_rollout += found
        counted = not all(samples[position].remove_sample for position in positions)
        rollouts.append(Earned(first.group_index, rewards[positions[0]], counted, anchor, of_rollout, passed))
    return Batch(rollouts, order, segments, whose)


def _rollout_key(sample: Any, position: int, reward: float) -> Any:
    rollout_id = getattr(sample, "rollout_id", None)
    return position if rollout_id is None else (sample.group_index, rollout_id, reward)
