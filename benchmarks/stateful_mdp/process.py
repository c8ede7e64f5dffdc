"""A finite decision process, small enough that everything about it can be computed: values, visits, gradients.

Time is part of a state's meaning: tables of values and policies have an entry for every step, so that what is
learned before a step and after it are different parameters. All tables are float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Process:
    """N steps over S states with A actions each; a step is a token, a turn has one or several.

    Attributes:
        prompts: [P] int64, the state in which rollouts of each prompt begin; prompts are drawn uniformly.
        transitions: [N, S, A, S], rows add up to 1.
        success: [S], the probability of a reward of 1, else 0, where a rollout ends.
        turns: [N] int64, the turn of each step, ascending from 0.
    """

    prompts: Tensor
    transitions: Tensor
    success: Tensor
    turns: Tensor

    @property
    def steps(self) -> int:
        return len(self.turns)

    @property
    def turn_count(self) -> int:
        return int(self.turns[-1]) + 1

    def first_step(self, turn: int) -> int:
        """The first step of `turn`; the number of steps for the turn after the last."""
        return int((self.turns < turn).sum())


def values(process: Process, policy: Tensor) -> Tensor:
    """[N + 1, S] The expected reward from each state on, before each step and at the end, under `policy` [N, S, A]."""
    found = [process.success]
    for step in reversed(range(process.steps)):
        found.append((policy[step] * (process.transitions[step] @ found[-1])).sum(-1))
    return torch.stack(found[::-1])


def action_values(process: Process, of_states: Tensor) -> Tensor:
    """[N, S, A] The expected reward after each action, from `values` [N + 1, S]."""
    return torch.einsum("nsaz,nz->nsa", process.transitions, of_states[1:])


def visits(process: Process, policy: Tensor) -> Tensor:
    """[P, N + 1, S] The probability of each state before each step and at the end, per prompt, under `policy`."""
    found = [torch.nn.functional.one_hot(process.prompts, policy.shape[1]).to(torch.float64)]
    for step in range(process.steps):
        acted = found[-1][:, :, None] * policy[step]
        found.append(torch.einsum("psa,saz->pz", acted, process.transitions[step]))
    return torch.stack(found, dim=1)


def expected_reward(process: Process, policy: Tensor) -> float:
    """Mean over the prompts."""
    return float(values(process, policy)[0, process.prompts].mean())


def exact_gradient(process: Process, logits: Tensor) -> Tensor:
    """[N, S, A] The gradient of the expected reward by the logits of a softmax policy (Sutton et al. 2000)."""
    policy = logits.softmax(-1)
    of_states = values(process, policy)
    above = action_values(process, of_states) - of_states[:-1, :, None]
    return visits(process, policy).mean(0)[:-1, :, None] * policy * above


def ascend(process: Process, logits: Tensor, *, step_size: float, versions: int) -> list[Tensor]:
    """`logits` and the policy versions after it, each a step of exact gradient ascent further."""
    found = [logits]
    for _ in range(versions):
        found.append(found[-1] + step_size * exact_gradient(process, found[-1]))
    return found


def switched(process: Process, before: Tensor, after: Tensor, cut: int) -> Tensor:
    """[N, S, A] The table of `before` in turns under `cut`, of `after` from then on."""
    return torch.where((process.turns < cut)[:, None, None], before, after)


def reward_variances(process: Process, policy: Tensor, cut: int) -> tuple[float, float]:
    """Of the reward, the variance between the states at the start of turn `cut`, and that within them.

    Both are means over prompts, so that differences between prompts are in neither.
    """
    step = process.first_step(cut)
    value, share = values(process, policy)[step], visits(process, policy)[:, step]
    mean = share @ value
    between = (share * (value - mean[:, None]) ** 2).sum(-1).mean()
    return float(between), float((share @ (value * (1 - value))).mean())


def mean_squared_log_ratio(process: Process, made: Tensor, now: Tensor, cut: int) -> float:
    """Of policy `now` to `made`, over the tokens of turns under `cut` that `made` plays."""
    end = process.first_step(cut)
    share = visits(process, made).mean(0)[:end, :, None] * made[:end]
    return float((share * (now[:end] / made[:end]).log() ** 2).sum() / end)


def expected_gradient(
    process: Process, logits: Tensor, made: Tensor, *, weights: Tensor, others_corrected: bool
) -> Tensor:
    """[N, S, A] The expectation of sum over tokens of weight x (reward - baseline) x score.

    Rollouts are played by `made` [N, S, A], scores are those of the softmax policy of `logits`. The baseline is
    independent of the rollout, and in expectation the expected reward of its prompt. `weights` [N, S, A] are those of
    a token by its own state and action. With `others_corrected` each token is weighed by the product of the ratios of
    all others of its rollout, too: it is then in states, and followed by actions, as under the policy of `logits`.
    """
    policy = logits.softmax(-1)
    others = policy if others_corrected else made
    of_states, visited = values(process, others), visits(process, others)
    of_prompts = values(process, made)[0, process.prompts]
    # Sums over prompts of the chance to be in a state, and of that times the prompt's expected reward.
    share = visited[:, :-1].mean(0)
    baseline = torch.einsum("p,pns->ns", of_prompts, visited[:, :-1]) / len(process.prompts)
    above = share[..., None] * action_values(process, of_states) - baseline[..., None]
    taken = made * weights * above
    return taken - policy * taken.sum(-1, keepdim=True)
