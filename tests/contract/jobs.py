"""The jobs that the contract's tests run in each host."""

from pathlib import Path
from typing import Any

from tests.contract import workload

MEMBERS = 2  # of a group, in the jobs of the host's other functions

HOOKS = {
    "custom_generate_function_path": "midstream.hooks.slime.generate.generate",
    "data_source_path": "midstream.hooks.slime.data_source.DataSource",
    "custom_reward_post_process_path": "midstream.hooks.slime.rewards.post_process",
    "custom_rollout_log_function_path": "midstream.hooks.slime.log.log_rollout",
}


# Without isolation, so that the steps of a task see the files that they wait for.
_IN_THE_OPEN: dict[str, Any] = {
    "resume_policy": "continue",
    "environment": {**workload.LAYER["environment"], "isolation": "none"},
}


def jobs_of(host: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The settings of all jobs that the host can run, each in a folder of its own."""
    jobs = {
        "cut_off": cut_off_job(folder / "cut-off", host),
        "filtered": filtered_job(folder / "filtered"),
        "given_up": given_up_job(folder / "given-up"),
        "stock": partial_job(folder / "stock", None),
    }
    if host == "slime":
        generate = "slime.rollout.sglang_streaming_rollout.generate_streaming"
        jobs["streaming"] = partial_job(folder / "streaming", generate)
        jobs["fully_async"] = fully_async_job(folder / "fully-async")
    return jobs


def cut_off_job(run_dir: Path, host: str) -> dict[str, Any]:
    """Three rollouts of which the first two leave groups behind; a restart of the host before the last.

    Where the host has a trainer's hook, with an estimator that needs it.
    """
    flags = {
        "rollout_batch_size": 3,
        "over_sampling_batch_size": 6,
        "n_samples_per_prompt": 2,
        "global_batch_size": 6,
        "num_rollout": 3,
        "partial_rollout": True,
    }
    layer = dict(_IN_THE_OPEN)
    if host == "slime":
        flags["rollout_data_postprocess_path"] = "midstream.hooks.slime.credit.apply_credit"
        layer["credit"] = {"estimators": ["lag_decay"]}
    return job(
        run_dir,
        workload.cut_off_tasks(run_dir),
        flags=flags,
        layer=layer,
        rollouts=3,
        restart_before=[2],
    )


def filtered_job(run_dir: Path) -> dict[str, Any]:
    """One rollout whose groups must be informative; what is unfinished is dropped."""
    flags = {
        "rollout_batch_size": 1,
        "over_sampling_batch_size": 2,
        "n_samples_per_prompt": 4,
        "global_batch_size": 4,
        "num_rollout": 1,
        "dynamic_sampling_filter_path": "midstream.hooks.slime.filters.informative",
    }
    return job(run_dir, workload.uneven_tasks(), flags=flags, layer={"resume_policy": "discard"}, rollouts=1)


def given_up_job(run_dir: Path) -> dict[str, Any]:
    """One rollout of two slots, whose first group is given up when two of its members have the same reward.

    Of the other two one hangs in its step, and one waits for a slot.
    """
    flags = {
        "rollout_batch_size": 1,
        "over_sampling_batch_size": 2,
        "n_samples_per_prompt": 4,
        "global_batch_size": 4,
        "num_rollout": 1,
        "sglang_server_concurrency": 2,
        "dynamic_sampling_filter_path": "midstream.hooks.slime.filters.informative",
    }
    early_stop = {"min_informative": 0.5, "min_finished": 2}
    layer = {
        **_IN_THE_OPEN,
        "resume_policy": "discard",
        "curriculum": {"enabled": True, "early_stop": early_stop},
    }
    return job(run_dir, workload.given_up_tasks(run_dir), flags=flags, layer=layer, rollouts=1)


def fully_async_job(run_dir: Path) -> dict[str, Any]:
    """One group a step, six in flight; the trainer is slow after the first step, so that finished groups queue up."""
    flags = {
        "rollout_function_path": "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        "rollout_batch_size": 1,
        "n_samples_per_prompt": MEMBERS,
        "global_batch_size": MEMBERS,
        "num_rollout": 6,
        "sglang_server_concurrency": 6,
    }
    return job(
        run_dir,
        workload.queued_tasks(run_dir),
        flags=flags,
        layer=_IN_THE_OPEN,
        rollouts=6,
        restart_before=[3, 5],
        train_until={0: {"pattern": "ended-*", "count": workload.QUEUED * MEMBERS + 1}},
    )


def partial_job(run_dir: Path, generate: str | None) -> dict[str, Any]:
    """Two groups a step, six launched, by a generate function of the host's own; a restart before the second."""
    flags = {
        "custom_generate_function_path": generate,
        "rm_type": "random",
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 6,
        "n_samples_per_prompt": MEMBERS,
        "global_batch_size": 2 * MEMBERS,
        "num_rollout": 2,
        "partial_rollout": True,
    }
    tasks = [workload.task(f"f{i}") for i in range(16)]
    return job(
        run_dir,
        tasks,
        flags=flags,
        layer={"resume_policy": "continue"},
        rollouts=2,
        restart_before=[1],
    )


def job(
    run_dir: Path,
    tasks: list[dict[str, Any]],
    *,
    flags: dict[str, Any],
    layer: dict[str, Any],
    **settings: Any,
) -> dict[str, Any]:
    """The settings of one job of the driver."""
    run_dir.mkdir()
    return {
        "flags": HOOKS | _data_flags(workload.write(tasks, run_dir / "tasks.jsonl")) | flags,
        "midstream": {"run_dir": str(run_dir / "midstream"), **workload.LAYER, **layer},
        "restart_before": [],
        "train_until": {},
        "data_parallel_size": 2,
        "run_dir": str(run_dir),
        **settings,
    }


def _data_flags(tasks: Path) -> dict[str, Any]:
    return {
        "prompt_data": str(tasks),
        "input_key": "prompt",
        "label_key": "label",
        "metadata_key": "metadata",
        "rollout_max_response_len": workload.RESPONSE_TOKENS,
    }
