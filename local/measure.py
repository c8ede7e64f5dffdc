"""What a step's samples and groups say about it: fields of its event."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from midstream.buffers.lags import state_lag, trajectory_lag
from midstream.buffers.rollout import PartialRollout
from midstream.local.rollout import RolloutBatch


def rollout_fields(rollouts: Sequence[PartialRollout], version: int) -> dict[str, Any]:
    """Lengths, turns, lags and seconds in the environment of the trained rollouts.

    Lags are under the policy ``version`` that trains on them. ``trained_tokens`` and ``lag_token`` are of the tokens
    that the loss sees; lengths and the other lags are of whole rollouts, with what a sibling made.
    """
    lags: Counter[int] = Counter()
    for rollout in rollouts:
        for span in rollout.spans:
            trained = sum(rollout.loss_mask[span.start : span.end])
            if trained:
                lags[version - span.version] += trained
    return {
        "trained_rollouts": len(rollouts),
        "trained_tokens": sum(sum(rollout.loss_mask) for rollout in rollouts),
        "response_tokens": [rollout.generated_tokens for rollout in rollouts],
        "turns": [len(rollout.turns) for rollout in rollouts],
        "lag_trajectory": [trajectory_lag(rollout, version) for rollout in rollouts],
        "lag_environment": [
            state_lag(rollout.snapshots, rollout.newest_snapshot, version) for rollout in rollouts
        ],
        "environment_s": [sum(turn.seconds for turn in rollout.turns) for rollout in rollouts],
        "lag_token": {str(lag): count for lag, count in sorted(lags.items())},
    }


def group_fields(batch: RolloutBatch) -> dict[str, Any]:
    """Which groups are trained on and which dropped, and how many of the trained have rewards that differ."""
    rewards = [{sample.reward for sample in group if not sample.remove_sample} for group in batch.samples]
    return {
        "groups": len(batch.samples),
        "informative_groups": sum(len(values) > 1 for values in rewards),
        "trained_groups": [group[0].group_index for group in batch.samples],
        "dropped_groups": [group[0].group_index for group in batch.dropped],
    }
