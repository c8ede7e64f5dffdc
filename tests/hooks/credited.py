"""Samples of groups that were forked, resumed or neither, as a host's hooks get them."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from midstream.buffers.rollout import Anchor, PartialRollout, Phase, Span, Status, Turn
from midstream.envs.protocol import Change, Snapshot
from midstream.hooks.slime.sample import store
from midstream.hooks.slime.settings import engine_of
from midstream.local.sample import Sample
from tests.hooks.host import number_args

HOOKS = {
    "custom_reward_post_process_path": "midstream.hooks.slime.rewards.post_process",
    "rollout_data_postprocess_path": "midstream.hooks.slime.credit.apply_credit",
}
# Two turns of two tokens and an answer of one each: the first by version 3, in the task's own state.
LENGTH, SPLIT = 6, 3


def args_of(folder: Path, *estimators: str, **settings: Any) -> Namespace:
    policy = "anchor" if {"telescoped", "anchored", "anchored_shrunk"} & set(estimators) else "continue"
    layer = {"resume_policy": policy, "credit": {"estimators": list(estimators)}}
    args = number_args(folder, layer, **HOOKS | {"grpo_std_normalization": False} | settings)
    engine_of(args).version = 5
    return args


def rollout(group: str, second: int, *, anchor: bool = False, owner: bool = True) -> PartialRollout:
    """Its second turn is by version ``second``, in a state that the first turn has written to."""
    snapshots = {
        "s0": Snapshot("s0", "d0"),
        "s1": Snapshot("s1", "d1", "s0", (Change("a", "created", 10, "", "x"),), version=3, turn=0),
    }
    return PartialRollout(
        prompt_key="p",
        group_key=group,
        prompt_tokens=[7, 7],
        tokens=[1, 2, 9, 3, 4, 9],
        log_probs=[-0.5, -0.5, 0.0, -1.0, -1.0, 0.0],
        loss_mask=[int(owner), int(owner), 0, 1, 1, 0],
        spans=[Span(3, 0, 2, inherited=not owner), Span(second, 3, 5)],
        turns=[Turn(0, 2, 3, Phase.OBSERVED, "s0"), Turn(3, 5, 6, Phase.OBSERVED, "s1")],
        snapshots=snapshots,
        anchor=Anchor("s1", 3) if anchor else None,
        dispatch_version=3,
    )


def sample(index: int, reward: float, record: PartialRollout, *, failed: bool = False) -> Sample:
    found = Sample(
        group_index=int(record.group_key),
        index=index,
        tokens=record.prompt_tokens + record.tokens,
        response_length=LENGTH,
        loss_mask=list(record.loss_mask),
        rollout_log_probs=list(record.log_probs),
    )
    record.status, record.reward = (Status.FAILED, None) if failed else (Status.COMPLETED, reward)
    store(found, record)
    return found


def forked_batch() -> list[Sample]:
    """A group of two strangers, with rewards 1 and 0, and two continuations of one state, 1 and 0; and a group of
    two that were only resumed."""
    rewards = [(0, 1), (0, 0), (1, 1), (1, 0)]
    samples = [
        sample(index, reward, rollout(str(group), 3)) for index, (group, reward) in enumerate(rewards[:2])
    ]
    samples += [
        sample(2, 1, rollout("0", 5, anchor=True)),
        sample(3, 0, rollout("0", 5, anchor=True, owner=False)),
    ]
    samples += [sample(4 + n, reward, rollout("1", 5)) for n, (_, reward) in enumerate(rewards[2:])]
    return samples


def zigzag_shares(values: torch.Tensor, total_length: int, ranks: int = 2) -> list[torch.Tensor]:
    """What each rank of context parallelism owns of a response, as the slime family slices sequences.

    Of 2 x `ranks` chunks a rank has the one with its number and the one with its number from the end; a token belongs
    to where the position before it is, which predicts it.
    """
    chunk = -(-total_length // (2 * ranks))
    prompt = total_length - len(values)
    shares = []
    for rank in range(ranks):
        parts = []
        for number in (rank, 2 * ranks - rank - 1):
            low = max(number * chunk, prompt - 1)
            high = min((number + 1) * chunk, total_length - 1)
            parts.append(values[low - prompt + 1 : max(low, high) - prompt + 1])
        shares.append(torch.cat(parts))
    return shares
