"""The whole configuration of the one-machine job: its parts around the layer's own settings."""

from typing import Self

from pydantic import Field, model_validator

from midstream.conf.errors import refuse
from midstream.conf.schema.base import Count, PathSetting, Seconds, Section, Seed
from midstream.conf.schema.contradictions import (
    curriculum_hook_problems,
    group_problems,
    hook_problems,
    length_problems,
    policy_problems,
    source_problems,
    strategy_problems,
    task_problems,
    trainer_problems,
)
from midstream.conf.schema.layer import LayerConfig
from midstream.conf.schema.sections import (
    ModelConfig,
    RolloutConfig,
    ServerConfig,
    TaskConfig,
    TrainerConfig,
    WarmStartConfig,
)


class JobConfig(Section):
    """Everything that `midstream compare` is told."""

    run_dir: PathSetting
    seed: Seed = 0
    steps: Count
    save_every: Count | None = None
    """Training steps from one checkpoint to the next, from which `--resume` goes on; null: none are written."""
    max_seconds: Seconds | None = None
    """A run begins no step but its first after so long, whatever `steps` says."""
    strategies: list[str] = Field(min_length=1)
    """The runs to compare, each a file in the config group `strategy`."""
    strategy: str
    """The one whose settings are in force here."""
    over_sampling_factor: float = Field(ge=1)
    """Groups launched per group needed, in the strategies that cut off."""
    tasks: TaskConfig = Field(default_factory=TaskConfig)
    midstream: LayerConfig = Field(default_factory=LayerConfig)
    rollout: RolloutConfig
    model: ModelConfig
    warm_start: WarmStartConfig
    trainer: TrainerConfig
    server: ServerConfig = Field(default_factory=ServerConfig)

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        refuse(
            [
                *strategy_problems(self.strategies),
                *task_problems(self.tasks),
                *source_problems(self.tasks),
                *policy_problems(self.midstream, self.rollout),
                *length_problems(self.midstream, self.rollout, self.server),
                *group_problems(self.rollout),
                *hook_problems(self.midstream, self.rollout),
                *curriculum_hook_problems(self.midstream.curriculum, self.rollout),
                *trainer_problems(self.trainer, self.rollout),
            ]
        )
        return self
