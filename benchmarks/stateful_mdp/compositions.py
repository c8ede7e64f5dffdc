"""What sets the advantage and what weighs it, composed as a job's configuration composes them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.hooks.credit import estimates
from midstream.hooks.credit.batch import Credit, CreditBatch
from midstream.hooks.credit.estimators.grpo import grpo
from midstream.hooks.credit.estimators.lag_decay import lag_decay
from midstream.hooks.credit.estimators.mask_prefix import mask_prefix
from midstream.hooks.credit.estimators.prefix_is import prefix_is

from .gradients import TIS_BOUND
from .groups import Groups, Layout, credit_batch
from .process import Process, expected_gradient

ADVANTAGES: dict[str, Callable[[CreditBatch], Credit]] = {"grpo": grpo, **estimates.ADVANTAGES}
# Its baselines are weighed by what the other groups of the batch show; the others look at a group alone.
POOLS_OVER_GROUPS = frozenset({"anchored_shrunk"})

# Per policy version, of trajectory, token and environment: halves what is 14 versions old, by each of the two.
DECAY_RATES = torch.tensor([0.0, 0.05, 0.05], dtype=torch.float64)

OF_SEGMENTS: dict[str, Callable[[CreditBatch], Tensor]] = {
    "mask_prefix": lambda batch: mask_prefix(batch).to(torch.float64),
    "lag_decay": lambda batch: lag_decay(batch, DECAY_RATES),
}
PREFIX_IS_BOUNDS = {"prefix_is 2": 2.0, "prefix_is": torch.inf}


@dataclass(frozen=True)
class Composition:
    """The name in `ADVANTAGES` of what sets the advantage, and those of what weighs it, in the two below."""

    advantage: str
    weights: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return ", ".join((self.advantage, *self.weights))

    def scale(self, layout: Layout) -> float:
        """What is known to stand before the gradient of a group, beside that its loss is summed over its rollouts.

        A mean that holds the rollout itself takes 1/n of it, and probes are in no loss.
        """
        if self.advantage == "grpo":
            return float(layout.size - 1)
        if self.advantage == "telescoped":
            return float(layout.alone + layout.anchors)
        return float(layout.size)

    def computable(self, layout: Layout, lag: int) -> frozenset[str]:
        """The parts of the gradient, `prefix` and `suffix`, for which `expectation` holds.

        For the others it depends on the whole of a rollout (weights with a bound or of an environment's lag), on a
        baseline that is not the prompt's mean reward, where the score of stale tokens is not 0 on average, or on
        continuations that are compared with the prefix that they share (GRPO).
        """
        if lag > 0 and not {"lag_decay", "prefix_is 2"}.isdisjoint(self.weights):
            return frozenset()
        compares_with_itself = self.advantage == "grpo" and layout.anchors > 0
        if compares_with_itself or (lag > 0 and self.advantage in ("state_hash", "anchored_shrunk")):
            return frozenset({"suffix"})
        return frozenset({"prefix", "suffix"})

    def expectation(
        self, process: Process, logits: Tensor, made: Tensor, *, cut: int, layout: Layout, tis: bool
    ) -> Tensor:
        """[N, S, A] Of its gradient by `logits`, `scale` divided out, for rollouts that `made` plays.

        All baselines are means over rollouts that the action had no part in, so that they make no difference to it.
        """
        now = logits.softmax(-1)
        found = expected_gradient(
            process,
            logits,
            made,
            others_corrected="prefix_is" in self.weights,
            weights=(now / made).clamp(max=TIS_BOUND) if tis else torch.ones_like(made),
        )
        has_no_strangers = layout.alone == 0 and layout.anchors == 1
        asks_strangers = self.advantage not in POOLS_OVER_GROUPS
        if "mask_prefix" in self.weights or (has_no_strangers and asks_strangers):
            found[: process.first_step(cut)] = 0.0
        return found


def segment_advantages(composition: Composition, batch: CreditBatch) -> Tensor:
    """[S] Advantages, 0 where the segment is out of the loss."""
    credit = ADVANTAGES[composition.advantage](batch)
    return torch.where(credit.trained & ~batch.inherited, credit.advantages, 0.0)


def token_weights(
    composition: Composition, process: Process, batch: CreditBatch, log_ratios: Tensor
) -> Tensor:
    """[R, N] The product of its weights, from the log-ratios [R, N] of tokens."""
    found = torch.ones_like(log_ratios)
    for name in composition.weights:
        if name in OF_SEGMENTS:
            found = found * to_tokens(process, OF_SEGMENTS[name](batch))
        else:
            found = found * prefix_is(log_ratios, log_ratios.sum(1, keepdim=True), PREFIX_IS_BOUNDS[name])
    return found


def to_tokens(process: Process, of_segments: Tensor) -> Tensor:
    """[R, N] of values [R x T] of turns."""
    return of_segments.view(-1, process.turn_count)[:, process.turns]


def advantages_by_batch(
    composition: Composition, process: Process, groups: Groups, *, cut: int, lag: int, batch_groups: int
) -> Tensor:
    """[R x T] As `segment_advantages`, of batches of so many groups where they matter to it."""
    count = len(groups.rewards) // groups.layout.size
    size = batch_groups if composition.advantage in POOLS_OVER_GROUPS else count
    parts = [groups.part(first, size) for first in range(0, count, size)]
    return torch.cat(
        [segment_advantages(composition, credit_batch(process, part, cut=cut, lag=lag)) for part in parts]
    )
