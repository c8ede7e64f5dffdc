"""The expectation of every estimator's gradient, over all outcomes of a group, beside the exact gradient.

Nothing here is sampled: a group of a tiny process has at most some ten thousand outcomes.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass

import pytest
import torch
from benchmarks.stateful_mdp.compositions import (
    ADVANTAGES,
    POOLS_OVER_GROUPS,
    Composition,
    segment_advantages,
    to_tokens,
    token_weights,
)
from benchmarks.stateful_mdp.gradients import own_ratio_weights, policy_gradients
from benchmarks.stateful_mdp.groups import Groups, Layout, credit_batch, log_ratios, play
from benchmarks.stateful_mdp.process import Process, exact_gradient, switched
from torch import Tensor

from midstream.hooks.credit.prior import ENOUGH_GROUPS
from tests.hooks.credit.enumerated import all_groups, tiny_logits, tiny_process

ALONE = Layout(alone=2)
TRIO = Layout(alone=3)
BESIDE = Layout(alone=1, anchors=1, continuations=2)
TWO_ANCHORS = Layout(alone=0, anchors=2, continuations=2)
ONE_ANCHOR = Layout(alone=0, anchors=1, continuations=3)
LAYOUTS = {
    "alone": ALONE, "trio": TRIO, "beside": BESIDE, "two anchors": TWO_ANCHORS, "one anchor": ONE_ANCHOR,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A process, its newest logits, and the policy that plays: another one in turns under `cut` where `lag` > 0."""

    turns: tuple[int, ...] = (0, 1, 2)
    cut: int = 2
    lag: int = 0

    @property
    def process(self) -> Process:
        return tiny_process(turns=self.turns)

    @property
    def logits(self) -> Tensor:
        return tiny_logits(self.process, seed=1)

    @property
    def made(self) -> Tensor:
        now = self.logits.softmax(-1)
        old = tiny_logits(self.process, seed=2).softmax(-1) if self.lag > 0 else now
        return switched(self.process, old, now, self.cut)

    @property
    def exact(self) -> dict[str, Tensor]:
        return self.split(exact_gradient(self.process, self.logits))

    def split(self, gradient: Tensor) -> dict[str, Tensor]:
        step = self.process.first_step(self.cut)
        return {"prefix": gradient[:step], "suffix": gradient[step:]}


FRESH, STALE = Case(), Case(lag=4)


@functools.cache
def outcomes(case: Case, layout: Layout) -> tuple[Groups, Tensor]:
    """All groups, and their chances."""
    groups, chances = all_groups(case.process, case.made, layout, cut=case.cut)
    assert float(chances.sum()) == pytest.approx(1)
    return groups, chances


def expectation(
    case: Case, layout: Layout, composition: Composition, *, tis: bool = False, tis_unbounded: bool = False
) -> dict[str, Tensor]:
    """Of the gradient's parts, over all outcomes of a group, the known scale divided out."""
    process, now = case.process, case.logits.softmax(-1)
    groups, chances = outcomes(case, layout)
    ratios = log_ratios(groups, now, case.made)
    batch = credit_batch(process, groups, cut=case.cut, lag=case.lag)
    advantages = (
        pooled_advantages(composition, case, layout)
        if composition.advantage in POOLS_OVER_GROUPS
        else segment_advantages(composition, batch)
    )
    weights = token_weights(composition, process, batch, ratios)
    of_host = ratios.exp() if tis_unbounded else own_ratio_weights(ratios, corrected=tis)
    coefficients = to_tokens(process, advantages) * weights * of_host
    coefficients *= chances.repeat_interleave(layout.size)[:, None]
    found = policy_gradients(groups, coefficients, now, batches=1)[0]
    return case.split(found / composition.scale(layout))


def pooled_advantages(composition: Composition, case: Case, layout: Layout) -> Tensor:
    """[R x T] With other groups in the batch, the same ones for each outcome: expectations hold whatever they are.

    An outcome matters to advantages by its rewards alone: one with each pattern of rewards stands for all.
    """
    groups, _ = outcomes(case, layout)
    size = layout.size
    pattern = (groups.rewards.view(-1, size).to(torch.int64) * 2 ** torch.arange(size)).sum(-1)
    drawn = torch.Generator().manual_seed(0)
    others = play(case.process, case.made, layout, cut=case.cut, groups=ENOUGH_GROUPS, generator=drawn)
    found = []
    for each in range(2**size):
        own = groups.part(int((pattern == each).nonzero()[0]), 1)
        both = [
            torch.cat([getattr(own, name), getattr(others, name)])
            for name in ("states", "actions", "rewards")
        ]
        batch = credit_batch(case.process, Groups(layout, *both), cut=case.cut, lag=case.lag)
        found.append(segment_advantages(composition, batch)[: size * case.process.turn_count])
    return torch.stack(found)[pattern].flatten()


def off(gradient: Tensor, exact: Tensor) -> float:
    """The relative error."""
    return float((gradient - exact).norm() / exact.norm())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_without_staleness_expectations_are_the_exact_gradient(advantage: str, layout: str):
    own, composition = LAYOUTS[layout], Composition(advantage)
    found, exact = expectation(FRESH, own, composition), FRESH.exact
    assert off(found["suffix"], exact["suffix"]) < 1e-9
    if own == ONE_ANCHOR and advantage in ("anchored", "telescoped", "state_hash"):
        # Nobody in the group could tell what the prefix is worth; other groups are asked by `anchored_shrunk` alone.
        torch.testing.assert_close(found["prefix"], torch.zeros_like(exact["prefix"]))
    elif advantage != "grpo" or own.anchors == 0:
        assert off(found["prefix"], exact["prefix"]) < 1e-9
    else:
        assert off(found["prefix"], exact["prefix"]) > 0.1, (
            "continuations count in their own prefix's baseline"
        )


@pytest.mark.parametrize("tis", [False, True])
@pytest.mark.parametrize("layout", ["trio", "beside", "one anchor"])
@pytest.mark.parametrize(
    "composition",
    [
        *map(Composition, ADVANTAGES),
        Composition("grpo", ("mask_prefix",)),
        Composition("grpo", ("prefix_is",)),
        Composition("anchored_shrunk", ("prefix_is",)),
    ],
    ids=lambda each: each.name,
)
def test_with_staleness_expectations_are_those_that_theory_computes(
    composition: Composition, layout: str, tis: bool
):
    own = LAYOUTS[layout]
    found = expectation(STALE, own, composition, tis=tis)
    theory = STALE.split(
        composition.expectation(STALE.process, STALE.logits, STALE.made, cut=STALE.cut, layout=own, tis=tis)
    )
    computable = composition.computable(own, STALE.lag)
    assert "suffix" in computable
    for part in computable:
        torch.testing.assert_close(found[part], theory[part])


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_with_staleness_prefix_and_suffix_are_biased(advantage: str):
    found = expectation(STALE, TRIO if advantage == "grpo" else BESIDE, Composition(advantage))
    assert off(found["prefix"], STALE.exact["prefix"]) > 0.1
    assert off(found["suffix"], STALE.exact["suffix"]) > 0.05


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_the_product_of_the_whole_prefix_makes_the_suffix_exact(advantage: str):
    layout = TRIO if advantage == "grpo" else BESIDE
    found = expectation(STALE, layout, Composition(advantage, ("prefix_is",)))
    assert off(found["suffix"], STALE.exact["suffix"]) < 1e-9


@pytest.mark.parametrize("turns", [(0, 1, 2), (0, 0, 1)], ids=str)
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_with_a_tokens_own_ratio_it_makes_the_prefix_exact_too(advantage: str, turns: tuple[int, ...]):
    """Whether stale tokens are of one turn or of several."""
    case = Case(turns=turns, cut=turns[2], lag=4)
    layout = TRIO if advantage == "grpo" else BESIDE
    found = expectation(case, layout, Composition(advantage, ("prefix_is",)), tis_unbounded=True)
    plain = expectation(case, layout, Composition(advantage), tis_unbounded=True)
    assert off(plain["prefix"], case.exact["prefix"]) > 0.05
    for part in ("prefix", "suffix"):
        assert off(found[part], case.exact[part]) < 1e-9


def test_a_masked_prefix_teaches_nothing_and_leaves_the_suffix_as_it_is():
    plain, masked = (expectation(STALE, TRIO, Composition("grpo", each)) for each in ((), ("mask_prefix",)))
    torch.testing.assert_close(masked["prefix"], torch.zeros_like(plain["prefix"]))
    torch.testing.assert_close(masked["suffix"], plain["suffix"])


def test_decay_shrinks_a_stale_prefix_and_leaves_the_suffix_as_it_is():
    # No write is known to be old, so that the environment has no lag.
    plain, decayed = (expectation(STALE, TRIO, Composition("grpo", each)) for each in ((), ("lag_decay",)))
    torch.testing.assert_close(decayed["prefix"], plain["prefix"] * math.exp(-0.05 * STALE.lag))
    torch.testing.assert_close(decayed["suffix"], plain["suffix"])


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_a_member_that_failed_changes_no_expectation(advantage: str):
    """One of three, whatever it did: what is left is a group of two. Without anchors no group looks at another."""
    groups, chances = outcomes(FRESH, TRIO)
    batch = credit_batch(FRESH.process, groups, cut=FRESH.cut, lag=0)
    failed = torch.tensor([False, True, False]).repeat(len(chances))
    batch = dataclasses.replace(batch, counted=~failed, rewards=torch.where(failed, 7.0, batch.rewards))
    coefficients = to_tokens(FRESH.process, ADVANTAGES[advantage](batch).advantages)
    coefficients *= chances.repeat_interleave(TRIO.size)[:, None]
    found = policy_gradients(groups, coefficients, FRESH.logits.softmax(-1), batches=1)[0]
    assert (
        off(found / Composition(advantage).scale(ALONE), exact_gradient(FRESH.process, FRESH.logits)) < 1e-9
    )
