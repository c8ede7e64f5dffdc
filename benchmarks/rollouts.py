"""Rollouts of many tokens, cut off, and the journal's view of them."""

import dataclasses
import random
import struct

from midstream.buffers.journal.encoding import member_of
from midstream.buffers.journal.records import Member
from midstream.buffers.rollout import PartialRollout, Span, Status
from midstream.envs.protocol import Change, Snapshot

# Of each rollout; of each turn's tokens three quarters are the model's.
TURNS, CHANGES, VERSIONS = 32, 3, 4
VOCABULARY = 150_000


def random_rollout(
    seed: int, tokens: int, *, prompt_tokens: int = 512, turns: int = TURNS, vocabulary: int = VOCABULARY
) -> PartialRollout:
    """A rollout that was cut off after so many turns."""
    draws = random.Random(seed)
    rollout = PartialRollout("prompt", "group", [draws.randrange(vocabulary) for _ in range(prompt_tokens)])
    each = tokens // turns
    action = each * 3 // 4
    for turn in range(turns):
        changes = tuple(
            Change(
                f"src/module_{number}.py", "modified", 4_000, *(draws.randbytes(8).hex() for _ in range(2))
            )
            for number in range(CHANGES)
        )
        rollout.enter(Snapshot(draws.randbytes(20).hex(), draws.randbytes(20).hex(), changes=changes))
        rollout.begin_turn()
        single = struct.pack(f"{action}f", *(-draws.expovariate(1) for _ in range(action)))
        log_probs = list(struct.unpack(f"{action}f", single))
        spans = [Span(turn * VERSIONS // turns, 0, action)]
        rollout.append_action([draws.randrange(vocabulary) for _ in range(action)], log_probs, spans)
        rollout.finish_action()
        rollout.append_observation([draws.randrange(vocabulary) for _ in range(each - action)], seconds=0.5)
    rollout.status = Status.ABORTED
    return rollout


class Rollouts:
    """Members for the journal without end: a known record each, with snapshots of its own."""

    def __init__(self, records: list[PartialRollout]) -> None:
        self._members = [member_of(record) for record in records]
        self.made = 0

    def next(self) -> Member:
        self.made += 1
        known = self._members[self.made % len(self._members)]
        own = tuple(f"{self.made:08x}{snapshot[8:]}" for snapshot in known.summary.snapshots)
        return Member(known.payload, dataclasses.replace(known.summary, snapshots=own))
