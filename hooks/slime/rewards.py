"""``--custom-reward-post-process-path midstream.hooks.slime.rewards.post_process``"""

from argparse import Namespace
from collections import defaultdict
from statistics import fmean, stdev
from typing import Any

# slime's own guard of its group normalisation against a group without variance.
_EPSILON = 1e-6


def post_process(args: Namespace, samples: list[Any]) -> tuple[list[float], list[float]]:
    """Subtract each group's mean, and divide by its deviation if ``args.grpo_std_normalization``.

    The formula is slime's own (deviation with n - 1). Groups are the real ones, by ``group_index``: a
    batch may hold groups of several sizes. A sample that is out of the loss enters no mean and gets 0.

    Returns:
        ``(raw_rewards, rewards)``, each of length ``len(samples)``.
    """
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    groups: dict[Any, list[int]] = defaultdict(list)
    for position, sample in enumerate(samples):
        if not sample.remove_sample:
            groups[sample.group_index].append(position)
    rewards = [0.0] * len(samples)
    for positions in groups.values():
        values = [raw[position] for position in positions]
        mean = fmean(values)
        normalises = getattr(args, "grpo_std_normalization", True) and len(values) > 1
        scale = stdev(values) + _EPSILON if normalises else 1.0
        for position in positions:
            rewards[position] = (raw[position] - mean) / scale
    return raw, rewards
