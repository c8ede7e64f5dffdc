"""A batch of rollouts as flat tensors, which is all that estimators see."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

NONE = -1
"""In `families`, `anchors`, `states` and `versions`: there is none."""


@dataclass(frozen=True)
class CreditBatch:
    """R rollouts of a batch and the S segments of their responses, one rollout after another.

    A segment is a run of response tokens of one turn that are all the environment's, or all made by one policy
    version. Segments tile the response, so that with `lengths` a value of each becomes one of each token.

    Attributes:
        rewards: [R] float64.
        counted: [R] bool; False for what is out of the loss, as after a failure, which enters no statistic.
        groups: [R] int64, equal for rollouts of one prompt.
        families: [R] int64, equal for rollouts of one group that have a part of their response in common, NONE where
            a rollout was played on its own from the prompt on.
        anchors: [R] int64, the last state of a rollout from where others of its family went on, too; NONE where it has
            no family.
        continuations: [P, 2] int64, a rollout and an anchor that it is a continuation of, its own or one before that.
        rollouts: [S] int64, the rollout of a segment, ascending from 0.
        lengths: [S] int64, tokens.
        versions: [S] int64, the policy version that made the tokens, NONE for the environment's.
        ahead: [S] int64, the first anchor of the family that a rollout came to after the segment, from where others
            went on, too; NONE where the segment is its rollout's own. What lies before an anchor is in the loss of
            the one rollout that made it.
        inherited: [S] bool, whether a sibling made it, in whose loss it is.
        states: [S] int64, equal for equal environment states in which turns of one group act, NONE where the state
            is unknown.
        lags: [S, 3] float64, staleness in policy versions: of the trajectory, of the tokens (0 for those of the
            environment), and of the environment's state in which the turn acts (mean over its writes, by bytes).
    """

    rewards: Tensor
    counted: Tensor
    groups: Tensor
    families: Tensor
    anchors: Tensor
    continuations: Tensor
    rollouts: Tensor
    lengths: Tensor
    versions: Tensor
    ahead: Tensor
    inherited: Tensor
    states: Tensor
    lags: Tensor

    @property
    def shared(self) -> Tensor:
        """[S] bool, whether others of its rollout's family have it, too."""
        return self.ahead != NONE

    @property
    def by_the_model(self) -> Tensor:
        """[S] bool, whether the policy made the tokens."""
        return self.versions != NONE


@dataclass(frozen=True)
class Credit:
    """What an estimator makes of a batch.

    Attributes:
        advantages: [S] float64, of every token of a segment.
        trained: [S] bool; False where the tokens are taken out of the loss.
        fallbacks: how many rollouts lacked what the estimator compares with, by what they lacked, zeros included.
    """

    advantages: Tensor
    trained: Tensor
    fallbacks: Mapping[str, int] = field(default_factory=dict)


def is_outdated(versions: Tensor, owners: Tensor, count: int) -> Tensor:
    """[S] bool, whether segments of `versions` [S] are the model's and older than the newest of their owner.

    `owners` [S] are numbers below `count`, of rollouts or of samples.
    """
    newest = torch.full((count,), NONE, dtype=torch.int64).scatter_reduce(0, owners, versions, "amax")
    return (versions != NONE) & (versions < newest[owners])


def per_token(values: Tensor, lengths: Tensor) -> Tensor:
    """[S, ...] for segments of `lengths` [S] tokens to [T, ...] for each of their tokens."""
    return torch.repeat_interleave(values, lengths, dim=0)
