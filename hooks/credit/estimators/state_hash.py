"""Compare rollouts whose turns acted in the same environment state, without a fork."""

import torch

from midstream.hooks.credit.batch import Credit, CreditBatch
from midstream.hooks.credit.estimators.anchored import compared_with, fallbacks_of
from midstream.hooks.credit.values import (
    Means,
    of_continuations,
    of_other_continuations,
    of_states,
    of_strangers,
)


def state_hash(batch: CreditBatch) -> Credit:
    """R - mean of the other rollouts of the group that acted in the same state, by content hash, at any turn.

    Where there are none it is the baseline of `anchored`; so is the treatment of what a family has in common. Equal
    states are a step-level group as in GiGPO (Feng et al. 2025, arXiv 2505.10978), here as the baseline alone. The
    transcript that led to a state differs, which makes the baseline worse, and never biased.
    """
    others, strangers = of_other_continuations(batch), of_strangers(batch)
    ahead = of_continuations(batch, batch.ahead)
    otherwise = compared_with(batch, others, strangers)
    segments = batch.rollouts
    baseline = of_states(batch).otherwise(
        Means(
            torch.where(batch.shared, strangers.mean[segments], otherwise.mean[segments]),
            torch.where(batch.shared, strangers.count[segments], otherwise.count[segments]),
        )
    )
    rewards = torch.where(batch.shared, ahead.mean, batch.rewards[segments])
    weights = torch.where(batch.shared, ahead.count, 1)
    usable = baseline.known & batch.counted[segments]
    return Credit(
        torch.where(usable, weights * (rewards - baseline.mean), 0.0),
        torch.ones_like(batch.shared),
        fallbacks_of(batch, others, strangers, otherwise),
    )
