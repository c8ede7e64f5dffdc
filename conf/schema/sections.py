"""The parts of the one-machine job: tasks, rollout, model, warm start, trainer and server."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from midstream.conf.errors import Problem, refuse
from midstream.conf.schema.base import Count, ImportPath, PathSetting, Seconds, Section, Seed, Share


class TaskSource(Section):
    """One kind among the tasks that are generated."""

    share: float = Field(gt=0)
    """Of the tasks, in any unit: the shares of all sources together are the whole."""
    difficulty: Share = 0.5
    check: Literal["chain", "submit", "never"] = "chain"
    """What a rollout has to do to be rewarded. chain: to solve its task. submit: nothing but to submit, as with tests
    that test nothing. never: nothing is ever enough, as with a test that is broken."""


class TaskConfig(Section):
    """What the model is trained on."""

    path: PathSetting | None = None
    """A JSONL file of tasks; None: `count` tasks are generated."""
    count: Count = 256
    difficulty: Share = 0.5
    """Of the tasks that are generated."""
    sources: dict[str, TaskSource] = Field(default_factory=dict)
    """Kinds of tasks by name, in place of `difficulty`: generated tasks, held-out ones too, are a mix of them, and each
    names its own under `midstream.curriculum.source_key` in its metadata."""
    seed: Seed = 0
    held_out: int = Field(default=0, ge=0)
    """Tasks never trained on, on which each run's last policy is scored; 0: none."""
    held_out_every: Count | None = None
    """Training steps from one score to the next, from the warm start on; null: the last policy alone."""
    held_out_path: PathSetting | None = None
    """A JSONL file of them; None: they are generated where `path` is None too."""


class RolloutConfig(Section):
    """Settings under the names of slime's flags, which the hooks read from `args`.

    `rollout_batch_size` and `over_sampling_batch_size` count groups (prompts), `*_len` tokens.
    """

    rollout_batch_size: Count
    n_samples_per_prompt: Count
    over_sampling_batch_size: Count
    partial_rollout: bool
    rollout_max_response_len: Count
    rollout_max_prompt_len: Count | None = None
    rollout_temperature: float = Field(default=1.0, gt=0)
    rollout_top_p: float = Field(default=1.0, gt=0, le=1)
    rollout_top_k: int = Field(default=-1, ge=-1)
    """-1: off."""
    rollout_seed: Seed = 0
    rollout_shuffle: bool = True
    sglang_server_concurrency: Count = 64
    custom_generate_function_path: ImportPath | None = None
    data_source_path: ImportPath | None = None
    dynamic_sampling_filter_path: ImportPath | None = None
    buffer_filter_path: ImportPath | None = None
    rollout_all_samples_process_path: ImportPath | None = None
    custom_reward_post_process_path: ImportPath | None = None
    rollout_data_postprocess_path: ImportPath | None = None
    custom_rollout_log_function_path: ImportPath | None = None
    custom_rm_path: ImportPath | None = None

    @field_validator("rollout_top_k")
    @classmethod
    def _zero_is_not_a_choice(cls, top_k: int) -> int:
        if top_k == 0:
            refuse([Problem("", top_k, "use -1 for no limit, or 1 and more")])
        return top_k


class ModelConfig(Section):
    """Shape of the Qwen3 that is built on the spot; its vocabulary is the tokenizer's."""

    hidden_size: Count
    ffn_hidden_size: Count
    num_layers: Count
    num_attention_heads: Count
    num_query_groups: Count
    kv_channels: int = Field(default=32, ge=2, multiple_of=2)
    """Size of one head; even, since rotary embeddings turn pairs."""
    rotary_base: int = Field(default=10000, ge=2)
    seed: Seed = 0

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        heads, groups = self.num_attention_heads, self.num_query_groups
        if heads % groups:
            refuse([Problem("num_query_groups", groups, f"use a divisor of num_attention_heads={heads}")])
        return self


class WarmStartConfig(Section):
    """The supervised pass that gives the model something to improve on; 0 steps leave it out."""

    steps: int = Field(ge=0)
    batch_size: Count
    lr: float = Field(gt=0)
    seed: Seed = 0


class TrainerConfig(Section):
    """AdamW on the PPO-clip loss."""

    lr: float = Field(gt=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.98, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_grad: float = Field(default=1.0, gt=0)
    eps_clip: float = Field(default=0.2, gt=0, lt=1)
    eps_clip_high: float = Field(default=0.28, gt=0)
    num_minibatches: Count = 2


class ServerConfig(Section):
    """The SGLang server that the job starts."""

    port: int | None = Field(default=None, ge=1, le=65535)
    """None: any free port."""
    launch_timeout_s: Seconds = 180.0
    stop_timeout_s: Seconds = 20.0
    """How long the killed server's processes may take to be gone."""
    mem_fraction_static: float = Field(default=0.3, gt=0, lt=1)
    max_total_tokens: Count = 65536
    """Size of the KV cache."""
    max_running_requests: Count = 64
    restart_limit: int = Field(default=3, ge=0)
    """How often a server that died is started again before the run fails."""
    threads: Count = 1
