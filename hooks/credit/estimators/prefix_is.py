"""Weigh what follows a stale prefix by how likely the policy of the day would have come there."""

import torch
from torch import Tensor


def prefix_products(log_ratios: Tensor, rollouts: Tensor) -> Tensor:
    """[S] The sum of the log-ratios of all earlier segments of the same rollout.

    ``log_ratios`` [S] is the sum over a segment's own model tokens of log-prob under the policy that is trained,
    minus the log-prob recorded when the token was made; ``rollouts`` [S] is ascending. Transitions of the
    environment cancel in the ratio of two policies, so the exponential of this sum is the ratio of the two
    policies' distributions of what precedes the segment: transcript and environment state together.
    """
    before = torch.cumsum(log_ratios, dim=0) - log_ratios
    is_first = torch.ones_like(rollouts, dtype=torch.bool)
    is_first[1:] = rollouts[1:] != rollouts[:-1]
    at_start = before[is_first]
    return before - at_start[torch.cumsum(is_first, dim=0) - 1]


def prefix_is(log_ratios: Tensor, rollouts: Tensor, bound: float) -> Tensor:
    """[S] min(``bound``, product of the ratios of all that precedes the segment), as V-trace truncates
    (Espeholt et al. 2018, arXiv 1802.01561).

    A token's own ratio is left to the host's correction. Without a bound the expectation is exact, and the variance
    grows with the length of what is stale. Shapes as in `prefix_products`.
    """
    return prefix_products(log_ratios, rollouts).exp().clamp(max=bound)
