"""``--custom-rollout-log-function-path midstream.hooks.slime.log.log_rollout``"""

from argparse import Namespace
from statistics import fmean
from typing import Any

from midstream.buffers.rollout import PartialRollout
from midstream.hooks.credit.staleness import staleness_metrics
from midstream.hooks.slime.earned import training_version
from midstream.hooks.slime.groups import key_of
from midstream.hooks.slime.keeping import keep_rollouts
from midstream.hooks.slime.sample import recorded_rollout, samples_of, was_stopped
from midstream.hooks.slime.settings import (
    credit_counts_of,
    curriculum_of,
    engine_of,
    environments_of,
    ledger_of,
    steering_of,
    tally_of,
)


def log_rollout(
    rollout_id: int,
    args: Namespace,
    samples: list[Any],
    extra_metrics: dict[str, Any] | None,
    rollout_time: float,
) -> bool:
    """Note and keep what is trained on; add staleness, the buffer, environments and sandboxes to what the host logs.

    Returns False, so that it does. Counts of the buffer, environments and sandboxes are since the job's start.
    Lags are counted from the version that the engine served last: the policy that trains on the batch.
    """
    ledger = ledger_of(args)
    if ledger is not None:
        ledger.handed(dict.fromkeys(map(key_of, samples_of(samples))), rollout_id)
    version = training_version(list(samples_of(samples)), engine_of(args).version)
    recorded = recorded_of(samples)
    rollouts = [rollout for _, rollout in recorded]
    curriculum = curriculum_of(args)
    of_prompts = {} if curriculum is None else curriculum.end_step(rollout_id, samples)
    not_kept = keep_rollouts(rollout_id, args, recorded, version)
    if extra_metrics is not None:
        bound = steering_of(args).layer().bounds.environment
        extra_metrics.update(staleness_metrics(rollouts, version, bound))
        extra_metrics.update(rollout_metrics(samples, rollouts))
        extra_metrics["staleness/not_kept"] = float(not_kept)
        extra_metrics.update(tally_of(args).metrics())
        extra_metrics.update(of_prompts)
        extra_metrics.update(steering_of(args).metrics())
        extra_metrics.update({f"credit/{name}": float(n) for name, n in credit_counts_of(args).items()})
        metrics = getattr(environments_of(args), "metrics", None)
        if metrics is not None:
            extra_metrics.update(metrics())
    return False


def rollout_metrics(samples: list[Any], rollouts: list[PartialRollout]) -> dict[str, float]:
    """How often the rollouts of a batch were resumed, stopped, and what went wrong with them. Zeros included."""
    members = list(samples_of(samples))
    return {
        "rollout/resumed": float(sum(rollout.resumes > 0 for rollout in rollouts)),
        "rollout/resumes": float(sum(rollout.resumes for rollout in rollouts)),
        "rollout/stopped": float(sum(map(was_stopped, members))),
        "rollout/agent_faults": float(sum(rollout.fault is not None for rollout in rollouts)),
        "env/snapshot_wait_mean_s": fmean([rollout.snapshot_wait_s for rollout in rollouts] or [0.0]),
        "env/failed_rollouts": float(
            sum(sample.remove_sample and not was_stopped(sample) for sample in members)
        ),
    }


def recorded_of(samples: list[Any]) -> list[tuple[Any, PartialRollout]]:
    """The samples that have a record of ours, each with it."""
    found = ((sample, recorded_rollout(sample, shared=True)) for sample in samples_of(samples))
    return [(sample, rollout) for sample, rollout in found if rollout is not None]
