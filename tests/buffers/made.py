"""Rollouts made by hand: who wrote what under which version."""

from collections.abc import Mapping

from midstream.buffers.rollout import PartialRollout, Span
from midstream.envs.protocol import Change, Snapshot

ACTION_TOKENS = 2
START = {"a": "a0"}  # the task's own files, with the digests of their contents


class World:
    """The files of one rollout's environment, and snapshots of them with their lineage.

    ``name`` goes before the ids of its snapshots.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.files = dict(START)
        self.taken = 0
        self.last: Snapshot | None = None

    def snapshot(self, writes: Mapping[str, str]) -> Snapshot:
        """The state after ``writes``: digests by path, empty where the file is gone."""
        changes = tuple(
            Change(path, "modified", len(after), self.files.get(path, ""), after)
            for path, after in writes.items()
        )
        self.files |= writes
        parent = None if self.last is None else self.last.id
        self.last = Snapshot(f"{self.name}s{self.taken}", f"d{self.taken}", parent, changes)
        self.taken += 1
        return self.last

    def begin(self, rollout: PartialRollout) -> None:
        rollout.enter(self.snapshot({}))

    def turn(self, rollout: PartialRollout, version: int, **writes: str) -> None:
        """A whole turn: two tokens of the model, one of the environment, and a snapshot of what it wrote."""
        act(rollout, version)
        rollout.finish_action()
        rollout.append_observation([9])
        rollout.enter(self.snapshot(writes) if writes or self.last is None else self.last)


def act(rollout: PartialRollout, version: int, tokens: int = ACTION_TOKENS) -> None:
    """Tokens of an action, which is left open."""
    if rollout.open_turn is None:
        rollout.begin_turn()
    rollout.append_action([1] * tokens, [-0.5] * tokens, [Span(version, 0, tokens)] if tokens else [])


def played(
    *turns: tuple[int, Mapping[str, str]], action: int | None = None, name: str = ""
) -> PartialRollout:
    """A rollout of these turns, each a version and its writes; then an open action under ``action``."""
    rollout = PartialRollout("prompt", "group", prompt_tokens=[7])
    world = World(name)
    world.begin(rollout)
    for version, writes in turns:
        world.turn(rollout, version, **writes)
    if action is not None:
        act(rollout, action)
    rollout.check()
    return rollout
