"""Fork a group anew from the state of the member that has come furthest."""

from collections.abc import Sequence
from typing import Literal

from midstream.buffers.policies.base import RESTART, RESUME, Action, Choice, CutOff, Policy
from midstream.buffers.rollout import Anchor, PartialRollout
from midstream.conf.schema.policies import BUILT_IN


class Anchoring(Policy):
    """All unfinished members go on from the newest snapshot of the one that has the most tokens before it.

    That one is the anchor. The others become forks of it: what they made themselves goes, its transcript and
    its state take the place, each in a sandbox of its own. Members that have ended stay what they are, so that
    the group keeps its size. ``prefix`` says whether the anchor's tokens before that state are ``trained``,
    once for the group, or ``masked``.
    """

    name = "anchor"
    cut_off = CutOff(BUILT_IN["anchor"])

    def __init__(self, prefix: Literal["trained", "masked"]) -> None:
        self.prefix = prefix

    def choose(self, rollout: PartialRollout, version: int) -> Choice:
        """Go on from the newest snapshot: a group of one has nobody to share it with."""
        return self.choose_group([rollout], version)[0]

    def choose_group(self, rollouts: Sequence[PartialRollout], version: int) -> list[Choice]:
        """Fork the group where a member has a state with tokens of the model before it."""
        turns = [newest_boundary(rollout) for rollout in rollouts]
        return anchored(rollouts, turns, masked=self.prefix == "masked")


def newest_boundary(rollout: PartialRollout) -> int | None:
    """The turn that begins, or would begin, in the newest known state; None where no state is known.

    A turn that is open goes, since what all members share ends before it.
    """
    if rollout.snapshot is not None and rollout.open_turn is None:
        return len(rollout.turns)
    known = (i for i in reversed(range(len(rollout.turns))) if rollout.turns[i].snapshot_before is not None)
    return next(known, None)


def anchored(
    rollouts: Sequence[PartialRollout], turns: Sequence[int | None], *, masked: bool
) -> list[Choice]:
    """Choices that fork a group from one member; ``turns`` says from which turn each could go on.

    The anchor is the unfinished member that keeps the most tokens of the model, the first where several do.
    Where none keeps any, each goes back to its own start.
    """
    open_ = [i for i, rollout in enumerate(rollouts) if not rollout.status.finished]
    kept = {i: _kept_tokens(rollouts[i], turns[i]) for i in open_}
    source = max(open_, key=kept.__getitem__, default=None)
    if source is None or not kept[source]:
        return [_alone(rollouts[i], turns[i], masked) if i in kept else RESUME for i in range(len(rollouts))]
    choices = []
    for index, rollout in enumerate(rollouts):
        if index not in kept:
            choices.append(RESUME)
        elif index == source:
            choices.append(_alone(rollout, turns[index], masked, anchors=len(open_) > 1))
        elif _is_there(rollout, rollouts[source], turns[source]):
            choices.append(Choice(Action.RESUME, masked=masked))
        else:
            choices.append(Choice(Action.FORK, turns[source] or 0, source=source, masked=masked))
    return choices


def _alone(rollout: PartialRollout, turn: int | None, masked: bool, *, anchors: bool = False) -> Choice:
    """Go on from ``turn``, or from the prompt where no state is known."""
    if not rollout.turns:
        return RESUME
    if turn is None:
        return RESTART
    if turn == len(rollout.turns):
        return Choice(Action.RESUME, masked=masked, anchors=anchors)
    return Choice(Action.REWIND, turn, masked=masked, anchors=anchors)


def _kept_tokens(rollout: PartialRollout, turn: int | None) -> int:
    """Tokens of the model before ``turn``."""
    if turn is None:
        return 0
    end = _start(rollout, turn)
    return sum(span.length for span in rollout.spans if span.start < end)


def _start(rollout: PartialRollout, turn: int) -> int:
    return rollout.turns[turn].start if turn < len(rollout.turns) else len(rollout.tokens)


def _is_there(rollout: PartialRollout, source: PartialRollout, turn: int | None) -> bool:
    """Whether ``rollout`` is at the start of ``turn`` of ``source`` already, by an earlier fork."""
    if turn is None or source.anchor is None or rollout.anchor != source.anchor:
        return False
    end = _start(source, turn)
    state = source.turns[turn].snapshot_before if turn < len(source.turns) else source.snapshot
    return (
        source.anchor == Anchor(state or "", end) and len(rollout.tokens) == end and rollout.snapshot == state
    )
