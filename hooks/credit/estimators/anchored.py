"""Compare the continuations of one state with each other, and its prefix with those who never were there.

Environment transitions cancel in the likelihood ratio, so the return of a continuation that the policy of the day
plays from a state is an unbiased sample of that state's value, whoever led there. A baseline costs or spares
variance, never bias, as long as the action that it is for had no part in it.

All give a prefix that K continuations have in common, and that is in the loss of one of them, the sum of what each
would give it: K times its mean. Where a family was forked more than once, each part of the prefix has as many
continuations as went on from the anchor after it. So prefix and suffixes weigh what they weigh in the gradient of the
expected reward. Where a rollout lacks what it would be compared with, it teaches nothing, as a group of one under GRPO.
"""

import torch

from midstream.hooks.credit.batch import NONE, Credit, CreditBatch
from midstream.hooks.credit.prior import prior_of, share_of_state
from midstream.hooks.credit.values import (
    Means,
    of_continuations,
    of_other_continuations,
    of_siblings,
    of_strangers,
)


def anchored(batch: CreditBatch) -> Credit:
    """After an anchor: R - mean of the other continuations. Before it: K (V_anchor - V_prompt).

    V_anchor is the mean of the K continuations, V_prompt that of the rollouts of the group outside the family. A
    rollout without a family: R - mean of its siblings. A continuation that is alone is compared with V_prompt.
    Related: VinePPO (Kazemnejad et al. 2024, arXiv 2410.01679), Tree-GRPO (arXiv 2509.21240).
    """
    return _credit(batch, of_other_continuations(batch), of_strangers(batch))


def anchored_shrunk(batch: CreditBatch) -> Credit:
    """As `anchored`, with the baseline of a suffix l V_others + (1 - l) V_prompt, l = t2 / (t2 + s2 / (K - 1)).

    That is the mean of least squared error of two estimates of the state's value (James and Stein 1961): s2 is the
    variance of rewards within a state, t2 the mean squared distance of V_prompt from the states' values.

    V_prompt, before an anchor too, is what the other groups make of the mean of the strangers: the line that comes
    nearest to the values of anchors there, with a slope from 0 to 1. A few strangers say little where prompts are
    alike, and K times their error is in the prefix. Without strangers it is the mean of the other groups.

    All of that is learnt from the other groups of the batch, so that no action has a part in its own baseline. With
    fewer than 8 of them V_prompt is the mean of the strangers; without any, l is 1.
    """
    others, prior = of_other_continuations(batch), prior_of(batch)
    share = torch.where(prior.prompt.known, share_of_state(batch, prior), 1.0)
    mean = share * others.mean + (1 - share) * prior.prompt.mean
    return _credit(batch, Means(torch.where(others.known, mean, 0.0), others.count), prior.prompt)


def telescoped(batch: CreditBatch) -> Credit:
    """Before an anchor: V_anchor - V_prompt. After it: R - mean of the other continuations.

    The rollout that made the prefix is trained; the other continuations are probes of the anchor's value, as in
    VinePPO, and out of the loss. The two parts add up to R - V_prompt, but for their own share of V_anchor.
    """
    is_probe = torch.zeros(len(batch.rewards), dtype=torch.bool)
    is_probe[batch.rollouts[batch.inherited]] = True
    others, prompt = of_other_continuations(batch), of_strangers(batch)
    credit = _credit(batch, others, prompt, weighs_by_continuations=False)
    return Credit(credit.advantages, ~is_probe[batch.rollouts], credit.fallbacks)


def _credit(
    batch: CreditBatch, others: Means, prompt: Means, *, weighs_by_continuations: bool = True
) -> Credit:
    """`others` [R] is what a continuation is compared with, `prompt` [R] what its prefix is."""
    baseline, ahead = compared_with(batch, others, prompt), of_continuations(batch, batch.ahead)
    after = torch.where(baseline.known, batch.rewards - baseline.mean, 0.0)[batch.rollouts]
    known = prompt.known[batch.rollouts] & ahead.known
    before = torch.where(known, ahead.mean - prompt.mean[batch.rollouts], 0.0)
    if weighs_by_continuations:
        before = before * ahead.count
    advantages = torch.where(batch.shared, before, after)
    return Credit(
        torch.where(batch.counted[batch.rollouts], advantages, 0.0),
        torch.ones(len(batch.rollouts), dtype=torch.bool),
        fallbacks_of(batch, others, of_strangers(batch), baseline),
    )


def compared_with(batch: CreditBatch, others: Means, prompt: Means) -> Means:
    """[R] The baseline after an anchor: `others`, or else `prompt`; without a family the siblings. All are [R]."""
    alone, siblings = batch.families == NONE, of_siblings(batch)
    return Means(
        torch.where(alone, siblings.mean, others.mean), torch.where(alone, siblings.count, others.count)
    ).otherwise(prompt)


def fallbacks_of(batch: CreditBatch, others: Means, prompt: Means, baseline: Means) -> dict[str, int]:
    """How many counted rollouts lack what, each [R]."""
    in_family = batch.counted & (batch.families != NONE)
    return {
        "without_continuations": int((in_family & ~others.known).sum()),
        "without_strangers": int((in_family & ~prompt.known).sum()),
        "without_baseline": int((batch.counted & ~baseline.known).sum()),
    }
