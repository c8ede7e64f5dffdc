"""The record of a rollout that may be cut off and go on later.

It is plain data: JSON-able, picklable, and free of live handles, so that a rollout can rest in a host's
sample, in a debug dump or across a restart. Its parts are in ``parts``, under whose names they are found
here too.
"""

import dataclasses
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from midstream.buffers.parts import (
    Anchor,
    Phase,
    RecordError,
    Span,
    Status,
    Turn,
    check_mask,
    check_tiling,
    check_turns,
    made_by_the_model,
)
from midstream.envs.protocol import Snapshot

__all__ = ["COLUMNS", "Anchor", "PartialRollout", "Phase", "RecordError", "Span", "Status", "Turn"]

COLUMNS = ("prompt_tokens", "tokens", "log_probs", "loss_mask")
"""The fields that are long: a number for every token."""


@dataclass
class PartialRollout:
    """A rollout with everything that is needed to go on with it later, or to attribute its tokens.

    ``tokens``, ``log_probs`` and ``loss_mask`` have one entry per response token. Tokens of the
    environment have log-prob 0.0, mask 0 and no span; tokens of the model are covered by exactly one
    span. ``snapshot`` is the id of the environment's state at the end of the last turn, None where that
    is unknown; ``snapshots`` holds every snapshot that it and the turns refer to. ``fault`` says what the
    agent did where that ended the episode, ``failure`` what ended it that is nobody's doing: ``environment``,
    ``deadline``, or ``stopped`` where its group was given up. ``anchor`` is where its group was forked last, or to
    where the rollout went back since, None where it has no tokens of the model in common with another: rollouts of a
    group with equal anchors are continuations of one state, with one transcript.
    ``snapshot_wait_s`` are the seconds of wall-clock in which it waited for a snapshot, and for nothing else.
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
    anchor: Anchor | None = None
    dispatch_version: int | None = None
    status: Status = Status.PENDING
    reward: float | None = None
    fault: str | None = None
    failure: str | None = None
    attempts: int = 0
    resumes: int = 0
    discarded_tokens: int = 0
    snapshot_wait_s: float = 0.0

    @property
    def generated_tokens(self) -> int:
        """Tokens of the response that the model made, in this rollout or in a sibling."""
        return sum(span.length for span in self.spans)

    @property
    def own_tokens(self) -> int:
        """Tokens of the response that the model made in this rollout: over a group, each counts once."""
        return sum(span.length for span in self.spans if not span.inherited)

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
        check_tiling(spans, len(tokens))
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

    @property
    def newest_snapshot(self) -> str | None:
        """The newest known state of the environment, from which a resume goes on; None where there is none."""
        if self.snapshot is not None:
            return self.snapshot
        return next((t.snapshot_before for t in reversed(self.turns) if t.snapshot_before is not None), None)

    def rewind_to_snapshot(self) -> list[Snapshot]:
        """Drop what came after the newest known state of the environment; nothing if that is the end.

        Where a snapshot failed, the transcript is ahead of every state that can be restored. Without any
        snapshot the rollout begins anew. Returns the snapshots that leave the record.
        """
        if self.snapshot is not None or not self.turns:
            return []
        known = [index for index, turn in enumerate(self.turns) if turn.snapshot_before is not None]
        return self.rewind_to(known[-1]) if known else self.restart()

    def rewind_to(self, turn: int) -> list[Snapshot]:
        """Drop turn ``turn`` (0 is the first) and all after it; the environment goes back to before that turn.

        The lists are replaced, not changed: a shallow copy keeps its own. A rollout that had ended goes on.

        Returns:
            The snapshots that leave the record: no remaining turn refers to them.

        Raises:
            RecordError: there is no such turn.
        """
        if not 0 <= turn < len(self.turns):
            raise RecordError(f"cannot rewind to turn {turn}: the rollout has {len(self.turns)}")
        start, snapshot = self.turns[turn].start, self.turns[turn].snapshot_before
        made = self.own_tokens
        self.spans = [span for span in self.spans if span.start < start]
        self.discarded_tokens += made - self.own_tokens
        self.turns = self.turns[:turn]
        self.tokens, self.log_probs = self.tokens[:start], self.log_probs[:start]
        self.loss_mask = self.loss_mask[:start]
        if not self.spans:
            self.dispatch_version = None
        if self.anchor is not None and start < self.anchor.tokens:
            self.anchor = Anchor(snapshot or "", start) if self.spans else None
        if self.status.finished:
            self.status = Status.ABORTED
        self.snapshot, self.reward, self.fault, self.failure = snapshot, None, None, None
        needed = {snapshot, *(turn.snapshot_before for turn in self.turns)}
        left = [record for key, record in self.snapshots.items() if key not in needed]
        self.snapshots = {key: record for key, record in self.snapshots.items() if key in needed}
        return left

    def restart(self) -> list[Snapshot]:
        """Drop tokens, turns and environment: the rollout begins anew from its prompt.

        Returns the snapshots that leave the record.
        """
        left = list(self.snapshots.values())
        self.discarded_tokens += self.own_tokens
        self.tokens, self.log_probs, self.loss_mask = [], [], []
        self.spans, self.turns, self.snapshots = [], [], {}
        self.snapshot = self.anchor = self.dispatch_version = None
        self.reward = self.fault = self.failure = None
        self.status = Status.PENDING
        return left

    def check(self) -> None:
        """Raise RecordError unless arrays, spans, turns and snapshots agree."""
        n = len(self.tokens)
        if len(self.log_probs) != n or len(self.loss_mask) != n:
            raise RecordError(
                f"{n} tokens, {len(self.log_probs)} log-probs, {len(self.loss_mask)} mask entries"
            )
        made = made_by_the_model(self.spans, n)
        check_mask(self.loss_mask, self.spans)
        if any(any(self.loss_mask[span.start : span.end]) for span in self.spans if span.inherited):
            raise RecordError("inherited tokens are trained: they count in the sibling that made them")
        check_turns(self.turns, made, self.snapshots)
        if self.snapshot is not None and self.snapshot not in self.snapshots:
            raise RecordError(f"current snapshot {self.snapshot} is not recorded")
        if self.anchor is not None and not 0 <= self.anchor.tokens <= n:
            raise RecordError(f"{self.anchor} lies outside of the {n} tokens")

    def _append_span(self, span: Span) -> None:
        # Not across turns, between which a rollout may be cut, whose answer may have no tokens.
        if span.start > self.turns[-1].start and self.spans[-1].version == span.version:
            span = Span(span.version, self.spans.pop().start, span.end)
        self.spans.append(span)

    def _replace_turn(self, **changes: Any) -> None:
        self.turns[-1] = dataclasses.replace(self.turns[-1], **changes)

    def to_json(self, *, without: Container[str] = ()) -> dict[str, Any]:
        """A JSON-able copy, less the fields ``without``; ``from_json`` is the inverse of the whole."""
        value = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        value |= {name: list(value[name]) for name in COLUMNS if name not in without}
        value["status"] = self.status.value
        value["spans"] = [span.to_json() for span in self.spans]
        value["anchor"] = None if self.anchor is None else [self.anchor.snapshot, self.anchor.tokens]
        value["turns"] = [vars(turn) | {"phase": turn.phase.value} for turn in self.turns]
        value["snapshots"] = {key: snapshot.to_json() for key, snapshot in self.snapshots.items()}
        return {name: part for name, part in value.items() if name not in without}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Rebuild a rollout, which takes over the columns; raises RecordError if the parts contradict each other."""
        if unknown := value.keys() - {f.name for f in dataclasses.fields(cls)}:
            raise RecordError(
                f"unknown fields {sorted(unknown)}: the record is of another version of midstream"
            )
        rollout = cls(
            **{
                **value,
                "status": Status(value["status"]),
                "spans": [Span(*span) for span in value["spans"]],
                "anchor": None if value.get("anchor") is None else Anchor(*value["anchor"]),
                "turns": [Turn(**(turn | {"phase": Phase(turn["phase"])})) for turn in value["turns"]],
                "snapshots": {key: Snapshot.from_json(item) for key, item in value["snapshots"].items()},
            }
        )
        rollout.check()
        return rollout
