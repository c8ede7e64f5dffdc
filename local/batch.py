"""From finished samples to what the trainer takes, under slime's keys."""

from argparse import Namespace
from collections.abc import Sequence
from statistics import fmean

import torch

from midstream.buffers.rollout import PartialRollout
from midstream.hooks.slime.credit_flags import NOTE_KEY
from midstream.hooks.slime.host import load_function
from midstream.hooks.slime.rewards import post_process
from midstream.local.sample import Sample
from midstream.local.trainer import RolloutData


def convert(args: Namespace, samples: Sequence[Sample]) -> RolloutData:
    """Return the rollout data of a batch: one entry per sample under each key.

    Rewards go through ``--custom-reward-post-process-path``, by default the group normalisation. The
    mask of a sample that is out of the loss is zero.
    """
    path = args.custom_reward_post_process_path
    raw_rewards, rewards = (post_process if path is None else load_function(path))(args, list(samples))
    notes = {}
    if NOTE_KEY in samples[0].metadata:
        notes = {NOTE_KEY: [sample.metadata[NOTE_KEY] for sample in samples]}
    return notes | {
        "tokens": [sample.tokens for sample in samples],
        "total_lengths": [len(sample.tokens) for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "loss_masks": [_loss_mask(sample) for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs or [] for sample in samples],
        "rewards": rewards,
        "raw_reward": raw_rewards,
        "truncated": [int(sample.status is Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
    }


def logged(data: RolloutData) -> dict[str, float]:
    """What hooks have added to the rollout data for the host to log: the mean over samples, as slime does it."""
    return {name: fmean(values) for name, values in data.items() if "/" in name}


def fresh_gap(
    rollouts: Sequence[PartialRollout], log_probs: Sequence[torch.Tensor], version: int
) -> float | None:
    """Largest |trainer - engine| log-prob in nats over the tokens that ``version`` made.

    ``log_probs`` are the trainer's under the weights of ``version``, one tensor ``[response_len]`` per
    rollout. None where the batch has no fresh token.
    """
    gaps = [
        (log_probs[i][span.start : span.end] - torch.tensor(rollout.log_probs[span.start : span.end]))
        .abs()
        .max()
        for i, rollout in enumerate(rollouts)
        for span in rollout.spans
        if span.version == version
    ]
    return float(torch.stack(gaps).max()) if gaps else None


def _loss_mask(sample: Sample) -> list[int]:
    if sample.remove_sample or sample.loss_mask is None:
        return [0 if sample.remove_sample else 1] * sample.response_length
    return sample.loss_mask
