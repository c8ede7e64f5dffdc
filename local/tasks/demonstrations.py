"""Demonstrations of chain-fix that slip: what the warm start learns from.

They show every command and how to follow a chain, with the bad habits that reinforcement learning is there to
undo. Clean demonstrations would leave nothing to learn.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from midstream.local.tasks.chain_fix import FILES, SUBMIT, ChainTask, chain_tasks
from midstream.local.tasks.chain_world import ChainWorld

DIFFICULTY = 0.5  # of the tasks shown; their chains have every length that any difficulty has


@dataclass(frozen=True)
class Slips:
    """Probabilities of a slip, drawn at each file of the chain."""

    skip_needed_fix: float = 0.55
    fix_good_file: float = 0.10
    submit_early: float = 0.10
    read_random_file: float = 0.10


def demonstrations(*, seed: int, slips: Slips = Slips()) -> Iterator[str]:
    """Yield transcripts without end, one word per token, as the model reads and writes them in a rollout."""
    draw = random.Random(f"chain-fix-demonstrations/{seed}")
    for task in chain_tasks(seed=seed, difficulty=DIFFICULTY, split="demonstrations"):
        yield _transcript(task, _slipping_script(draw, task, slips))


def _slipping_script(draw: random.Random, task: ChainTask, slips: Slips) -> list[str]:
    actions = []
    for name in task.chain:
        if draw.random() < slips.read_random_file:
            actions.append(f"cat {draw.choice(FILES)}")
        actions.append(f"cat {name}")
        needs_fix = name in task.bad_links
        if draw.random() < (1.0 - slips.skip_needed_fix if needs_fix else slips.fix_good_file):
            actions.append(f"fix {name}")
        if draw.random() < slips.submit_early:
            break
    return [*actions, SUBMIT]


def _transcript(task: ChainTask, actions: list[str]) -> str:
    world = ChainWorld(task)
    words = [task.prompt]
    for action in actions:
        words.append(f"{action} <end>")
        observation = world.step(action)
        if action != SUBMIT:
            words.append(f"<obs> {observation} <act>")
    return " ".join(words)
