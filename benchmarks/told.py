"""Runs of the local job, one after the other, with a line on standard error for each that has ended."""

import sys
from collections.abc import Mapping
from typing import Any

from midstream.conf.schema import JobConfig
from midstream.local.compare import compare
from midstream.local.events import RunEvents, read_run
from midstream.local.progress import SilentProgress
from midstream.local.resume import strategy_dir


def run_jobs(configs: Mapping[str, JobConfig]) -> dict[str, RunEvents]:
    """What was recorded, by the names of `configs`; each has a folder of its own in the run directory of the first."""
    compare(configs, progress=_Told(), command=sys.argv)
    return {name: read_run(strategy_dir(config)) for name, config in configs.items()}


class _Told(SilentProgress):
    """The whole takes the better part of an hour."""

    def alarm(self, message: str) -> None:
        print(f"alarm: {message}", file=sys.stderr, flush=True)

    def strategy_finished(self, name: str, run: Mapping[str, Any]) -> None:
        print(
            f"{name}: {run['steps']} steps in {run['wall_s']:.0f} s, {run['trained_rollouts']} rollouts trained",
            file=sys.stderr,
            flush=True,
        )
