"""The parts of a rollout's record, and how they must fit together.

Positions are indices into the response (the prompt is apart), half-open like Python slices.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class RecordError(ValueError):
    """A rollout's arrays, spans or turns contradict each other."""


class Status(Enum):
    """Where a rollout stands. The values are those of the slime family's ``Sample.Status``."""

    PENDING = "pending"
    ABORTED = "aborted"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    FAILED = "failed"

    @property
    def finished(self) -> bool:
        return self not in (Status.PENDING, Status.ABORTED)


class Phase(Enum):
    """How far a turn has come. Only a rollout's last turn may be unfinished."""

    GENERATING = "generating"  # the action's tokens are being made, or were cut off
    ACTING = "acting"  # the action is complete, the environment has not answered
    OBSERVED = "observed"  # the environment has answered


@dataclass(frozen=True)
class Span:
    """A run of response tokens ``[start, end)`` made by one policy version.

    ``inherited`` tokens were made by a sibling of the same group and count there: here they are context.
    """

    version: int
    start: int
    end: int
    inherited: bool = False

    @property
    def length(self) -> int:
        return self.end - self.start

    def to_json(self) -> list[Any]:
        """``Span(*value)`` is its inverse."""
        value: list[Any] = [self.version, self.start, self.end]
        return [*value, True] if self.inherited else value


@dataclass(frozen=True)
class Anchor:
    """The state in which a group was forked: all of its members that went on began there, with one transcript.

    ``snapshot`` is the environment's, "" where it is unknown, ``tokens`` the number of response tokens that lead to it.
    """

    snapshot: str
    tokens: int


@dataclass(frozen=True)
class Turn:
    """One model action ``[start, action_end)`` and the answer to it ``[action_end, end)``.

    ``snapshot_before`` is the id of the environment's state in which the action is executed,
    ``seconds`` the wall-clock of the environment's step (0 until it has answered).
    """

    start: int
    action_end: int
    end: int
    phase: Phase = Phase.GENERATING
    snapshot_before: str | None = None
    seconds: float = 0.0


def check_tiling(spans: Sequence[Span], length: int) -> None:
    """Raise RecordError unless ``spans`` cover ``length`` tokens without a gap, in order."""
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            raise RecordError(f"{span} does not start at {position}, where its predecessor ends")
        position = span.end
    if position != length:
        raise RecordError(f"spans cover {position} of {length} tokens")


def made_by_the_model(spans: Sequence[Span], length: int) -> bytes:
    """For each of ``length`` response tokens 1 where a span covers it, else 0.

    Raises RecordError where spans overlap or leave them.
    """
    made = bytearray(length)
    previous_end = 0
    for span in spans:
        if not previous_end <= span.start < span.end <= length:
            raise RecordError(f"{span} overlaps its predecessor or leaves the {length} response tokens")
        made[span.start : span.end] = b"\1" * (span.end - span.start)
        previous_end = span.end
    return bytes(made)


def check_mask(loss_mask: list[int], spans: Sequence[Span]) -> None:
    """Raise RecordError where a token is trained that no span covers; ``spans`` are in order."""
    starts, ends = [span.start for span in spans], [span.end for span in spans]
    for start, end in zip([0, *ends], [*starts, len(loss_mask)], strict=True):
        # By stretches, since this runs at every look at a long rollout.
        if any(loss_mask[start:end]):
            position = next(at for at in range(start, end) if loss_mask[at])
            raise RecordError(f"response token {position} is trained but no span says which policy made it")


def check_turns(turns: Sequence[Turn], made: bytes, snapshots: Container[str]) -> None:
    """Raise RecordError unless turns tile the response from the first on, and spans cover their actions alone.

    ``made`` is 1 for every response token that the model made, else 0.
    """
    previous_end = turns[0].start if turns else 0
    for index, turn in enumerate(turns):
        if not previous_end == turn.start <= turn.action_end <= turn.end <= len(made):
            raise RecordError(f"turn {index} {turn} does not follow its predecessor's end {previous_end}")
        if 0 in made[turn.start : turn.action_end] or 1 in made[turn.action_end : turn.end]:
            raise RecordError(f"turn {index}: its action and the policy spans differ")
        if turn.phase is not Phase.OBSERVED and (index < len(turns) - 1 or turn.end != turn.action_end):
            raise RecordError(f"turn {index} is {turn.phase.value} but tokens follow its action")
        if turn.snapshot_before is not None and turn.snapshot_before not in snapshots:
            raise RecordError(
                f"turn {index} refers to snapshot {turn.snapshot_before}, which is not recorded"
            )
        previous_end = turn.end
    if turns and previous_end != len(made):
        raise RecordError(f"{len(made) - previous_end} response tokens lie behind the last turn")
