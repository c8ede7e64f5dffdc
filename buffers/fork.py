"""A rollout as a continuation of what a sibling of its group has done so far."""

import copy
import dataclasses

from midstream.buffers.rollout import Anchor, PartialRollout, RecordError, Status
from midstream.envs.protocol import Snapshot


def fork(rollout: PartialRollout, source: PartialRollout, turn: int) -> list[Snapshot]:
    """Make ``rollout`` go on from the start of ``turn`` of ``source``, whose number of turns means its end.

    Transcript, spans, turns and snapshots up to there become those of ``source``, which is not changed, and
    are out of the loss: what they teach counts in ``source``. Where the group was forked before, ``rollout``
    keeps what it made itself before that anchor, and its place in the loss: nobody else counts it.

    Returns:
        The snapshots that leave the record of ``rollout``.

    Raises:
        RecordError: ``source`` has no such turn, or no snapshot of the state before it.
    """
    prefix = copy.copy(source)
    if turn != len(source.turns):
        prefix.rewind_to(turn)
    if prefix.snapshot is None:
        raise RecordError(
            f"cannot fork at turn {turn}: no snapshot of the state before it is known; "
            "fork where the sibling has one"
        )
    shared = min(_shared_tokens(rollout, source), len(prefix.tokens))
    made = rollout.own_tokens
    left = [record for key, record in rollout.snapshots.items() if key not in prefix.snapshots]
    rollout.loss_mask = rollout.loss_mask[:shared] + [0] * (len(prefix.tokens) - shared)
    own = [span for span in rollout.spans if span.start < shared]
    others = [dataclasses.replace(span, inherited=True) for span in prefix.spans if span.start >= shared]
    rollout.spans = own + others
    rollout.prompt_key, rollout.group_key = prefix.prompt_key, prefix.group_key
    rollout.prompt_tokens = list(prefix.prompt_tokens)
    rollout.tokens, rollout.log_probs = list(prefix.tokens), list(prefix.log_probs)
    rollout.turns, rollout.snapshots = list(prefix.turns), dict(prefix.snapshots)
    rollout.snapshot, rollout.dispatch_version = prefix.snapshot, prefix.dispatch_version
    rollout.status, rollout.reward, rollout.fault, rollout.failure = Status.ABORTED, None, None, None
    rollout.discarded_tokens += made - rollout.own_tokens
    rollout.anchor = Anchor(prefix.snapshot, len(prefix.tokens))
    return left


def _shared_tokens(rollout: PartialRollout, source: PartialRollout) -> int:
    """How many response tokens the two have had in common since their group was forked before."""
    if rollout.anchor is None or rollout.anchor != source.anchor:
        return 0
    return rollout.anchor.tokens
