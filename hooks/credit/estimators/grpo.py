"""The host's own: every token of a rollout gets what its reward is above the mean of its group."""

import torch

from midstream.hooks.credit.batch import Credit, CreditBatch

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
    rewards, counted = batch.rewards, batch.counted
    _, group = torch.unique(batch.groups, return_inverse=True)
    size = int(group.max()) + 1 if len(group) else 0

    def of_group(values: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(size, dtype=torch.float64)
        return sums.index_add_(0, group, torch.where(counted, values, 0.0))[group]

    count = of_group(torch.ones_like(rewards))
    above = rewards - of_group(rewards) / count.clamp(min=1)
    if normalise:
        deviation = (of_group(above**2) / (count - 1).clamp(min=1)).sqrt()
        above = torch.where(count > 1, above / (deviation + EPSILON), above)
    return torch.where(counted, above, 0.0)
