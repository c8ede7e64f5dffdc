"""What the other groups of a batch say about the value of a prompt, and about how far states are from it.

Nothing of a rollout's own group is learnt from, but for the mean of its strangers: no action has a part in the
baseline that is made of it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.hooks.credit.batch import NONE, CreditBatch
from midstream.hooks.credit.values import (
    Means,
    of_continuations,
    of_other_continuations,
    of_strangers,
    sums_by_group,
)

# A line through fewer groups than that says less about a prompt than its own strangers.
ENOUGH_GROUPS = 8
# Less than any count; and of a mean of squares the share that rounding may leave where nothing differs.
_NOTHING = 1e-12
# The same where the squares are of differences that were taken first.
_ROUNDING = 1e-24


@dataclass(frozen=True)
class Prior:
    """[R] The value of the prompt; and of the anchors of other groups that it is learnt from, the mean squared distance
    of their means from it, and the mean of one over their size, which the noise in that distance grows with.
    """

    prompt: Means
    gap: Tensor
    inverse_size: Tensor


def prior_of(batch: CreditBatch) -> Prior:
    """The prompt's value is intercept + slope x, of the mean x of the strangers.

    The line is that of least squares through the means y of anchors in the other groups, with a slope from 0 to 1;
    where there are fewer than `ENOUGH_GROUPS` of those, it is x itself. Without strangers it is the mean y elsewhere.
    """
    strangers, anchor = of_strangers(batch), of_continuations(batch, batch.anchors)
    continued = batch.counted & (batch.families != NONE)
    compared = continued & strangers.known
    x, y = strangers.mean, anchor.mean

    def elsewhere(values: Tensor) -> Tensor:
        with_strangers, all_ = (_mean(batch, which, values) for which in (compared, continued))
        return torch.where(strangers.known, with_strangers, all_)

    mean_x, mean_y, xx, xy, yy = map(elsewhere, (x, y, x * x, x * y, y * y))
    groups = torch.where(strangers.known, _groups(batch, compared), _groups(batch, continued))
    variance = xx - mean_x**2
    differs = variance > _NOTHING * xx
    fitted = torch.where(differs, (xy - mean_x * mean_y) / torch.where(differs, variance, 1.0), 0.0)
    is_enough = groups >= ENOUGH_GROUPS
    slope = torch.where(is_enough, torch.where(strangers.known, fitted.clamp(0, 1), 0.0), 1.0)
    intercept = torch.where(is_enough, mean_y - slope * mean_x, 0.0)
    known = strangers.known | is_enough
    squares = yy - 2 * (intercept * mean_y + slope * xy) + slope**2 * xx
    return Prior(
        Means(torch.where(known, intercept + slope * x, 0.0), known.to(torch.int64)),
        squares + intercept**2 + 2 * intercept * slope * mean_x,
        elsewhere(1 / anchor.count.clamp(min=1).to(torch.float64)),
    )


def share_of_state(batch: CreditBatch, prior: Prior) -> Tensor:
    """[R] The share of the other continuations in a baseline: l of `anchored_shrunk`."""
    anchor, others = of_continuations(batch, batch.anchors), of_other_continuations(batch)
    usable = batch.counted & others.known
    # Every rollout brings its part of its anchor's sums.
    size = anchor.count.clamp(min=1).to(torch.float64)
    squares = _sum(batch, usable, (batch.rewards - anchor.mean) ** 2)
    freedoms = _sum(batch, usable, (size - 1) / size)
    within = squares / freedoms.clamp(min=_NOTHING)
    between = (prior.gap - within * prior.inverse_size).clamp(min=0)
    error = within / others.count.clamp(min=1)
    # Where no reward differed from another, there is nothing to learn from.
    nothing = _ROUNDING * _sum(batch, batch.counted, batch.rewards**2)
    known = (freedoms > _NOTHING) & (between + error > nothing)
    return torch.where(known, between / torch.where(known, between + error, 1.0), 1.0)


def _sum(batch: CreditBatch, which: Tensor, values: Tensor) -> Tensor:
    """[R] Of `values` [R] over `which` [R] of all groups but a rollout's own.

    The groups before it and those after it: a difference of sums would keep what rounding leaves of its own.
    """
    of_group = sums_by_group(batch, torch.where(which, values, 0.0))
    before, after = torch.zeros_like(of_group), torch.zeros_like(of_group)
    before[1:] = of_group.cumsum(0)[:-1]
    after[:-1] = of_group.flip(0).cumsum(0).flip(0)[1:]
    _, group = torch.unique(batch.groups, return_inverse=True)
    return (before + after)[group]


def _mean(batch: CreditBatch, which: Tensor, values: Tensor) -> Tensor:
    """[R] As `_sum`; 0 over none."""
    return _sum(batch, which, values) / _sum(batch, which, torch.ones_like(values)).clamp(min=1)


def _groups(batch: CreditBatch, which: Tensor) -> Tensor:
    """[R] The number of other groups that have some of `which` [R]."""
    has = sums_by_group(batch, which.to(torch.float64)) > 0
    _, group = torch.unique(batch.groups, return_inverse=True)
    return (has.sum() - has.to(torch.int64))[group]
