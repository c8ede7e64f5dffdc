"""The records of a rollout that may be cut off and go on later.

One module owns these types. They are plain data: JSON-able, picklable, and free of live handles, so
that a rollout can rest in a host's sample, in a debug dump or across a restart.

Positions are indices into the response (the prompt is apart), half-open like Python slices.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

from midstream.envs.protocol import Snapshot


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
    """A run of response tokens ``[start, end)`` made by one policy version."""

    version: int
    start: int
    end: int


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


@dataclass
class PartialRollout:
    """A rollout with everything that is needed to go on with it later, or to attribute its tokens.

    ``tokens``, ``log_probs`` and ``loss_mask`` have one entry per response token. Tokens of the
    environment have log-prob 0.0, mask 0 and no span; tokens of the model are covered by exactly one
    span. ``snapshot`` is the id of the environment's state at the end of the last turn, None where that
    is unknown; ``snapshots`` holds every snapshot that it and the turns refer to. ``fault`` says what the
    agent did where that ended the episode. ``snapshot_wait_s`` are the seconds of wall-clock in which it waited
    for a snapshot, and for nothing else.
    """

    prompt_key: str
    group_key: str
    prompt_tokens: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    snapshot: str | None = None
    dispatch_version: int | None = None
    status: Status = Status.PENDING
    reward: float | None = None
    fault: str | None = None
    attempts: int = 0
    resumes: int = 0
    discarded_tokens: int = 0
    snapshot_wait_s: float = 0.0

    @property
    def generated_tokens(self) -> int:
        """Tokens of the response that the model made."""
        return sum(span.end - span.start for span in self.spans)

    @property
    def open_turn(self) -> Turn | None:
        """The last turn, if the environment has not answered it."""
        if self.turns and self.turns[-1].phase is not Phase.OBSERVED:
            return self.turns[-1]
        return None

    def begin_turn(self) -> None:
        """Open a turn at the end of the response, in the current snapshot's state."""
        if self.open_turn is not None:
            raise RecordError(
                f"turn {len(self.turns) - 1} is still {self.turns[-1].phase.value}: finish it first"
            )
        end = len(self.tokens)
        self.turns.append(Turn(end, end, end, snapshot_before=self.snapshot))

    def append_action(self, tokens: Sequence[int], log_probs: Sequence[float], spans: Sequence[Span]) -> None:
        """Append model tokens to the open turn.

        ``spans`` are relative to ``tokens`` and must cover them without a gap, oldest first.

        Raises:
            RecordError: lengths differ, spans do not tile the tokens, or no turn is being generated.
        """
        turn = self.open_turn
        if turn is None or turn.phase is not Phase.GENERATING:
            raise RecordError("action tokens without a turn that is being generated: call begin_turn() first")
        if len(log_probs) != len(tokens):
            raise RecordError(f"{len(tokens)} tokens but {len(log_probs)} log-probs")
        _check_tiling(spans, len(tokens))
        offset = len(self.tokens)
        for span in spans:
            self._append_span(Span(span.version, offset + span.start, offset + span.end))
        if self.dispatch_version is None and spans:
            self.dispatch_version = spans[0].version
        self.tokens += tokens
        self.log_probs += log_probs
        self.loss_mask += [1] * len(tokens)
        self._replace_turn(action_end=len(self.tokens), end=len(self.tokens))

    def finish_action(self) -> None:
        """Mark the open turn's action as complete: the environment's step comes next."""
        self._replace_turn(phase=Phase.ACTING)

    def append_observation(self, tokens: Sequence[int], *, seconds: float = 0.0) -> None:
        """Append environment tokens (masked) and close the open turn.

        Before the first turn they are the environment's first observation. A step changes the environment,
        so the current snapshot is unknown until ``enter``.
        """
        turn = self.open_turn
        if turn is not None and turn.phase is not Phase.ACTING:
            raise RecordError("an observation answers a complete action: call finish_action() first")
        if turn is None and self.turns:
            raise RecordError("an observation without an action: call begin_turn() first")
        self.tokens += tokens
        self.log_probs += [0.0] * len(tokens)
        self.loss_mask += [0] * len(tokens)
        if turn is not None:
            self._replace_turn(end=len(self.tokens), phase=Phase.OBSERVED, seconds=seconds)
            self.snapshot = None

    @property
    def last_writer(self) -> tuple[int | None, int | None]:
        """Which policy version finished the action that the environment answered last, and in which turn.

        Both None before the first answer: that state is the task's own.
        """
        for index in range(len(self.turns) - 1, -1, -1):
            turn = self.turns[index]
            if turn.phase is Phase.OBSERVED:
                made = [span.version for span in self.spans if turn.start <= span.start < turn.action_end]
                return (made[-1] if made else None), index
        return None, None

    def enter(self, snapshot: Snapshot) -> None:
        """Record that the environment is in ``snapshot``'s state, before the open turn's action if any.

        A snapshot that is new to the rollout is signed with who led to it.
        """
        if snapshot.id not in self.snapshots:
            version, turn = self.last_writer
            self.snapshots[snapshot.id] = dataclasses.replace(snapshot, version=version, turn=turn)
        self.snapshot = snapshot.id
        if self.open_turn is not None:
            self._replace_turn(snapshot_before=snapshot.id)

    def forget(self, snapshot_id: str) -> None:
        """Drop a snapshot that cannot be restored; ``rewind_to_snapshot`` then goes to the one before it."""
        del self.snapshots[snapshot_id]
        self.turns = [
            dataclasses.replace(turn, snapshot_before=None) if turn.snapshot_before == snapshot_id else turn
            for turn in self.turns
        ]
        if self.snapshot == snapshot_id:
            self.snapshot = None

    def rewind_to_snapshot(self) -> None:
        """Drop what came after the newest known state of the environment; nothing if that is the end.

        Where a snapshot failed, the transcript is ahead of every state that can be restored. Without any
        snapshot the rollout begins anew.
        """
        if self.snapshot is not None or not self.turns:
            return
        known = [index for index, turn in enumerate(self.turns) if turn.snapshot_before is not None]
        if not known:
            self.restart()
            return
        turn = self.turns[known[-1]]
        kept = [span for span in self.spans if span.start < turn.start]
        self.discarded_tokens += self.generated_tokens - sum(span.end - span.start for span in kept)
        self.spans = kept
        del (
            self.turns[known[-1] :],
            self.tokens[turn.start :],
            self.log_probs[turn.start :],
            self.loss_mask[turn.start :],
        )
        self.snapshot = turn.snapshot_before
        self.reward = None

    def restart(self) -> None:
        """Drop tokens, turns and environment: the rollout begins anew from its prompt."""
        self.discarded_tokens += self.generated_tokens
        self.tokens, self.log_probs, self.loss_mask = [], [], []
        self.spans, self.turns, self.snapshots = [], [], {}
        self.snapshot = self.dispatch_version = self.reward = None
        self.status = Status.PENDING

    def check(self) -> None:
        """Raise RecordError unless arrays, spans, turns and snapshots agree."""
        n = len(self.tokens)
        if len(self.log_probs) != n or len(self.loss_mask) != n:
            raise RecordError(
                f"{n} tokens, {len(self.log_probs)} log-probs, {len(self.loss_mask)} mask entries"
            )
        model_made = [False] * n
        previous_end = 0
        for span in self.spans:
            if not previous_end <= span.start < span.end <= n:
                raise RecordError(f"{span} overlaps its predecessor or leaves the {n} response tokens")
            model_made[span.start : span.end] = [True] * (span.end - span.start)
            previous_end = span.end
        for position, (mask, made) in enumerate(zip(self.loss_mask, model_made, strict=True)):
            if mask and not made:
                raise RecordError(
                    f"response token {position} is trained but no span says which policy made it"
                )
        self._check_turns(model_made)

    def _check_turns(self, model_made: list[bool]) -> None:
        previous_end = self.turns[0].start if self.turns else 0
        for index, turn in enumerate(self.turns):
            if not previous_end == turn.start <= turn.action_end <= turn.end <= len(self.tokens):
                raise RecordError(f"turn {index} {turn} does not follow its predecessor's end {previous_end}")
            if not all(model_made[turn.start : turn.action_end]) or any(
                model_made[turn.action_end : turn.end]
            ):
                raise RecordError(f"turn {index}: its action and the policy spans differ")
            if turn.phase is not Phase.OBSERVED and (
                index < len(self.turns) - 1 or turn.end != turn.action_end
            ):
                raise RecordError(f"turn {index} is {turn.phase.value} but tokens follow its action")
            if turn.snapshot_before is not None and turn.snapshot_before not in self.snapshots:
                raise RecordError(
                    f"turn {index} refers to snapshot {turn.snapshot_before}, which is not recorded"
                )
            previous_end = turn.end
        if self.turns and previous_end != len(self.tokens):
            raise RecordError(f"{len(self.tokens) - previous_end} response tokens lie behind the last turn")
        if self.snapshot is not None and self.snapshot not in self.snapshots:
            raise RecordError(f"current snapshot {self.snapshot} is not recorded")

    def _append_span(self, span: Span) -> None:
        if self.spans and self.spans[-1].version == span.version and self.spans[-1].end == span.start:
            span = Span(span.version, self.spans.pop().start, span.end)
        self.spans.append(span)

    def _replace_turn(self, **changes: Any) -> None:
        self.turns[-1] = dataclasses.replace(self.turns[-1], **changes)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able copy; ``from_json`` is its inverse."""
        value = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("prompt_tokens", "tokens", "log_probs", "loss_mask"):
            value[name] = list(value[name])
        value["status"] = self.status.value
        value["spans"] = [[span.version, span.start, span.end] for span in self.spans]
        value["turns"] = [vars(turn) | {"phase": turn.phase.value} for turn in self.turns]
        value["snapshots"] = {key: snapshot.to_json() for key, snapshot in self.snapshots.items()}
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Rebuild a rollout; raises RecordError if the value's parts contradict each other."""
        if unknown := value.keys() - {f.name for f in dataclasses.fields(cls)}:
            raise RecordError(
                f"unknown fields {sorted(unknown)}: the record is of another version of midstream"
            )
        rollout = cls(
            **{
                **value,
                "status": Status(value["status"]),
                "spans": [Span(*span) for span in value["spans"]],
                "turns": [Turn(**(turn | {"phase": Phase(turn["phase"])})) for turn in value["turns"]],
                "snapshots": {key: Snapshot.from_json(item) for key, item in value["snapshots"].items()},
                **{name: list(value[name]) for name in ("prompt_tokens", "tokens", "log_probs", "loss_mask")},
            }
        )
        rollout.check()
        return rollout


def _check_tiling(spans: Sequence[Span], length: int) -> None:
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            raise RecordError(f"{span} does not start at {position}, where its predecessor ends")
        position = span.end
    if position != length:
        raise RecordError(f"spans cover {position} of {length} tokens")
