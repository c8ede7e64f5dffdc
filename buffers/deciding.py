"""From a policy's choices for a group to one choice for each of its members, within the bounds."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from midstream.buffers.policies.base import RESUME, Action, Choice
from midstream.buffers.policies.bounds import bounded
from midstream.buffers.rollout import PartialRollout
from midstream.conf.schema import BoundsConfig

Ask = Callable[[Sequence[PartialRollout], int], list[Choice]]
"""What a policy says to the rollouts of a group under a version."""

_SEVERITY = (Action.RESUME, Action.REWIND, Action.FORK, Action.RESTART, Action.DROP)
_TO_THE_START = (Action.REWIND, Action.FORK)


def chosen(
    members: Sequence[Sequence[PartialRollout]],
    version: int | None,
    ask: Ask,
    policy: str,
    bounds: BoundsConfig,
) -> list[Choice]:
    """One choice for each member of a group, given the records of each; ``policy`` is the name of who is asked.

    Members of one record, or of none yet, are asked about together. One that was split into several samples is
    asked about alone and has the most severe choice of theirs, where a rewind is a restart, since a split
    cannot be taken back by turns. A member that has ended is left alone, or goes with its group.

    Raises:
        ValueError: there is not one choice for each rollout, or one forks from what is no state.
    """
    known = [rollout for records in members for rollout in records]
    # Nobody has been seen to be older than the engine: nothing has a lag.
    now = min((r.dispatch_version or 0 for r in known), default=0) if version is None else version
    whole = [index for index, records in enumerate(members) if len(records) <= 1]
    group = [members[index][0] if members[index] else PartialRollout("", "") for index in whole]
    choices = dict(zip(whole, _asked(group, now, ask, policy, bounds), strict=True))
    choices = {
        i: replace(c, source=whole[c.source]) if c.action is Action.FORK else c for i, c in choices.items()
    }
    for index, records in enumerate(members):
        if index not in choices:
            parts = [part for rollout in records for part in _asked([rollout], now, ask, policy, bounds)]
            choices[index] = _of_a_split(parts)
    return [choices[index] for index in range(len(members))]


def _asked(
    group: Sequence[PartialRollout], now: int, ask: Ask, policy: str, bounds: BoundsConfig
) -> list[Choice]:
    """The policy's choices within the bounds.

    Where a bound takes what others were to be forked from, the policy is asked again as if that had not begun.
    """
    too_old: set[int] = set()
    while True:
        seen = [PartialRollout("", "") if i in too_old else rollout for i, rollout in enumerate(group)]
        wanted = _checked(ask(seen, now) if seen else [], seen, policy)
        found = [
            bounded(choice, rollout, now, bounds, _source(choice, group))
            for choice, rollout in zip(wanted, group, strict=True)
        ]
        lost = {
            choice.source
            for choice, kept in zip(wanted, found, strict=True)
            if choice.action is Action.FORK and kept.action is not Action.FORK
        }
        if not lost:
            return found
        too_old |= lost


def _checked(choices: list[Choice], group: Sequence[PartialRollout], policy: str) -> list[Choice]:
    if len(choices) != len(group):
        raise ValueError(
            f"midstream.resume_policy: {policy} made {len(choices)} choices for {len(group)} rollouts; "
            "choose_group must return one for each, in their order"
        )
    choices = [_allowed(choice, rollout) for choice, rollout in zip(choices, group, strict=True)]
    for index, choice in enumerate(choices):
        if choice.action is Action.FORK:
            _check_source(choice, index, choices, group, policy)
    return choices


def _allowed(choice: Choice, rollout: PartialRollout) -> Choice:
    stays = rollout.status.finished or (not rollout.turns and choice.action is not Action.FORK)
    return RESUME if stays and choice.action is not Action.DROP else choice


def _check_source(
    choice: Choice, index: int, choices: Sequence[Choice], group: Sequence[PartialRollout], policy: str
) -> None:
    wrong = f"midstream.resume_policy: {policy} forks rollout {index} from rollout {choice.source}"
    if not 0 <= choice.source < len(group) or choice.source == index:
        raise ValueError(f"{wrong} of {len(group)}; name the position of a sibling")
    if choices[choice.source].action is Action.FORK:
        raise ValueError(f"{wrong}, which becomes a fork itself; fork both from the same one")
    source = group[choice.source]
    states = [*(turn.snapshot_before for turn in source.turns), source.snapshot]
    if not 0 <= choice.turn < len(states) or states[choice.turn] is None:
        raise ValueError(f"{wrong} at turn {choice.turn}, where it has no snapshot; fork where it has one")


def _source(choice: Choice, group: Sequence[PartialRollout]) -> PartialRollout | None:
    return group[choice.source] if choice.action is Action.FORK else None


def _of_a_split(parts: Sequence[Choice]) -> Choice:
    worst = max(parts, key=lambda choice: _SEVERITY.index(choice.action), default=RESUME)
    if worst.action is Action.RESUME:
        return RESUME
    return Choice(Action.RESTART, reason=worst.reason) if worst.action in _TO_THE_START else worst
