"""Which prompts are played, which groups are trained on, and when a group is given up.

All of it can be changed while the job runs, with `midstream tune`, except `enabled`, `source_key` and `outcome`.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from midstream.conf.errors import Problem, refuse
from midstream.conf.schema.base import Count, Section, Share


class OutcomeConfig(Section):
    """What of a reward is remembered of a prompt."""

    by: Literal["threshold", "spread"] = "threshold"
    """threshold: a reward above it is a success, and a group informs where some of its members succeed and some do
    not; for rewards of two values. spread: a group informs where its rewards differ; for all others. A prompt's pass
    rate is then the share of its groups that inform."""
    threshold: float = 0.5
    spread: float = Field(default=1e-6, gt=0)
    """Rewards whose largest and smallest are no further apart count as equal."""


class ForgetConfig(Section):
    """How fast what is known of a prompt loses weight."""

    live: ClassVar[bool] = True

    half_life: float | None = Field(default=100.0, gt=0)
    """In policy versions; null: never."""
    surprise: float | None = Field(default=8.0, gt=0)
    """In nats: once the groups of a source have been so much likelier without what is known of its prompts than with
    it, most of that is forgotten at once. Lower notices a sudden change earlier, and sees some that are not there.
    null: never."""


class GateConfig(Section):
    """Before the rollout: which prompts are passed over."""

    live: ClassVar[bool] = True

    min_informative: Share = 0.5
    """A prompt whose group informs with less than that probability is passed over; 0: none is."""
    by: Literal["mean", "thompson"] = "mean"
    """mean: the probability as it is expected. thompson: as it is under one pass rate drawn from what is believed."""
    explore: float = Field(default=0.01, ge=0, le=0.5)
    """The least share of groups that go to prompts which the gate passes over; more while groups that were expected to
    inform do not, up to half. 0: none, whatever happens."""
    revisit_epochs: Count = 64
    """A prompt that gate and sampler pass over is played all the same once at most so many epochs have gone by without
    it; an epoch is as many groups as the dataset has prompts."""


class SamplerConfig(Section):
    """Which of the prompts that come up are played first."""

    live: ClassVar[bool] = True

    by: Literal["uniform", "information", "target"] = "information"
    """information: those first whose rewards vary most for what a rollout costs. target: those whose pass rate is
    nearest to `target`. uniform: as they come up."""
    target: Share = 0.5
    candidates: Count = 8
    """One of so many that pass the gate is played, the others come up again in the next round; not under uniform."""
    token_cost: float = Field(default=1.0, ge=0)
    """What a generated token costs, in any unit."""
    turn_cost: float = Field(default=0.0, ge=0)
    """What a turn costs, in the same."""
    second_cost: float = Field(default=0.0, ge=0)
    """What a second in the environment costs, in the same."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Shares of the groups by source, in any unit; a source that is not named has the weight 1 where any is, and
    without any each source has its share of the prompts. 0: its prompts are not played; where that would leave none,
    weights do not count."""

    @model_validator(mode="after")
    def _weights_are_weights(self) -> "SamplerConfig":
        bad = [
            Problem(f"weights.{name}", weight, "use 0 or more")
            for name, weight in self.weights.items()
            if weight < 0
        ]
        refuse(bad)
        return self


class FilterConfig(Section):
    """After the rollout: which groups are trained on."""

    live: ClassVar[bool] = True

    low: Share = 0.0
    """A group with a pass rate of this or less is dropped..."""
    high: Share = 1.0
    """...and so is one with this or more."""
    zero_variance: Literal["drop", "keep"] = "drop"
    """What becomes of a group whose rewards are all equal."""
    zero_variance_weight: Share = 0.0
    """Where they are kept: the advantage of a success in a group of successes, and its negative that of a failure in a
    group of failures."""
    relax_after: Count = 4
    """Once so many groups were dropped for each that a step needs, the band is opened; after as many again what is
    equal is kept as well, so that the step ends."""

    @model_validator(mode="after")
    def _band_is_not_empty(self) -> "FilterConfig":
        if self.low >= self.high:
            refuse([Problem("high", self.high, f"use more than low={self.low}")])
        return self


class EarlyStopConfig(Section):
    """During the rollout: when a group is given up."""

    live: ClassVar[bool] = True

    min_informative: Share = 0.0
    """A group that will inform with less than that probability, given the members that have ended, is given up: the
    rest is cancelled. 0: never."""
    min_finished: Count = 3
    """Not before so many members have ended."""


class CurriculumConfig(Section):
    """Which prompts are played, which groups are trained on, and when a group is given up."""

    enabled: bool = False
    source_key: str = "source"
    """The key of a prompt's metadata that names its source; prompts without it are of the source `default`."""
    outcome: OutcomeConfig = Field(default_factory=OutcomeConfig)
    forget: ForgetConfig = Field(default_factory=ForgetConfig)
    gate: GateConfig = Field(default_factory=GateConfig)
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    filter: FilterConfig = Field(default_factory=FilterConfig)
    early_stop: EarlyStopConfig = Field(default_factory=EarlyStopConfig)


def curriculum_problems(curriculum: CurriculumConfig) -> Iterator[Problem]:
    """A group that is given up has to be dropped, and its members must be either successes or not."""
    if curriculum.filter.zero_variance == "keep" and curriculum.early_stop.min_informative > 0:
        yield Problem(
            "curriculum.early_stop.min_informative",
            curriculum.early_stop.min_informative,
            "use 0, or midstream.curriculum.filter.zero_variance=drop: what is given up cannot be kept",
        )
    if curriculum.outcome.by == "spread":
        for key, value, widest in (("low", curriculum.filter.low, 0), ("high", curriculum.filter.high, 1)):
            if value != widest:
                yield Problem(
                    f"curriculum.filter.{key}",
                    value,
                    f"use {widest}, or midstream.curriculum.outcome.by=threshold: a band of pass rates needs successes",
                )
    if curriculum.outcome.by == "spread" and curriculum.early_stop.min_informative > 0:
        yield Problem(
            "curriculum.early_stop.min_informative",
            curriculum.early_stop.min_informative,
            "use 0, or midstream.curriculum.outcome.by=threshold: of rewards that only have to differ, those that are "
            "equal so far say too little of the others",
        )
