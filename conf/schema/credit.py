"""Who gets credit and blame for what a rollout earned: the estimators by name, and their parameters."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

from midstream.conf.errors import Problem, refuse
from midstream.conf.schema.base import Section
from midstream.conf.schema.policies import BUILT_IN, FORKS

EstimatorName = Literal[
    "grpo",
    "telescoped",
    "anchored",
    "anchored_shrunk",
    "state_hash",
    "mask_prefix",
    "lag_decay",
    "prefix_is",
]
SETS_ADVANTAGE = ("grpo", "telescoped", "anchored", "anchored_shrunk", "state_hash")
"""Estimators that say what the advantages are; the others weigh or mask whatever they are."""
NEEDS_FORKS = ("telescoped", "anchored", "anchored_shrunk")
NEEDS_TRAINER = ("telescoped", "anchored", "anchored_shrunk", "state_hash", "lag_decay", "prefix_is")
"""Estimators that give tokens of one rollout different advantages, which only the trainer's hook can."""


class LagDecayConfig(Section):
    """Parameters of `lag_decay`: how fast an advantage shrinks, per policy version of lag, by exp(-rate x lag)."""

    trajectory: float = Field(default=0.0, ge=0)
    """Of the rollout's first token, for all of its tokens."""
    token: float = Field(default=0.1, ge=0)
    """Of the token itself."""
    environment: float = Field(default=0.1, ge=0)
    """Of the state in which its turn acts: mean over what differs from the task's start, by bytes."""


class PrefixIsConfig(Section):
    """Parameters of `prefix_is`."""

    bound: float = Field(default=2.0, ge=1)
    """The largest weight. Higher is less biased and varies more."""


class CreditConfig(Section):
    """How a rollout's reward becomes advantages of its tokens."""

    estimators: list[EstimatorName] = Field(default=["grpo"], min_length=1)
    """At most one that sets the advantages: grpo, telescoped, anchored, anchored_shrunk (these three need groups that
    are forked: midstream.resume_policy anchor or ladder) or state_hash; without one they are the host's own. And any of
    mask_prefix, lag_decay and prefix_is, which weigh them."""
    lag_decay: LagDecayConfig = Field(default_factory=LagDecayConfig)
    prefix_is: PrefixIsConfig = Field(default_factory=PrefixIsConfig)
    keep_rollouts: bool = True
    """Whether the run directory keeps a line for each rollout that was trained on, which `midstream blame` reads."""

    @model_validator(mode="after")
    def _estimators_agree(self) -> "CreditConfig":
        refuse(_list_problems(self.estimators))
        return self

    @property
    def needs_trainer(self) -> bool:
        """Whether the trainer's hook has to take part."""
        return any(name in NEEDS_TRAINER for name in self.estimators)

    @property
    def advantage(self) -> EstimatorName | None:
        """The estimator that sets the advantages, None where they are the host's own."""
        return next((name for name in self.estimators if name in SETS_ADVANTAGE), None)


def _list_problems(names: list[EstimatorName]) -> list[Problem]:
    problems = []
    if len(set(names)) < len(names):
        problems.append(Problem("estimators", names, "name each once"))
    setting = list(dict.fromkeys(name for name in names if name in SETS_ADVANTAGE))
    if len(setting) > 1:
        fix = f"keep one of {', '.join(setting)}: each of them sets the advantages"
        problems.append(Problem("estimators", names, fix))
    return problems


def credit_problems(policy: str, credit: CreditConfig) -> Iterator[Problem]:
    """An estimator that compares continuations needs a policy that forks; one of the user's own may."""
    for name in credit.estimators:
        if name in NEEDS_FORKS and policy in BUILT_IN and policy not in FORKS:
            fix = (
                f"set midstream.resume_policy=anchor or ladder, since {policy} forks no group, or use state_hash, "
                "which needs no forks"
            )
            yield Problem("credit.estimators", name, fix)
