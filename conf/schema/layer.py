"""The settings of the layer itself: the same in the one-machine job and in a user's own job."""

import re
from collections.abc import Iterator
from string import Formatter
from typing import Self

from pydantic import Field, model_validator

from midstream.conf.errors import Problem, refuse
from midstream.conf.schema.base import Count, PathSetting, Seconds, Section
from midstream.conf.schema.credit import CreditConfig, credit_problems
from midstream.conf.schema.curriculum import CurriculumConfig, curriculum_problems
from midstream.conf.schema.environment import EnvironmentConfig, SnapshotConfig
from midstream.conf.schema.policies import (
    BoundsConfig,
    JournalConfig,
    PoliciesConfig,
    PolicyName,
    bound_problems,
    deadline_problems,
)


class TurnConfig(Section):
    """How model output becomes actions and observations become tokens."""

    max_turns: Count = 12
    """A rollout with that many turns ends, and its environment is scored as it is."""
    max_tokens_per_turn: Count | None = None
    """None: a turn is bounded only by what is left of the response's budget."""
    observation_template: str = "{observation}"
    """What the model reads after its action; {observation} is the environment's answer."""
    action_pattern: str | None = None
    """Regular expression whose one group is the action; None: the whole turn is the action."""
    abort_grace_s: float = Field(default=1.0, ge=0)
    """How long an abort waits for an environment step in progress before it cancels the step."""

    @model_validator(mode="after")
    def _texts_are_usable(self) -> Self:
        refuse([*_template_problems(self.observation_template), *_pattern_problems(self.action_pattern)])
        return self


class EngineConfig(Section):
    """How patient the client of the inference engine is."""

    retry_s: float = Field(default=120.0, ge=0)
    """How long an engine that does not answer is waited for before the job fails."""
    request_timeout_s: Seconds = 600.0
    """How long one generation may take before it is asked for again."""


class LayerConfig(Section):
    """What a host job gives to midstream: the mapping under the key `midstream`."""

    resume_policy: PolicyName = "continue"
    """What becomes of a rollout that is unfinished when the step has enough. wait: nothing is cut off.
    discard: it is dropped. restart: it starts anew. continue: it goes on, tokens and environment. rewind: it
    goes on from before what too old policies did to its environment. anchor: its group is forked from the member
    that came furthest. ladder: it goes on, is forked or goes back, as its age asks. naive: its tokens go on in
    an environment that starts anew, which shows what jobs without the layer suffer. Or your own:
    package.module:Class."""
    run_dir: PathSetting | None = None
    """Where the layer keeps what it writes: the journal, and by default its snapshots. One job at a time."""
    max_attempts: Count = 3
    """With so many failures of its infrastructure a rollout is masked."""
    policies: PoliciesConfig = Field(default_factory=PoliciesConfig)
    bounds: BoundsConfig = Field(default_factory=BoundsConfig)
    credit: CreditConfig = Field(default_factory=CreditConfig)
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    journal: JournalConfig = Field(default_factory=JournalConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    snapshots: SnapshotConfig = Field(default_factory=SnapshotConfig)
    turns: TurnConfig = Field(default_factory=TurnConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)

    @model_validator(mode="after")
    def _policy_and_bounds_agree(self) -> Self:
        longest_s = max(self.environment.step_timeout_s, self.environment.eval_timeout_s)
        refuse(
            [
                *bound_problems(self.resume_policy, self.policies, self.bounds),
                *deadline_problems(self.bounds, longest_s),
                *credit_problems(self.resume_policy, self.credit),
                *curriculum_problems(self.curriculum),
            ]
        )
        return self


def _template_problems(template: str) -> Iterator[Problem]:
    key = "observation_template"
    try:
        fields = [field for _, field, _, _ in Formatter().parse(template) if field is not None]
    except ValueError as error:
        yield Problem(key, template, f"write literal braces as {{{{ and }}}} ({error})")
        return
    if fields != ["observation"]:
        yield Problem(key, template, "put {observation} in it exactly once, and no other field")


def _pattern_problems(pattern: str | None) -> Iterator[Problem]:
    key = "action_pattern"
    if pattern is None:
        return
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield Problem(key, pattern, f"use a valid regular expression ({error})")
        return
    if groups != 1:
        yield Problem(key, pattern, f"give it exactly one group, the action; it has {groups}")
