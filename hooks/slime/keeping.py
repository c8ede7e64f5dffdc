"""Keeps what is trained on in the run directory, where `midstream blame` and the report find it."""

import logging
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from midstream.buffers.rollout import PartialRollout
from midstream.conf.schema import LayerConfig
from midstream.hooks.credit.kept import described, keep
from midstream.hooks.credit.measured import Measurements, keep_measured
from midstream.hooks.slime.settings import layer_of

_logger = logging.getLogger(__name__)
# Faults of the disk that the log has already.
_said: set[int | None] = set()
# A shared path may take longer than a step's last pass.
_writer = ThreadPoolExecutor(1, thread_name_prefix="midstream-keeping")
_pending: list[Future[bool]] = []


def keep_rollouts(
    rollout_id: int, args: Namespace, recorded: list[tuple[Any, PartialRollout]], version: int
) -> int:
    """Keep the rollouts of a batch on which the policy at ``version`` trains, each given with its sample.

    Returns how many could not be kept, because the disk refused: training goes on. None is kept where
    `credit.keep_rollouts` is off.
    """
    layer = layer_of(args)
    if not layer.credit.keep_rollouts:
        return 0
    rollouts = []
    for sample, rollout in recorded:
        if rollout.reward is not None:
            # Of several that a host computed it is the one that trains.
            rollout.reward = float(sample.get_reward_value(args))
        rollouts.append(described(rollout, version=version, index=sample.index, step=rollout_id))
    if not _written(lambda run_dir: keep(run_dir, rollout_id, rollouts), layer):
        return len(rollouts)
    return 0


def keep_measurements(
    args: Namespace, rollout_id: int, rank: int, measure: Callable[[], Measurements]
) -> None:
    """Keep what a rank of the trainer measured; where the disk refuses, training goes on without.

    ``measure`` is called in another thread. A train step does not wait for it; the next one does, where what went
    wrong beside the disk is raised.
    """
    layer = layer_of(args)
    finish_keeping()
    if layer.credit.keep_rollouts:
        _pending.append(
            _writer.submit(
                _written, lambda run_dir: keep_measured(run_dir, rollout_id, rank, measure()), layer
            )
        )


def finish_keeping() -> None:
    """Wait until what was measured is written. The end of a process waits, too."""
    while _pending:
        _pending.pop().result()


def _written(write: Callable[[Path], None], layer: LayerConfig) -> bool:
    assert layer.run_dir is not None  # every job's layer names one
    try:
        write(layer.run_dir)
    except OSError as error:
        if error.errno not in _said:
            _said.add(error.errno)
            _logger.warning(
                "cannot keep what is trained on (%s): free space or mend access; training goes on", error
            )
        return False
    return True
