"""Groups of rollouts of a process, played or listed, and what estimators are told of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.hooks.credit.batch import NONE, CreditBatch

from .process import Process


@dataclass(frozen=True)
class Layout:
    """Of how many rollouts a group is made, in this order: `alone` ones, and `continuations` of each of its `anchors`.

    The first continuation of an anchor is the one that made the prefix.
    """

    alone: int
    anchors: int = 0
    continuations: int = 0

    @property
    def size(self) -> int:
        return self.alone + self.anchors * self.continuations

    def tokens(self, process: Process, cut: int, *, discarded: bool = False) -> int:
        """What a group costs to generate: a prefix that is continued counts once.

        `discarded` counts it as often as it is continued: that is the price where the other continuations had come as
        far on their own, and gave it up for the anchor, as under the resume policy of that name.
        """
        prefix = process.first_step(cut)
        once = self.alone + self.anchors * (self.continuations if discarded else 1)
        return once * prefix + self.size * (process.steps - prefix)

    def family(self) -> Tensor:
        """[size] The number of a member's anchor in the group, NONE for those that are alone."""
        numbers = torch.arange(self.anchors).repeat_interleave(self.continuations)
        return torch.cat([torch.full((self.alone,), NONE), numbers])

    def maker(self) -> Tensor:
        """[size] The member that made the prefix of each, itself where it did."""
        return torch.cat(
            [
                torch.arange(self.alone),
                self.alone
                + torch.arange(self.anchors).repeat_interleave(self.continuations) * self.continuations,
            ]
        )


@dataclass(frozen=True)
class Groups:
    """Rollouts of whole groups of one layout, group by group: R = groups x size.

    Attributes:
        states: [R, N + 1] int64.
        actions: [R, N] int64.
        rewards: [R] float64.
    """

    layout: Layout
    states: Tensor
    actions: Tensor
    rewards: Tensor

    def part(self, first: int, count: int) -> "Groups":
        """`count` groups from `first` on."""
        own = slice(first * self.layout.size, (first + count) * self.layout.size)
        return Groups(self.layout, self.states[own], self.actions[own], self.rewards[own])


def play(
    process: Process, policy: Tensor, layout: Layout, *, cut: int, groups: int, generator: torch.Generator
) -> Groups:
    """`policy` [N, S, A] acts; continuations part at turn `cut`. Prompts are drawn for each group."""
    rollouts = groups * layout.size
    drawn = torch.randint(len(process.prompts), (groups,), generator=generator)
    states = [process.prompts[drawn].repeat_interleave(layout.size)]
    actions: list[Tensor] = []
    maker = (torch.arange(groups)[:, None] * layout.size + layout.maker()).flatten()
    for step in range(process.steps):
        if step == process.first_step(cut):
            states, actions = [s[maker] for s in states], [a[maker] for a in actions]
        actions.append(_draw(policy[step], states[-1], generator))
        flat = states[-1] * policy.shape[2] + actions[-1]
        states.append(_draw(process.transitions[step].flatten(0, 1), flat, generator))
    succeeds = torch.rand(rollouts, generator=generator, dtype=torch.float64) < process.success[states[-1]]
    return Groups(layout, torch.stack(states, dim=1), torch.stack(actions, dim=1), succeeds.to(torch.float64))


def _draw(rows: Tensor, which: Tensor, generator: torch.Generator) -> Tensor:
    """[R] For each of `which` [R] an entry drawn from its row of `rows` [M, K], whose rows are mostly zeros."""
    most = int((rows > 0).sum(-1).max())
    shares, entries = rows.topk(most, dim=-1)
    edges = shares.cumsum(-1)[:, :-1]
    above = torch.rand(len(which), 1, generator=generator, dtype=torch.float64) >= edges[which]
    return entries[which, above.sum(-1)]


def log_ratios(groups: Groups, now: Tensor, made: Tensor) -> Tensor:
    """[R, N] Log of the ratio of policy `now` to `made`, both [N, S, A], of every token."""
    steps = torch.arange(groups.actions.shape[1])
    return (now / made).log()[steps, groups.states[:, :-1], groups.actions]


def credit_batch(
    process: Process, groups: Groups, *, cut: int, lag: int, write_lags: Tensor | None = None
) -> CreditBatch:
    """Turns under `cut` are by a policy `lag` versions older than that of the others; a segment is a turn.

    `write_lags` [R, T] is the lag of the environment's state, 0 where it is not given.
    """
    layout, turns = groups.layout, process.turn_count
    rollouts = len(groups.rewards)
    group = torch.arange(rollouts) // layout.size
    family = layout.family().repeat(rollouts // layout.size)
    family = torch.where(family == NONE, NONE, group * layout.anchors + family)
    makes = (layout.maker() == torch.arange(layout.size)).repeat(rollouts // layout.size)
    is_prefix = torch.arange(turns) < cut
    first_steps = torch.tensor([process.first_step(turn) for turn in range(turns)])
    lags = torch.zeros(rollouts, turns, 3, dtype=torch.float64)
    lags[:, :, 0] = lag if cut > 0 else 0
    lags[:, :, 1] = lag * is_prefix
    if write_lags is not None:
        lags[:, :, 2] = write_lags
    return CreditBatch(
        rewards=groups.rewards,
        counted=torch.ones(rollouts, dtype=torch.bool),
        groups=group,
        families=family,
        anchors=family,
        continuations=torch.stack([torch.arange(rollouts), family], dim=1)[family != NONE],
        rollouts=torch.arange(rollouts).repeat_interleave(turns),
        lengths=torch.bincount(process.turns).repeat(rollouts),
        versions=torch.where(is_prefix, 0, lag).repeat(rollouts),
        ahead=torch.where(is_prefix, family[:, None], NONE).flatten(),
        inherited=(~makes[:, None] & is_prefix).flatten(),
        states=_numbered(group, groups.states[:, first_steps]).flatten(),
        lags=lags.flatten(0, 1),
    )


def _numbered(group: Tensor, states: Tensor) -> Tensor:
    """[R, T] A number for each state within each group."""
    return group[:, None] * (int(states.max()) + 1) + states
