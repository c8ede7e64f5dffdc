"""Samples that the host's own generate function made: tokens without a record of ours.

They wait, start anew and outlast a restart like all others. Nothing says which policy made which of their
tokens, and there is no environment to go back to.
"""

import itertools
from typing import Any

from midstream.buffers.rollout import PartialRollout, Span, Status
from midstream.hooks.slime.sample import RECORD_KEY, recorded_rollout


def rollout_of(sample: Any) -> PartialRollout | None:
    """The rollout that ``sample`` carries, whoever made it; None where it has not begun.

    For a look: its long columns may be the sample's own. That of a host's own generate has no turns, and all
    of its tokens count as of the policy that the host noted first.

    Raises:
        RecordError: the sample disagrees with its record.
    """
    if is_foreign(sample):
        return _as_rollout(sample)
    return recorded_rollout(sample, shared=True)


def is_foreign(sample: Any) -> bool:
    """Whether it has tokens of a response, and no record of ours."""
    return bool(sample.response_length) and RECORD_KEY not in (sample.metadata or {})


def _as_rollout(sample: Any) -> PartialRollout:
    length = sample.response_length
    split = len(sample.tokens) - length
    mask = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
    version = _first_version(sample)
    return PartialRollout(
        prompt_key=str(sample.index),
        group_key=str(sample.group_index),
        prompt_tokens=list(sample.tokens[:split]),
        tokens=list(sample.tokens[split:]),
        log_probs=sample.rollout_log_probs or [0.0] * length,
        loss_mask=mask,
        spans=[Span(version, start, end) for start, end in _runs(mask)],
        dispatch_version=version,
        status=Status(sample.status.value),
        reward=sample.reward,
    )


def _first_version(sample: Any) -> int:
    first = str(next(iter(sample.weight_versions or ()), ""))
    return int(first) if first.isdecimal() else 0


def _runs(mask: list[int]) -> list[tuple[int, int]]:
    """Where the mask is 1, as half-open ranges."""
    runs, start = [], 0
    for value, group in itertools.groupby(mask):
        end = start + len(list(group))
        if value:
            runs.append((start, end))
        start = end
    return runs
