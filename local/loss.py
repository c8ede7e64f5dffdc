"""Token log-probabilities and the clipped policy-gradient loss, as pure functions on tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor


def next_token_log_probs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each token given those before it.

    logits [B, S, V], tokens [B, S]; returns [B, S - 1], whose entry t belongs to token t + 1. Logits are
    divided by `temperature`, as the sampler does.
    """
    log_probs = torch.log_softmax(logits[:, :-1] / temperature, dim=-1)
    return log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1)


@dataclass(frozen=True)
class ClippedLoss:
    """Sums over the action tokens of a batch; only `loss` carries a gradient."""

    loss: Tensor  # scalar
    clipped_tokens: Tensor  # tokens whose gradient the clip cut to zero
    ratio_deviation: Tensor  # sum of |ratio - 1|


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_low: float,
    eps_high: float,
) -> ClippedLoss:
    """PPO's clipped surrogate (Schulman et al. 2017) with the asymmetric range of DAPO (Yu et al. 2025).

    Per token, with ratio = exp(log_prob - old_log_prob):
    -min(ratio * advantage, clip(ratio, 1 - eps_low, 1 + eps_high) * advantage).
    All tensors have one shape; `mask` is 1 on action tokens and 0 elsewhere.
    """
    ratio = torch.where(mask > 0, log_probs - old_log_probs, 0.0).exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages
    return ClippedLoss(
        loss=(torch.maximum(unclipped, clipped) * mask).sum(),
        clipped_tokens=((clipped > unclipped) * mask).sum(),
        ratio_deviation=((ratio.detach() - 1.0).abs() * mask).sum(),
    )
