"""Every outcome of a group of a tiny process, with its probability: expectations without any sampling."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from benchmarks.stateful_mdp.groups import Groups, Layout
from benchmarks.stateful_mdp.process import Process
from torch import Tensor


def tiny_process(*, turns: tuple[int, ...] = (0, 1, 2), seed: int = 0) -> Process:
    """Two states, two actions, two prompts; only the last step's transitions are by chance."""
    generator = torch.Generator().manual_seed(seed)
    toggles, sets = torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0, 1], [0, 1]])
    certain = [
        torch.nn.functional.one_hot(toggles if step % 2 else sets, 2) for step in range(len(turns) - 1)
    ]
    last = torch.randn(2, 2, 2, generator=generator, dtype=torch.float64).softmax(-1)
    return Process(
        prompts=torch.tensor([0, 1]),
        transitions=torch.stack([*(each.to(torch.float64) for each in certain), last]),
        success=torch.tensor([0.2, 0.9], dtype=torch.float64),
        turns=torch.tensor(turns),
    )


def tiny_logits(process: Process, *, seed: int) -> Tensor:
    """[N, 2, 2], well away from a uniform policy."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(process.steps, 2, 2, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Outcomes:
    """M outcomes of m rollouts: states [M, m, n + 1], actions [M, m, n], rewards [M, m], the chance [M] of each."""

    states: Tensor
    actions: Tensor
    rewards: Tensor
    chances: Tensor

    def __mul__(self, other: "Outcomes") -> "Outcomes":
        """All pairs of theirs, side by side: rollouts that have nothing to do with each other."""
        left, right = (index.flatten() for index in torch.meshgrid(
            torch.arange(len(self.chances)), torch.arange(len(other.chances)), indexing="ij"
        ))  # fmt: skip
        return Outcomes(
            *(
                torch.cat([getattr(self, name)[left], getattr(other, name)[right]], dim=1)
                for name in ("states", "actions", "rewards")
            ),
            self.chances[left] * other.chances[right],
        )


def joined(parts: Sequence[Outcomes], chances: Sequence[float]) -> Outcomes:
    """One of `parts`, each with its chance."""
    return Outcomes(
        *(torch.cat([getattr(part, name) for part in parts]) for name in ("states", "actions", "rewards")),
        torch.cat([part.chances * chance for part, chance in zip(parts, chances, strict=True)]),
    )


def played_on(process: Process, policy: Tensor, start: Outcomes, steps: range) -> Outcomes:
    """All ways in which one rollout goes on from each of `start` through `steps`."""
    found = start
    for step in steps:
        here = found.states[:, 0, -1]
        chances = found.chances[:, None, None] * policy[step, here, :, None] * process.transitions[step, here]
        path, action, after = (chances > 0).nonzero(as_tuple=True)
        found = Outcomes(
            torch.cat([found.states[path], after[:, None, None]], dim=2),
            torch.cat([found.actions[path], action[:, None, None]], dim=2),
            found.rewards[path],
            chances[path, action, after],
        )
    return found


def rewarded(process: Process, ended: Outcomes) -> Outcomes:
    success = process.success[ended.states[:, 0, -1]]
    failed = Outcomes(
        ended.states, ended.actions, torch.zeros_like(ended.rewards), ended.chances * (1 - success)
    )
    passed = Outcomes(ended.states, ended.actions, torch.ones_like(ended.rewards), ended.chances * success)
    return joined([failed, passed], [1.0, 1.0])


def all_groups(process: Process, policy: Tensor, layout: Layout, *, cut: int) -> tuple[Groups, Tensor]:
    """Every group that `policy` [N, S, A] can play, and the chance [groups] of each."""
    step = process.first_step(cut)
    of_prompts = []
    for prompt in process.prompts.tolist():
        start = Outcomes(
            torch.full((1, 1, 1), prompt),
            torch.zeros(1, 1, 0, dtype=torch.int64),
            torch.zeros(1, 1, dtype=torch.float64),
            torch.ones(1, dtype=torch.float64),
        )
        whole = rewarded(process, played_on(process, policy, start, range(process.steps)))
        prefixes = played_on(process, policy, start, range(step))
        members = [whole] * layout.alone + [_family(process, policy, prefixes, layout, step)] * layout.anchors
        group = members[0]
        for member in members[1:]:
            group = group * member
        of_prompts.append(group)
    found = joined(of_prompts, [1 / len(of_prompts)] * len(of_prompts))
    groups = Groups(layout, found.states.flatten(0, 1), found.actions.flatten(0, 1), found.rewards.flatten())
    return groups, found.chances


def _family(process: Process, policy: Tensor, prefixes: Outcomes, layout: Layout, step: int) -> Outcomes:
    families = []
    for index in range(len(prefixes.chances)):
        prefix = Outcomes(
            prefixes.states[index, None],
            prefixes.actions[index, None],
            prefixes.rewards[index, None],
            torch.ones(1, dtype=torch.float64),
        )
        one = rewarded(process, played_on(process, policy, prefix, range(step, process.steps)))
        family = one
        for _ in range(layout.continuations - 1):
            family = family * one
        families.append(family)
    return joined(families, prefixes.chances.tolist()) if families else prefixes
