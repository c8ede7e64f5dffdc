"""Prompts with known pass rates, and a curriculum that plays them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from midstream.buffers.curriculum.book import Cost
from midstream.buffers.curriculum.curriculum import Curriculum, Outcome
from midstream.buffers.curriculum.drawing import Prompts
from midstream.conf.schema.curriculum import CurriculumConfig

SIZE = 8


def config(**parts: Any) -> CurriculumConfig:
    return CurriculumConfig.model_validate({"enabled": True, **parts})


def prompts(count: int, sources: Sequence[int] | None = None, names: Sequence[str] = ("a",)) -> Prompts:
    """Prompts whose digests are in another order than their positions."""
    digests = np.array([(7919 * (position + 1)) % 104729 for position in range(count)], np.uint64)
    numbers = np.zeros(count, np.int32) if sources is None else np.array(sources, np.int32)
    return Prompts(digests, numbers, names)


def curriculum(of: Prompts, settings: CurriculumConfig | None = None, **parts: Any) -> Curriculum:
    options = {"group_size": SIZE, "groups_per_step": 4, "seed": 0, "shuffle": True, **parts}
    return Curriculum(settings or config(), of, **options)


def outcome(of: Prompts, position: int, solved: int, tokens: float = 1.0) -> Outcome:
    """A group of a prompt, of which so many members succeeded."""
    rewards = [1.0] * solved + [0.0] * (SIZE - solved)
    return Outcome(int(of.digests[position]), rewards, Cost(tokens=tokens))


def know(one: Curriculum, of: Prompts, solved: dict[int, int], groups: int = 2) -> None:
    """Let each prompt have had so many groups, all of which solved as much."""
    for position, count in solved.items():
        for _ in range(groups):
            assert one.observe(outcome(of, position, count))


def drawn(one: Curriculum, count: int) -> list[int]:
    """So many prompts one after the other, of which the groups end and tell nothing."""
    positions = []
    for _ in range(count):
        positions += one.take(1)
        one.drawing.ended(one.drawing.row_of(positions[-1]))
    return positions
