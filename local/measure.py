"""What a step's samples and groups say about it: fields of its event."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from midstream.buffers.lags import token_lags, trajectory_lag
from midstream.buffers.rollout import PartialRollout
from midstream.local.rollout import Group


def rollout_fields(rollouts: Sequence[PartialRollout], version: int) -> dict[str, Any]:
    """Lengths, turns and lags of the trained rollouts, under the policy ``version`` that trains on them.

    ``trained_tokens`` are those that the loss sees; lengths and lags are of all tokens of the model, also of
    those that a sibling made.
    """
    lags: Counter[int] = Counter()
    for rollout in rollouts:
        lags += token_lags(rollout, version)
    return {
        "trained_rollouts": len(rollouts),
        "trained_tokens": sum(sum(rollout.loss_mask) for rollout in rollouts),
        "response_tokens": [rollout.generated_tokens for rollout in rollouts],
        "turns": [len(rollout.turns) for rollout in rollouts],
        "lag_trajectory": [trajectory_lag(rollout, version) for rollout in rollouts],
        "lag_token": {str(lag): count for lag, count in sorted(lags.items())},
    }


def group_fields(groups: Sequence[Group]) -> dict[str, int]:
    """How many groups there are, and how many of them have rewards that differ."""
    rewards = [{sample.reward for sample in group if not sample.remove_sample} for group in groups]
    return {"groups": len(groups), "informative_groups": sum(len(values) > 1 for values in rewards)}
