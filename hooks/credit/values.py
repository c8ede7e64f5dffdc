"""Values of prompts and of states, estimated by the mean rewards of rollouts that came from there.

An estimate serves as the baseline of an action only where the action had no part in it: each function says which
rollouts it leaves out. All take and return float64, one entry per rollout or per segment.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.hooks.credit.batch import NONE, CreditBatch


@dataclass(frozen=True)
class Means:
    """Means of so many values each; `mean` is 0 where there is none."""

    mean: Tensor
    count: Tensor

    @classmethod
    def of(cls, sums: Tensor, counts: Tensor) -> "Means":
        """Of sums over `counts` values."""
        return cls(torch.where(counts > 0, sums / counts.clamp(min=1), 0.0), counts)

    @property
    def known(self) -> Tensor:
        return self.count > 0

    def otherwise(self, other: "Means") -> "Means":
        """These, and `other` where there is none."""
        return Means(
            torch.where(self.known, self.mean, other.mean), torch.where(self.known, self.count, other.count)
        )


def sums_by_group(batch: CreditBatch, values: Tensor) -> Tensor:
    """[G] Of `values` [R], for each group in the order of `torch.unique`."""
    groups, group = torch.unique(batch.groups, return_inverse=True)
    return torch.zeros(len(groups), dtype=torch.float64).index_add_(0, group, values)


def of_groups(batch: CreditBatch) -> Means:
    """[R] Over its group, its own among them."""
    return Means.of(*_all(batch, batch.groups))


def of_siblings(batch: CreditBatch) -> Means:
    """[R] Over the other rollouts of its group."""
    return _others(batch, batch.groups)


def of_strangers(batch: CreditBatch) -> Means:
    """[R] Over the rollouts of its group that have nothing in common with it."""
    siblings, family = _all(batch, batch.groups), _all(batch, batch.families)
    own = torch.where(batch.counted, batch.rewards, 0.0), batch.counted.to(torch.int64)
    alone = batch.families == NONE
    return Means.of(
        siblings[0] - torch.where(alone, own[0], family[0]),
        siblings[1] - torch.where(alone, own[1], family[1]),
    )


def of_continuations(batch: CreditBatch, anchors: Tensor) -> Means:
    """[N] The values of `anchors` [N]: over all continuations of each."""
    return Means.of(*_continued(batch, anchors))


def of_other_continuations(batch: CreditBatch) -> Means:
    """[R] The value of its anchor without its own continuation."""
    sums, counts = _continued(batch, batch.anchors)
    own = batch.counted & (batch.anchors != NONE)
    return Means.of(sums - torch.where(own, batch.rewards, 0.0), counts - own.to(torch.int64))


def of_states(batch: CreditBatch) -> Means:
    """[S] Over the other rollouts of its group one of whose turns acted in the state in which this segment's did.

    For what a family has in common, over those outside the family: all within it had their part in it.
    """
    known = batch.states != NONE
    visits = torch.stack([batch.rollouts, batch.states], dim=1)
    visits = _distinct(visits[known & batch.counted[batch.rollouts]])
    rewards = batch.rewards[visits[:, 0]]
    all_sums, all_counts = _sums(rewards, visits[:, 1:], batch.states[:, None])
    # Who is left out: the family where the segment is common to it, else the rollout itself, numbered after them.
    alone = torch.arange(len(batch.rewards)) + len(batch.rewards)
    of_family = torch.where(batch.families == NONE, alone, batch.families)
    left_out = torch.where(batch.shared, of_family[batch.rollouts], alone[batch.rollouts])
    wanted = torch.stack([left_out, batch.states], dim=1)
    by_rollout = torch.stack([alone[visits[:, 0]], visits[:, 1]], dim=1)
    by_family = torch.stack([of_family[visits[:, 0]], visits[:, 1]], dim=1)
    in_family = (of_family != alone)[visits[:, 0]]
    keys = torch.cat([by_rollout, by_family[in_family]])
    sums, counts = _sums(torch.cat([rewards, rewards[in_family]]), keys, wanted)
    return Means.of(torch.where(known, all_sums - sums, 0.0), torch.where(known, all_counts - counts, 0))


def _continued(batch: CreditBatch, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """[N] Sum and number of the rewards of all counted continuations of `anchors` [N]."""
    rollouts, continued = batch.continuations[batch.counted[batch.continuations[:, 0]]].T
    return _sums(batch.rewards[rollouts], continued[:, None], anchors[:, None])


def _others(batch: CreditBatch, keys: Tensor) -> Means:
    """[R] Over the other counted rollouts with its key; none for those without a key."""
    sums, counts = _all(batch, keys)
    own = batch.counted & (keys != NONE)
    return Means.of(sums - torch.where(own, batch.rewards, 0.0), counts - own.to(torch.int64))


def _all(batch: CreditBatch, keys: Tensor) -> tuple[Tensor, Tensor]:
    """[R] Sum and number of the rewards of all counted rollouts with its key; 0 for those without a key."""
    counted = batch.counted & (keys != NONE)
    sums, counts = _sums(batch.rewards[counted], keys[counted, None], keys[:, None])
    return sums, counts


def _sums(values: Tensor, keys: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """[W] Sum and number of the `values` [N] whose row of `keys` [N, k] equals a row of `wanted` [W, k]."""
    index = _numbered(torch.cat([keys, wanted]))
    of_values, of_wanted = index[: len(keys)], index[len(keys) :]
    size = int(index.max()) + 1 if len(index) else 0
    sums = torch.zeros(size, dtype=torch.float64).index_add_(0, of_values, values)
    counts = torch.zeros(size, dtype=torch.int64).index_add_(0, of_values, torch.ones_like(of_values))
    return sums[of_wanted], counts[of_wanted]


def _distinct(rows: Tensor) -> Tensor:
    """[D, k] The different ones of `rows` [N, k]."""
    number = _numbered(rows)
    first = torch.empty(int(number.max()) + 1 if len(number) else 0, dtype=torch.int64)
    return rows[first.scatter_(0, number, torch.arange(len(rows)))]


def _numbered(rows: Tensor) -> Tensor:
    """[N] From 0 without a gap, equal for equal `rows` [N, k]; many times faster than `torch.unique` by rows."""
    first, *others = rows.T
    number = _ranks(first)
    for column in others:
        # At most N different ones of both, so that the product does not overflow.
        number = _ranks(number * len(rows) + _ranks(column))
    return number


def _ranks(values: Tensor) -> Tensor:
    return torch.unique(values, return_inverse=True)[1]
