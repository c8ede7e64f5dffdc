"""How good a policy is on tasks that it was not trained on."""

import asyncio
import inspect
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean

from midstream.envs.tasks import load_tasks
from midstream.hooks.slime.host import load_function
from midstream.local.rollout import GenerateState, reward_of, sampling_params
from midstream.local.sample import Sample


@dataclass(frozen=True)
class Score:
    """`reward_mean` is over the `tasks` that were played to their end, None where there were none."""

    tasks: int
    failed: int
    reward_mean: float | None


@dataclass(frozen=True)
class Evaluation:
    """The score of all tasks, and those of the sources that tasks name."""

    total: Score
    sources: Mapping[str, Score] = field(default_factory=dict)


async def evaluate(args: Namespace, tasks: Path, count: int, source_key: str) -> Evaluation:
    """Play the first `count` of `tasks` once each, sampled as in training; nothing is cut off.

    Tasks whose environment failed are counted and not scored. `source_key` is the key of a task's metadata that names
    its source.
    """
    samples = [
        Sample(
            index=index, group_index=index, prompt=task.prompt, label=task.label, metadata=dict(task.metadata)
        )
        for index, task in enumerate(islice(load_tasks(tasks), count))
    ]
    sources = [sample.metadata.get(source_key) for sample in samples]
    rewards = await asyncio.gather(*(_play(args, sample) for sample in samples))
    by_source: dict[str, list[float | None]] = {}
    for source, reward in zip(sources, rewards, strict=True):
        if source is not None:
            by_source.setdefault(str(source), []).append(reward)
    return Evaluation(_score(rewards), {source: _score(found) for source, found in sorted(by_source.items())})


def _score(rewards: Sequence[float | None]) -> Score:
    known = [reward for reward in rewards if reward is not None]
    return Score(len(known), len(rewards) - len(known), fmean(known) if known else None)


async def _play(args: Namespace, sample: Sample) -> float | None:
    generate = load_function(args.custom_generate_function_path)
    # As in slime, a generate function need not know that it is evaluated.
    evaluation = {"evaluation": True} if "evaluation" in inspect.signature(generate).parameters else {}
    state: GenerateState = args.generate_state
    async with state.concurrency:
        played: Sample = await generate(args, sample, sampling_params(args), **evaluation)
    return None if played.remove_sample else await reward_of(args, played)
