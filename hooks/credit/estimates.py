"""From the names in the configuration to what every segment of a batch gets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.conf.schema.credit import CreditConfig
from midstream.hooks.credit.batch import Credit, CreditBatch
from midstream.hooks.credit.estimators.anchored import anchored, anchored_shrunk, telescoped
from midstream.hooks.credit.estimators.grpo import EPSILON, group_advantages
from midstream.hooks.credit.estimators.lag_decay import lag_decay
from midstream.hooks.credit.estimators.mask_prefix import mask_prefix
from midstream.hooks.credit.estimators.state_hash import state_hash
from midstream.hooks.credit.values import sums_by_group

ADVANTAGES: Mapping[str, Callable[[CreditBatch], Credit]] = {
    "telescoped": telescoped,
    "anchored": anchored,
    "anchored_shrunk": anchored_shrunk,
    "state_hash": state_hash,
}
"""The estimators that set the advantages, but for `grpo`, which leaves them to the host."""

FALLBACKS = ("without_continuations", "without_strangers", "without_baseline")
"""What a rollout may lack to be compared with: the keys of `fallbacks`."""


@dataclass(frozen=True)
class Estimates:
    """What becomes of a batch.

    Attributes:
        group: [R] what the group normalisation makes of each reward, which hosts spread over the tokens.
        advantages: [S] in its place, None where it stays.
        weights: [S] what advantages are multiplied with, None where by nothing.
        trained: [S] bool, False where tokens are taken out of the loss.
        fallbacks: as in `Credit`.
    """

    group: Tensor
    advantages: Tensor | None
    weights: Tensor | None
    trained: Tensor
    fallbacks: Mapping[str, int]


def estimates_of(batch: CreditBatch, config: CreditConfig, *, normalise: bool) -> Estimates:
    """What the estimators of the configuration say, but for `prefix_is`, which only a trainer can measure.

    `normalise` divides advantages by a standard deviation of rewards: those of `grpo` by their group's, as hosts do;
    all others by one for the batch, pooled over the groups whose rewards differ, so that groups keep their weights.
    """
    advantages: Tensor | None = None
    weights: Tensor | None = None
    fallbacks: Mapping[str, int] = {}
    trained = torch.ones(len(batch.rollouts), dtype=torch.bool)
    estimator = ADVANTAGES.get(config.advantage or "")
    if estimator is not None:
        credit = estimator(batch)
        advantages, trained, fallbacks = credit.advantages, credit.trained, credit.fallbacks
        if normalise:
            advantages = advantages / (_pooled_deviation(batch) + EPSILON)
    if "mask_prefix" in config.estimators:
        trained = trained & mask_prefix(batch)
    if "lag_decay" in config.estimators:
        rates = config.lag_decay
        levels = torch.tensor([rates.trajectory, rates.token, rates.environment], dtype=torch.float64)
        weights = lag_decay(batch, levels)
    return Estimates(group_advantages(batch, normalise=normalise), advantages, weights, trained, fallbacks)


def _pooled_deviation(batch: CreditBatch) -> Tensor:
    """Standard deviation of counted rewards within the groups whose rewards differ, with n - 1 for each.

    The others have no part in it: the fewer groups inform, the larger the advantages of those that do would become. 1
    where there is none.
    """
    above = group_advantages(batch, normalise=False)
    squares, counts = sums_by_group(batch, above**2), sums_by_group(batch, batch.counted.double())
    differ = squares > EPSILON**2
    deviation = (squares[differ].sum() / (counts[differ] - 1).sum().clamp(min=1)).sqrt()
    return torch.where(deviation > 0, deviation, 1.0)
