"""From the records of a batch to what estimators see of it."""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from midstream.buffers.rollout import Anchor, PartialRollout, Span
from midstream.envs.lineage import LineageError, chain, shares_along
from midstream.hooks.credit.batch import NONE, CreditBatch


@dataclass(frozen=True)
class Segment:
    """A segment of one rollout, as `CreditBatch` has them.

    `state` is the digest of the environment's state, `at_snapshot` whether a turn begins here in a known one.
    """

    length: int
    version: int = NONE
    shared: bool = False
    inherited: bool = False
    state: str | None = None
    at_snapshot: bool = False
    lags: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Earned:
    """What one rollout earned: `counted` is False where no loss may see it.

    `anchor` is the state from where others of its group went on too, the last where there are several; None where it
    has nothing in common with another. `passed` are all states before that in which its turns began.
    """

    group: Hashable
    reward: float
    counted: bool
    anchor: Anchor | None
    segments: Sequence[Segment]
    passed: frozenset[Anchor] = frozenset()

    def continues(self, anchors: Iterable[Anchor]) -> list[Anchor]:
        """Those of its group's `anchors` that it is a continuation of, first to last."""
        if self.anchor is None:
            return []
        found = {anchor for anchor in anchors if anchor == self.anchor or anchor in self.passed}
        return sorted(found, key=lambda anchor: anchor.tokens)


def passed_by(rollout: PartialRollout) -> frozenset[Anchor]:
    """The states in which turns of a rollout began, up to its anchor; none where it has no anchor."""
    if rollout.anchor is None:
        return frozenset()
    return frozenset(
        Anchor(turn.snapshot_before, turn.start)
        for turn in rollout.turns
        if turn.snapshot_before is not None and turn.start <= rollout.anchor.tokens
    )


def segments_of(rollout: PartialRollout, version: int) -> list[Segment]:
    """The segments of a rollout that the policy `version` trains on; none where it has no token.

    Lags are never negative: tokens of a version after `version` count as its own.
    """
    anchor = 0 if rollout.anchor is None else rollout.anchor.tokens
    spans = {span.start: span for span in rollout.spans}
    turns = {turn.start: index for index, turn in enumerate(rollout.turns)}
    ends = {0, anchor, len(rollout.tokens)}
    ends.update(at for span in rollout.spans for at in (span.start, span.end))
    ends.update(at for turn in rollout.turns for at in (turn.start, turn.action_end, turn.end))
    trajectory = 0 if rollout.dispatch_version is None else max(0, version - rollout.dispatch_version)
    acted_in = _states(rollout, version)
    segments: list[Segment] = []
    span: Span | None = None
    state: tuple[str | None, float] = (None, 0.0)
    for start, end in itertools.pairwise(sorted(ends)):
        span = spans.get(start, span)
        if start in turns:
            state = acted_in[turns[start]]
        made = span is not None and start < span.end
        token = max(0, version - span.version) if span is not None and made else 0
        segments.append(
            Segment(
                length=end - start,
                version=span.version if span is not None and made else NONE,
                shared=end <= anchor,
                inherited=span is not None and made and span.inherited,
                state=state[0],
                at_snapshot=start in turns and state[0] is not None,
                lags=(trajectory, token, state[1]),
            )
        )
    return segments


def batch_of(rollouts: Sequence[Earned]) -> CreditBatch:
    """The tensors of these rollouts and of their segments, in their order."""
    segments = [(index, segment) for index, rollout in enumerate(rollouts) for segment in rollout.segments]
    groups, families, anchors, states = (_numbers() for _ in range(4))
    of_group: defaultdict[Hashable, set[Anchor]] = defaultdict(set)
    for rollout in rollouts:
        if rollout.anchor is not None:
            of_group[rollout.group].add(rollout.anchor)
    continued = [rollout.continues(of_group[rollout.group]) for rollout in rollouts]
    return CreditBatch(
        rewards=torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64),
        counted=torch.tensor([rollout.counted for rollout in rollouts], dtype=torch.bool),
        groups=_integers(groups[rollout.group] for rollout in rollouts),
        # All forks of a group count as one family: a record does not say from which of several sources it came.
        families=_integers(NONE if r.anchor is None else families[r.group] for r in rollouts),
        anchors=_integers(NONE if r.anchor is None else anchors[r.group, r.anchor] for r in rollouts),
        continuations=torch.tensor(
            [
                [index, anchors[rollouts[index].group, anchor]]
                for index, found in enumerate(continued)
                for anchor in found
            ],
            dtype=torch.int64,
        ).reshape(-1, 2),
        rollouts=_integers(index for index, _ in segments),
        lengths=_integers(segment.length for _, segment in segments),
        versions=_integers(segment.version for _, segment in segments),
        ahead=_integers(
            NONE if anchor is None else anchors[rollout.group, anchor]
            for rollout, found in zip(rollouts, continued, strict=True)
            for anchor in _ahead(rollout.segments, found)
        ),
        inherited=torch.tensor([segment.inherited for _, segment in segments], dtype=torch.bool),
        states=_integers(
            NONE if segment.state is None else states[rollouts[index].group, segment.state]
            for index, segment in segments
        ),
        lags=torch.tensor([segment.lags for _, segment in segments], dtype=torch.float64).reshape(-1, 3),
    )


def _ahead(segments: Sequence[Segment], anchors: Sequence[Anchor]) -> Iterator[Anchor | None]:
    """For each segment of a rollout the first of its anchors, in order, that lies at its end or after it."""
    end = 0
    for segment in segments:
        end += segment.length
        yield next((anchor for anchor in anchors if anchor.tokens >= end), None) if segment.shared else None


def _numbers() -> defaultdict[Hashable, int]:
    """A number for each key, in the order in which they are asked for."""
    return defaultdict(itertools.count().__next__)


def _integers(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _states(rollout: PartialRollout, version: int) -> list[tuple[str | None, float]]:
    """For each turn the digest of the state in which it acts, None where that is unknown, and that state's mean lag.

    A lag that is unknown is that of the last state that is known.
    """
    keys = [turn.snapshot_before for turn in rollout.turns]
    lags: dict[str, float] = {}
    # From the last on: the chain that leads to it has the others, but for rollouts that were forked or went back.
    for key in reversed(keys):
        if key is not None and key not in lags:
            lags |= _mean_lags(rollout, key, version)
    found, known = [], 0.0
    for key in keys:
        known = known if key is None else lags.get(key, known)
        found.append((None if key is None else rollout.snapshots[key].digest, known))
    return found


def _mean_lags(rollout: PartialRollout, last: str, version: int) -> dict[str, float]:
    """The mean lag of what differs from the task's start, by bytes, in each state from there to `last`; none where
    the records do not lead back to that start.
    """
    try:
        states = chain(rollout.snapshots, last)
    except LineageError:
        return {}
    if states[0].turn is not None:
        return {}
    return {
        state.id: sum(
            share * max(0, version - writer) for writer, share in shares.items() if writer is not None
        )
        for state, shares in zip(states, shares_along(states), strict=True)
    }
