"""Who made the workspace of a rollout: for every path that differs from the task's start, the last writer.

In the spirit of a version-control blame: a row says which policy version, in which turn, left a path as it is.
What is said of a workspace is bounded, however many paths differ: the heaviest are named, the others summed up by
who wrote them, so that shares are exact.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from midstream.buffers.rollout import PartialRollout, Phase
from midstream.envs.lineage import LineageError, Weighted, Write, chain, shares, surviving_writes

MOST_PATHS = 100
"""So many paths of a workspace are named."""
MOST_PATH_CHARACTERS = 16_384
"""So long are they together: one path may have thousands of characters."""


@dataclass(frozen=True)
class Rest:
    """The writes of one turn that are not named one by one. `weight` is the sum of theirs."""

    version: int | None
    turn: int | None
    paths: int
    bytes: int
    weight: int


@dataclass(frozen=True)
class Blame:
    """Who wrote what differs from the task's start.

    `writes` are the heaviest first, `rest` is what they leave out, by version and turn. Both are empty where nothing
    differs, and where `unknown` says why it is not known who wrote. The answers of the last `unseen_turns` turns came
    after the newest state that was recorded, so what these turns did is not in it.
    """

    writes: tuple[Write, ...] = ()
    rest: tuple[Rest, ...] = ()
    unknown: str | None = None
    unseen_turns: int = 0

    @property
    def paths(self) -> int:
        """How many paths differ."""
        return len(self.writes) + sum(rest.paths for rest in self.rest)

    @property
    def shares(self) -> dict[int | None, float]:
        """The share of each policy version by weight, oldest version first; they sum to 1, or there is none."""
        return dict(sorted(shares(self._parts()).items(), key=lambda item: _number(item[0])))

    def share(self, part: Weighted) -> float:
        """That of one write, or of a sum of them, in all that differs."""
        return part.weight / sum(each.weight for each in self._parts())

    def mean_lag(self, version: int) -> float:
        """Mean age in policy versions of what differs, by weight, where the policy is at `version`.

        0 where nothing does. A write that nobody has signed counts as of now.
        """
        return sum(max(0, version - each) * share for each, share in self.shares.items() if each is not None)

    def to_json(self) -> dict[str, Any]:
        """JSON-able values; `from_json` is the inverse."""
        return {
            "writes": [vars(write) for write in self.writes],
            "rest": [vars(rest) for rest in self.rest],
            "unknown": self.unknown,
            "unseen_turns": self.unseen_turns,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        writes = tuple(Write(**write) for write in value["writes"])
        return cls(**{**value, "writes": writes, "rest": tuple(Rest(**rest) for rest in value["rest"])})

    def _parts(self) -> list[Weighted]:
        return [*self.writes, *self.rest]


def blame_of(rollout: PartialRollout) -> Blame:
    """The blame of the newest recorded state of a rollout's environment, finished or not."""
    unseen, newest = _unseen_turns(rollout), rollout.newest_snapshot
    if newest is None:
        return Blame(unknown="no state of its environment was recorded", unseen_turns=unseen)
    try:
        states = chain(rollout.snapshots, newest)
    except LineageError as error:
        return Blame(unknown=str(error), unseen_turns=unseen)
    if states[0].turn is not None:
        # As where a transcript went on in an environment that started anew.
        return Blame(unknown="its states do not lead back to the task's start", unseen_turns=unseen)
    return _bounded(surviving_writes(states), unseen)


def _bounded(writes: list[Write], unseen_turns: int) -> Blame:
    ranked = sorted(writes, key=lambda write: (-write.weight, write.path))
    named, characters = 0, 0
    for write in ranked[:MOST_PATHS]:
        characters += len(write.path)
        if characters > MOST_PATH_CHARACTERS:
            break
        named += 1
    return Blame(tuple(ranked[:named]), tuple(_rest(ranked[named:])), unseen_turns=unseen_turns)


def _rest(writes: Iterable[Write]) -> list[Rest]:
    by_writer: defaultdict[tuple[int | None, int | None], list[Write]] = defaultdict(list)
    for write in writes:
        by_writer[write.version, write.turn].append(write)
    found = [
        Rest(version, turn, len(left), sum(w.bytes for w in left), sum(w.weight for w in left))
        for (version, turn), left in by_writer.items()
    ]
    return sorted(found, key=lambda rest: (-rest.weight, _number(rest.version), _number(rest.turn)))


def _unseen_turns(rollout: PartialRollout) -> int:
    if rollout.snapshot is not None:
        return 0
    known = [index for index, turn in enumerate(rollout.turns) if turn.snapshot_before is not None]
    return sum(turn.phase is Phase.OBSERVED for turn in rollout.turns[max(known, default=0) :])


def _number(value: int | None) -> int:
    """For an order in which what is unknown comes first."""
    return -1 if value is None else value
