"""Gradients of the policy loss under given advantages, as the sum over tokens of advantage x weight x score."""

import torch
from torch import Tensor

from .groups import Groups

# slime's default for truncated importance sampling of the host.
TIS_BOUND = 2.0


def own_ratio_weights(log_ratios: Tensor, *, corrected: bool) -> Tensor:
    """[R, N] What the host weighs tokens with: 1, or with TIS min(ratio, `TIS_BOUND`), from `log_ratios` [R, N]."""
    return log_ratios.exp().clamp(max=TIS_BOUND) if corrected else torch.ones_like(log_ratios)


def policy_gradients(groups: Groups, coefficients: Tensor, policy: Tensor, batches: int) -> Tensor:
    """[batches, N, S, A] By the logits of `policy` [N, S, A], per batch of equally many successive groups.

    `coefficients` [R, N] is advantage x weight of every token, 0 where it is out of the loss. It is the negative
    gradient of the host's loss, summed over tokens, where the loss is at its start: its ratio is 1.
    """
    steps, states, actions = policy.shape
    rollouts = len(coefficients)
    batch = torch.arange(rollouts) // (rollouts // batches)
    token = (batch[:, None] * steps + torch.arange(steps)) * states + groups.states[:, :-1]
    size = batches * steps * states * actions
    taken = torch.zeros(size, dtype=torch.float64)
    taken.index_add_(0, (token * actions + groups.actions).flatten(), coefficients.flatten())
    taken = taken.view(batches, steps, states, actions)
    # The score of an action is its indicator less the policy.
    return taken - policy * taken.sum(-1, keepdim=True)
