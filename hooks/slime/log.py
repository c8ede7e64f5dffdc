"""``--custom-rollout-log-function-path midstream.hooks.slime.log.log_rollout``"""

from argparse import Namespace
from collections import Counter
from statistics import fmean
from typing import Any

from midstream.buffers.lags import lags, token_lags
from midstream.hooks.slime.groups import key_of
from midstream.hooks.slime.keeping import keep_rollouts
from midstream.hooks.slime.sample import recorded_rollout, samples_of
from midstream.hooks.slime.settings import engine_of, environments_of, ledger_of, tally_of


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
    version = engine_of(args).version or 0
    not_kept = keep_rollouts(rollout_id, args, samples, version)
    if extra_metrics is not None:
        extra_metrics.update(staleness_metrics(samples, version))
        extra_metrics["staleness/not_kept"] = float(not_kept)
        extra_metrics.update(tally_of(args).metrics())
        metrics = getattr(environments_of(args), "metrics", None)
        if metrics is not None:
            extra_metrics.update(metrics())
    return False


def staleness_metrics(samples: list[Any], version: int) -> dict[str, float]:
    """Lags of a batch in policy versions, and how often its rollouts were resumed. Zeros included."""
    rollouts = [
        rollout for sample in samples_of(samples) if (rollout := recorded_rollout(sample)) is not None
    ]
    largest = [lags(rollout, version) for rollout in rollouts]
    trajectory = Counter(found.trajectory for found in largest)
    environment = Counter(found.environment for found in largest)
    tokens: Counter[int] = Counter()
    for rollout in rollouts:
        tokens += token_lags(rollout, version)
    return {
        "staleness/trajectory_mean": _mean(trajectory),
        "staleness/trajectory_max": float(max(trajectory, default=0)),
        "staleness/token_mean": _mean(tokens),
        "staleness/token_max": float(max(tokens, default=0)),
        "staleness/env_mean": _mean(environment),
        "staleness/env_max": float(max(environment, default=0)),
        "rollout/resumed": float(sum(rollout.resumes > 0 for rollout in rollouts)),
        "rollout/resumes": float(sum(rollout.resumes for rollout in rollouts)),
        "rollout/agent_faults": float(sum(rollout.fault is not None for rollout in rollouts)),
        "env/snapshot_wait_mean_s": fmean([rollout.snapshot_wait_s for rollout in rollouts] or [0.0]),
        "env/failed_rollouts": float(sum(sample.remove_sample for sample in samples_of(samples))),
    }


def _mean(counts: Counter[int]) -> float:
    total = counts.total()
    return sum(value * count for value, count in counts.items()) / total if total else 0.0
