"""Weigh what a stale prefix is part of by how likely the policy of the day would have played it."""

from torch import Tensor


def prefix_is(log_ratios: Tensor, totals: Tensor, bound: float) -> Tensor:
    """[T] min(``bound``, product of the ratios of all other tokens of the rollout), as V-trace truncates
    (Espeholt et al. 2018, arXiv 1802.01561).

    ``log_ratios`` [T] are of each token, as above; 0 for those that the policy that is trained made itself.
    ``totals`` [T] is their sum over the token's rollout. A token's own ratio is left to the host's correction. What
    precedes a token says how likely the policy would have come there; what follows it, how likely the policy would have
    earned the reward from there. After the last stale token this is the ratio of the whole prefix. Without a bound,
    and with the token's own ratio, the expectation of reward x score is that of the policy that is trained.
    """
    return (totals - log_ratios).exp().clamp(max=bound)
