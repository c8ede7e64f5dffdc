"""From the job's configuration to the ``args`` namespace that slime's hooks expect."""

from argparse import Namespace
from pathlib import Path

from midstream.conf.schema import JobConfig
from midstream.local.resume import strategy_dir


def slime_args(
    config: JobConfig, *, engine_host: str, engine_port: int, checkpoint: Path, tasks: Path
) -> Namespace:
    """Return ``args`` with slime's names for one strategy of the job.

    ``args.generate_state`` is left to the job that owns the event loop.
    """
    checkpoints = str(checkpoints_of(config)) if config.save_every is not None else None
    return Namespace(
        **config.rollout.model_dump(),
        midstream=config.midstream.model_dump(mode="json"),
        hf_checkpoint=str(checkpoint),
        prompt_data=str(tasks),
        input_key="prompt",
        label_key="label",
        metadata_key="metadata",
        rollout_global_dataset=True,
        rollout_function_path="midstream.local.rollout.generate_rollout",
        sglang_router_ip=engine_host,
        sglang_router_port=engine_port,
        num_rollout=config.steps,
        rewards_normalization=True,
        grpo_std_normalization=True,
        advantage_estimator="grpo",
        reward_key=None,
        save=checkpoints,
        save_interval=config.save_every,
        load=checkpoints,
    )


def checkpoints_of(config: JobConfig) -> Path:
    """The folder of the strategy's checkpoints, there or not."""
    return strategy_dir(config) / "checkpoints"
