"""What members of groups whose rewards are all equal get, which a group's normalisation gives nothing."""

import torch
from torch import Tensor

from midstream.hooks.credit.batch import CreditBatch


def equal_groups(batch: CreditBatch, *, weight: float, threshold: float, spread: float) -> Tensor:
    """[R] `weight` for a success in a group of equal rewards, its negative for a failure there, and 0 for all others.

    Rewards no further apart than `spread` are equal, those above `threshold` successes. What is out of the loss has
    no part in it. Without a baseline such an advantage is biased: it strengthens whatever the policy did. In the
    spirit of RL-ZVP (arXiv 2509.21880), which scales it by the entropy of each token.
    """
    _, groups = torch.unique(batch.groups, return_inverse=True)
    is_equal = (_of_groups(batch, groups, "amax") - _of_groups(batch, groups, "amin") <= spread)[groups]
    sign = torch.where(batch.rewards > threshold, 1.0, -1.0).to(torch.float64)
    return torch.where(is_equal & batch.counted, weight * sign, 0.0)


def _of_groups(batch: CreditBatch, groups: Tensor, reduce: str) -> Tensor:
    values = batch.rewards.new_zeros(len(groups))
    counted = batch.counted
    return values.scatter_reduce(0, groups[counted], batch.rewards[counted], reduce, include_self=False)
