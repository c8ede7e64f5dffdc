"""What a host's samples say to a curriculum: of which prompts they are, and what became of a group."""

import math
from argparse import Namespace
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from midstream.buffers.curriculum.book import Cost, digest_of
from midstream.buffers.curriculum.curriculum import Outcome
from midstream.buffers.curriculum.drawing import Prompts
from midstream.buffers.curriculum.early_stop import tokens_saved
from midstream.hooks.slime.sample import RECORD_KEY, Group, samples_of, task_of, was_stopped

MOST_SOURCES = 1_000
_DEFAULT_SOURCE = "default"


def prompts_of(prompts: Any, source_key: str) -> Prompts:
    """The prompts of a host's own data source, in the order that its dataset has now.

    Raises:
        ValueError: it has no dataset whose prompts could be chosen, or too many sources.
    """
    samples: Sequence[Any] | None = getattr(prompts.dataset, "samples", None)
    if samples is None or not hasattr(prompts, "sample_offset"):
        raise ValueError(
            "midstream.curriculum.enabled needs a dataset to choose from, and the host's prompts have none: pass "
            "--prompt-data, without --disable-rollout-global-dataset"
        )
    if not samples:
        raise ValueError(
            "midstream.curriculum.enabled needs prompts, and the dataset is empty: see --prompt-data"
        )
    names: dict[str, int] = {}
    sources = [names.setdefault(_source_of(sample, source_key), len(names)) for sample in samples]
    if len(names) > MOST_SOURCES:
        raise ValueError(
            f"midstream.curriculum.source_key={source_key} names {len(names):,} sources, and each needs metrics and "
            f"groups of its own: use at most {MOST_SOURCES:,}, or a key that prompts share"
        )
    digests = np.fromiter((_digest(sample) for sample in samples), np.uint64, len(samples))
    return Prompts(digests, np.array(sources, np.int32), list(names))


def _source_of(sample: Any, source_key: str) -> str:
    named = (sample.metadata or {}).get(source_key)
    return _DEFAULT_SOURCE if named is None or named == "" else str(named)


def _digest(sample: Any) -> int:
    # A host's functions may change a sample's metadata on the way; the record has the key of the task as it began.
    record = (sample.metadata or {}).get(RECORD_KEY)
    return digest_of(record["prompt_key"] if record else task_of(sample).key)


def _cost(samples: Sequence[Any]) -> Cost:
    records = [record for sample in samples if (record := (sample.metadata or {}).get(RECORD_KEY))]
    if not records:
        return Cost()
    return Cost(
        tokens=fmean(_own_tokens(samples)),
        turns=fmean(len(record["turns"]) for record in records),
        seconds=fmean(sum(turn["seconds"] for turn in record["turns"]) for record in records),
    )


def _own_tokens(samples: Sequence[Any]) -> list[int]:
    """Tokens of the policy in each sample that has a record."""
    records = [(sample.metadata or {}).get(RECORD_KEY) for sample in samples]
    return [sum(end - start for _, start, end in record["spans"]) for record in records if record]


def outcome_of(args: Namespace, group: Group) -> Outcome:
    """What became of a group that has ended; its members that are out of the loss say nothing."""
    members = list(samples_of(group))
    stopped = [sample for sample in members if was_stopped(sample)]
    ended = [sample for sample in members if not sample.remove_sample]
    return Outcome(
        _digest(members[0]),
        rewards_of(args, group),
        _cost(ended),
        tokens_saved(_own_tokens(ended), _own_tokens(stopped)) if stopped else None,
    )


def rewards_of(args: Namespace, group: Group) -> list[float]:
    """Those of the members that are in the loss; the samples of one that was split count once if theirs are equal."""
    rewards: list[float] = []
    for member in group:
        parts = [sample for sample in samples_of([member]) if not sample.remove_sample]
        rewards += dict.fromkeys(reward_of(args, sample) for sample in parts)
    return rewards


def reward_of(args: Namespace, sample: Any) -> float:
    """The reward of a sample, under the host's key.

    Raises:
        ValueError: it is not finite, and the sample is in the loss: it would spoil its whole group.
    """
    reward = float(sample.get_reward_value(args))
    if not math.isfinite(reward) and not sample.remove_sample:
        raise ValueError(
            f"the reward of sample {sample.index} is {reward}: let your reward function return a finite number, or set "
            "the sample's remove_sample"
        )
    return reward
