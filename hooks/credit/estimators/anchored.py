"""Compare the continuations of one state with each other, and its prefix with those who never were there.

Environment transitions cancel in the likelihood ratio, so the return of a continuation that the policy of the day
plays from a state is an unbiased sample of that state's value, whoever led there. A baseline costs or spares
variance, never bias, as long as the action that it is for had no part in it.

All give a prefix that K continuations have in common, and that is in the loss of one of them, the sum of what each
would give it: K times its mean. So prefix and suffixes weigh what they weigh in the gradient of the expected reward.
Where a rollout lacks what it would be compared with, it teaches nothing, as a group of one under GRPO.
"""

import torch
from torch import Tensor

from midstream.hooks.credit.batch import NONE, Credit, CreditBatch
from midstream.hooks.credit.values import (
    Means,
    of_continuations,
    of_other_continuations,
    of_siblings,
    of_strangers,
)

# Less than any count; and of the sum of squared rewards a share that rounding may leave where none differs.
_NOTHING = 1e-12
_ROUNDING = 1e-24


def anchored(batch: CreditBatch) -> Credit:
    """After an anchor: R - mean of the other continuations. Before it: K (V_anchor - V_prompt).

    V_anchor is the mean of the K continuations, V_prompt that of the rollouts of the group outside the family. A
    rollout without a family: R - mean of its siblings. A continuation that is alone is compared with V_prompt.
    Related: VinePPO (Kazemnejad et al. 2024, arXiv 2410.01679), Tree-GRPO (arXiv 2509.21240).
    """
    return _credit(batch, of_other_continuations(batch))


def anchored_shrunk(batch: CreditBatch) -> Credit:
    """As `anchored`, with the baseline of a suffix l V_others + (1 - l) V_prompt, l = t2 / (t2 + s2 / (K - 1)).

    That is the mean of least squared error of two estimates of the state's value (James and Stein 1961): s2 is the
    variance of rewards within a state, t2 the mean squared distance of V_prompt from the states' values, both pooled
    over the other groups of the batch, so that no action has a part in its own l. Without other groups l is 1.
    """
    others, prompt = of_other_continuations(batch), of_strangers(batch)
    share = torch.where(prompt.known, _share_of_state(batch, prompt), 1.0)
    mean = share * others.mean + (1 - share) * prompt.mean
    return _credit(batch, Means(torch.where(others.known, mean, 0.0), others.count))


def telescoped(batch: CreditBatch) -> Credit:
    """Before an anchor: V_anchor - V_prompt. After it: R - mean of the other continuations.

    The rollout that made the prefix is trained; the other continuations are probes of the anchor's value, as in
    VinePPO, and out of the loss. The two parts add up to R - V_prompt, but for their own share of V_anchor.
    """
    is_probe = torch.zeros(len(batch.rewards), dtype=torch.bool)
    is_probe[batch.rollouts[batch.inherited]] = True
    credit = _credit(batch, of_other_continuations(batch), weighs_by_continuations=False)
    return Credit(credit.advantages, ~is_probe[batch.rollouts], credit.fallbacks)


def _credit(batch: CreditBatch, others: Means, *, weighs_by_continuations: bool = True) -> Credit:
    """`others` [R] is what a continuation is compared with."""
    baseline = compared_with(batch, others)
    prompt, anchor = of_strangers(batch), of_continuations(batch)
    after = torch.where(baseline.known, batch.rewards - baseline.mean, 0.0)
    before = torch.where(prompt.known & anchor.known, anchor.mean - prompt.mean, 0.0)
    if weighs_by_continuations:
        before = before * anchor.count
    advantages = torch.where(batch.shared, before[batch.rollouts], after[batch.rollouts])
    return Credit(
        torch.where(batch.counted[batch.rollouts], advantages, 0.0),
        torch.ones(len(batch.rollouts), dtype=torch.bool),
        fallbacks_of(batch, others, prompt, baseline),
    )


def compared_with(batch: CreditBatch, others: Means) -> Means:
    """[R] The baseline after an anchor: `others`, or V_prompt; without a family the siblings."""
    alone, siblings = batch.families == NONE, of_siblings(batch)
    return Means(
        torch.where(alone, siblings.mean, others.mean), torch.where(alone, siblings.count, others.count)
    ).otherwise(of_strangers(batch))


def fallbacks_of(batch: CreditBatch, others: Means, prompt: Means, baseline: Means) -> dict[str, int]:
    """How many counted rollouts lack what, each [R]."""
    in_family = batch.counted & (batch.families != NONE)
    return {
        "without_continuations": int((in_family & ~others.known).sum()),
        "without_strangers": int((in_family & ~prompt.known).sum()),
        "without_baseline": int((batch.counted & ~baseline.known).sum()),
    }


def _share_of_state(batch: CreditBatch, prompt: Means) -> Tensor:
    """[R] The share l of the other continuations in a baseline, as `anchored_shrunk` says."""
    anchor, others = of_continuations(batch), of_other_continuations(batch)
    usable = batch.counted & others.known
    compared = usable & prompt.known
    # Every rollout brings its part of its anchor's sums.
    size = anchor.count.clamp(min=1).to(torch.float64)
    squares = _of_other_groups(batch, usable, (batch.rewards - anchor.mean) ** 2)
    freedoms = _of_other_groups(batch, usable, (size - 1) / size)
    within = squares / freedoms.clamp(min=_NOTHING)
    gaps = _of_other_groups(batch, compared, (anchor.mean - prompt.mean) ** 2 / size)
    noise = within * _of_other_groups(batch, compared, size**-2)
    anchors = _of_other_groups(batch, compared, 1 / size)
    between = ((gaps - noise) / anchors.clamp(min=_NOTHING)).clamp(min=0)
    error = within / others.count.clamp(min=1)
    # Where no reward differed from another, there is nothing to learn l from.
    nothing = _ROUNDING * _of_other_groups(batch, batch.counted, batch.rewards**2)
    known = (anchors > _NOTHING) & (between + error > nothing)
    return torch.where(known, between / torch.where(known, between + error, 1.0), 1.0)


def _of_other_groups(batch: CreditBatch, which: Tensor, values: Tensor) -> Tensor:
    """[R] The sum of `values` [R] over `which` [R] of all groups but a rollout's own.

    The groups before it and those after it: a difference of sums would keep what rounding leaves of its own.
    """
    _, group = torch.unique(batch.groups, return_inverse=True)
    of_group = torch.zeros(len(values), dtype=torch.float64)
    of_group.index_add_(0, group, torch.where(which, values, 0.0))
    before = torch.zeros(len(values), dtype=torch.float64)
    after = torch.zeros(len(values), dtype=torch.float64)
    before[1:] = of_group.cumsum(0)[:-1]
    after[:-1] = of_group.flip(0).cumsum(0).flip(0)[1:]
    return (before + after)[group]
