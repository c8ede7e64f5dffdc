"""The job that `crash.py` kills: a real run, which says in which phase it is, from its checkpoint to its end.

Every part is the job's own; those that are known by the settings are wrapped so that they say when they begin.
"""

import os
import signal
import tempfile
from argparse import Namespace
from ctypes import CDLL
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from midstream.conf.compose import compose_runs
from midstream.conf.schema import JobConfig
from midstream.envs.protocol import Snapshot
from midstream.envs.workspace import WorkspaceEnvironment, WorkspaceFactory
from midstream.hooks.slime.data_source import DataSource
from midstream.hooks.slime.log import log_rollout
from midstream.hooks.slime.sample import Group
from midstream.local.attached import AttachedServer
from midstream.local.compare import run_strategy
from midstream.local.engine.flags import EngineAddress
from midstream.local.progress import SilentProgress

PHASES = ("start", "generation", "snapshot", "buffering", "hand-over", "checkpoint")
STRATEGY = "continue"

_PR_SET_PDEATHSIG = 1

# Where this process says in which phase it is.
_listeners: list[Connection] = []


def job_config(run_dir: Path, steps: int, seed: int) -> JobConfig:
    """Tiny, so that a step takes about a second; half of the groups that it starts are cut off."""
    settings = {
        "job": "smoke",
        "strategies": f"[{STRATEGY}]",
        "run_dir": run_dir,
        "steps": steps,
        "seed": seed,
        "save_every": 1,
        "over_sampling_factor": 2,
        "tasks.count": 32,
        "tasks.path": run_dir / "tasks.jsonl",
        "rollout.rollout_batch_size": 3,
        "rollout.n_samples_per_prompt": 2,
        "rollout.rollout_max_response_len": 128,
        "rollout.data_source_path": f"{__name__}.MarkedSource",
        "rollout.custom_rollout_log_function_path": f"{__name__}.marked_log",
        "midstream.environment.factory": f"{__name__}:MarkedFactory",
        "midstream.environment.sandbox_root": run_dir / "sandboxes",
        "midstream.turns.max_turns": 8,
        # On a busy machine.
        "server.launch_timeout_s": 600.0,
    }
    return compose_runs([f"{key}={value}" for key, value in settings.items()])[STRATEGY]


def live(config: JobConfig, address: EngineAddress, checkpoint: Path, phases: Connection, log: Path) -> None:
    """One life of the job, in a process of its own; `phases` are told as they begin."""
    CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    tempfile.tempdir = str(config.run_dir / "tmp")
    _listeners.append(phases)
    assert config.tasks.path is not None
    run_strategy(
        config,
        AttachedServer(address, log),
        checkpoint,
        config.tasks.path,
        None,
        AutoTokenizer.from_pretrained(checkpoint),
        MarkedProgress(),
    )


def _say(phase: str) -> None:
    for listener in _listeners:
        listener.send(phase)


class MarkedProgress(SilentProgress):
    """A step is recorded right before its checkpoint is written."""

    def strategy_started(self, name: str, steps: int) -> None:
        _say("start")

    def step_finished(self, *_: Any) -> None:
        _say("checkpoint")


class MarkedSource(DataSource):
    """Groups are taken before a step generates, and come back when it has cut them off."""

    def get_samples(self, num_samples: int) -> list[Group]:
        _say("generation")
        return super().get_samples(num_samples)

    def add_samples(self, samples: list[Group]) -> None:
        _say("buffering")
        super().add_samples(samples)


class MarkedEnvironment(WorkspaceEnvironment):
    async def snapshot(self) -> Snapshot:
        _say("snapshot")
        try:
            return await super().snapshot()
        finally:
            _say("generation")


class MarkedFactory(WorkspaceFactory):
    environment_class = MarkedEnvironment


def marked_log(step: int, args: Namespace, samples: list[Any], metrics: Any, rollout_s: float) -> bool:
    """What is trained on is handed over here."""
    _say("hand-over")
    return log_rollout(step, args, samples, metrics, rollout_s)
