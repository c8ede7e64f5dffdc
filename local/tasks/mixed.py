"""chain-fix from several sources, as the data of real jobs are: some tasks always pass, some never do.

Tasks that pass whatever the agent does, or whatever happens fail, look like all others: their prompts, their files
and what a rollout costs are drawn as theirs are. What differs is the check alone, as with a test suite that tests
nothing, or one that is broken. So nothing but experience tells them apart.
"""

import random
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from midstream.conf.schema import TaskSource
from midstream.local.tasks.chain_fix import MARKER, Split, chain_tasks
from midstream.local.tasks.lines import TaskLine, write_lines

_CHECKS = {"submit": f"test -e {MARKER}", "never": "false"}
"""`eval_cmd` of the checks that do not ask for the chain."""


def write_mixed_tasks(
    path: Path,
    count: int,
    sources: Mapping[str, TaskSource],
    *,
    source_key: str,
    seed: int,
    split: Split = "train",
) -> Path:
    """Write `count` tasks as JSONL to `path`, whole or not at all, and return it.

    Each names its source in `metadata[source_key]`. The sources stand in a drawn order, so that any part of the file
    is a mix. The same arguments write the same tasks, and the tasks of one source differ from those of another.
    """
    lines = [
        line
        for (name, source), number in zip(sources.items(), task_counts(count, sources).values(), strict=True)
        for line in _lines_of(name, source, number, source_key, seed, split)
    ]
    random.Random(f"mixed/{split}/{seed}").shuffle(lines)
    return write_lines(path, lines)


def task_counts(count: int, sources: Mapping[str, TaskSource]) -> dict[str, int]:
    """How many of `count` tasks each source gives: its share, rounded so that they sum up (largest remainders).

    Raises ValueError where a source would give none.
    """
    whole = sum(source.share for source in sources.values())
    exact = {name: count * source.share / whole for name, source in sources.items()}
    counts = {name: int(number) for name, number in exact.items()}
    missing = count - sum(counts.values())
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[:missing]:
        counts[name] += 1
    none = [name for name, number in counts.items() if not number]
    if none:
        raise ValueError(
            f"of {count} tasks none is of {', '.join(none)}: ask for more tasks, or raise its share"
        )
    return counts


def _lines_of(
    name: str, source: TaskSource, count: int, source_key: str, seed: int, split: Split
) -> list[TaskLine]:
    # Sources of one difficulty must not share their tasks: the name is part of the seed.
    own_seed = random.Random(f"{name}/{seed}").randrange(2**32)
    lines = []
    for task in islice(chain_tasks(seed=own_seed, difficulty=source.difficulty, split=split), count):
        line = task.to_json()
        line["metadata"][source_key] = name
        if source.check in _CHECKS:
            line["metadata"]["eval_cmd"] = _CHECKS[source.check]
        lines.append(line)
    return lines
