"""The host's own: every token of a rollout gets what its reward is above the mean of its group."""

import torch

from midstream.hooks.credit.batch import Credit, CreditBatch
from midstream.hooks.credit.values import of_groups, sums_by_group

# slime's own guard of its group normalisation against a group without variance.
EPSILON = 1e-6


def grpo(batch: CreditBatch, *, normalise: bool = False) -> Credit:
    """R - mean of the group, over all tokens (Shao et al. 2024, arXiv 2402.03300).

    The mean is over the counted rollouts of the group, its own among them, which makes the gradient smaller by
    1 - 1/n. ``normalise`` divides by the group's standard deviation (with n - 1) plus 1e-6; a group of one is not
    divided. What is not counted gets 0.
    """
    return Credit(
        group_advantages(batch, normalise=normalise)[batch.rollouts],
        torch.ones(len(batch.rollouts), dtype=torch.bool),
    )


def group_advantages(batch: CreditBatch, *, normalise: bool) -> torch.Tensor:
    """[R] The same of each rollout."""
    group = of_groups(batch)
    above = torch.where(batch.counted, batch.rewards - group.mean, 0.0)
    if normalise:
        _, index = torch.unique(batch.groups, return_inverse=True)
        squares = sums_by_group(batch, above**2)[index]
        deviation = (squares / (group.count - 1).clamp(min=1)).sqrt()
        above = torch.where(group.count > 1, above / (deviation + EPSILON), above)
    return above
