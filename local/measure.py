"""What a step's samples and groups say about it: fields of its event."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from midstream.buffers.lags import state_lag, token_lags, trajectory_lag
from midstream.buffers.rollout import PartialRollout
from midstream.local.rollout import Group


def rollout_fields(rollouts: Sequence[PartialRollout], version: int) -> dict[str, Any]:
    """Lengths, turns, lags and seconds in the environment of the trained rollouts.

    Lags are under the policy ``version`` that trains on them.
    """
    lags: Counter[int] = Counter()
    for rollout in rollouts:
        lags += token_lags(rollout, version)
    return {
        "trained_rollouts": len(rollouts),
        "trained_tokens": sum(rollout.generated_tokens for rollout in rollouts),
        "response_tokens": [rollout.generated_tokens for rollout in rollouts],
        "turns": [len(rollout.turns) for rollout in rollouts],
        "lag_trajectory": [trajectory_lag(rollout, version) for rollout in rollouts],
        "lag_environment": [
            state_lag(rollout.snapshots, rollout.newest_snapshot, version) for rollout in rollouts
        ],
        "environment_s": [sum(turn.seconds for turn in rollout.turns) for rollout in rollouts],
        "lag_token": {str(lag): count for lag, count in sorted(lags.items())},
    }


def group_fields(groups: Sequence[Group]) -> dict[str, int]:
    """How many groups there are, and how many of them have rewards that differ."""
    rewards = [{sample.reward for sample in group if not sample.remove_sample} for group in groups]
    return {"groups": len(groups), "informative_groups": sum(len(values) > 1 for values in rewards)}
