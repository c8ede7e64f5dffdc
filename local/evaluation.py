"""How good a policy is on tasks that it was not trained on."""

import asyncio
import inspect
from argparse import Namespace
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean

from midstream.envs.tasks import load_tasks
from midstream.hooks.slime.host import load_function
from midstream.local.rollout import GenerateState, reward_of, sampling_params
from midstream.local.sample import Sample


@dataclass(frozen=True)
class Evaluation:
    """`reward_mean` is over the `tasks` that were played to their end, None where there were none."""

    tasks: int
    failed: int
    reward_mean: float | None


async def evaluate(args: Namespace, tasks: Path, count: int) -> Evaluation:
    """Play the first `count` of `tasks` once each, sampled as in training; nothing is cut off.

    Tasks whose environment failed are counted and not scored.
    """
    samples = [
        Sample(
            index=index, group_index=index, prompt=task.prompt, label=task.label, metadata=dict(task.metadata)
        )
        for index, task in enumerate(islice(load_tasks(tasks), count))
    ]
    rewards = await asyncio.gather(*(_play(args, sample) for sample in samples))
    known = [reward for reward in rewards if reward is not None]
    return Evaluation(len(known), len(rewards) - len(known), fmean(known) if known else None)


async def _play(args: Namespace, sample: Sample) -> float | None:
    generate = load_function(args.custom_generate_function_path)
    # As in slime, a generate function need not know that it is evaluated.
    evaluation = {"evaluation": True} if "evaluation" in inspect.signature(generate).parameters else {}
    state: GenerateState = args.generate_state
    async with state.concurrency:
        played: Sample = await generate(args, sample, sampling_params(args), **evaluation)
    return None if played.remove_sample else await reward_of(args, played)
