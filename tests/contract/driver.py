"""Runs rollouts in a real host of slime's family, and writes down what came out at each of its stages.

A script for the Python of the host's own environment: `python driver.py SETTINGS.json`. The host's parser
makes `args`, its RolloutManager actor generates, converts and splits; nothing of the host is replaced. What
is not there is the trainer: its push of new weights is played by loading the same weights under a new
version before each rollout.

Settings:
    host: "slime" or "miles"
    engine_url: a running SGLang server
    checkpoint: what it serves, in Hugging Face layout
    jobs: each with
        flags: the host's flags and their values, names without dashes; hooks are among them
        midstream: the layer's settings, which the host reads from its custom config
        rollouts: how many
        restart_before: ids of rollouts before which the manager is saved, killed and loaded anew
        train_until: for a rollout's id, as text, `pattern` and `count`: as long as less files in `run_dir` match,
            the trainer is busy with it, and a host that generates meanwhile goes on
        data_parallel_size: ranks among which the batch is split
        run_dir: folder for everything that is written; its file `rollout_id` names the rollout that runs,
            `host.log` has what the host's processes logged meanwhile
    result: file for what came out, job by job
"""

import contextlib
import json
import sys
import tempfile
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import ray
import torch
from host_args import parse_host_args
from router import router_before

from midstream.buffers.journal.status import status_of
from midstream.hooks.credit.note import Note
from midstream.local.engine.shims import declare_torchvision_operators

_SAMPLE_FIELDS = (
    "index",
    "group_index",
    "prompt",
    "tokens",
    "response_length",
    "loss_mask",
    "rollout_log_probs",
    "weight_versions",
    "status",
    "reward",
    "remove_sample",
    "metadata",
)
_OBJECT_STORE_BYTES = 100 * 2**20
_LOGICAL_CPUS = 4  # the manager and its lock each reserve one
_POLL_S = 0.1
_PUSH_S = 60.0  # for an engine to take weights


class Job:
    """One job of the host, without its trainer."""

    def __init__(self, host: str, engine_url: str, settings: dict[str, Any], args: Namespace) -> None:
        self._host = host
        self._engine_url = engine_url
        self._settings = settings
        self._args = args
        self._manager = self._start_manager()

    def rollout(self, rollout_id: int) -> dict[str, Any]:
        """Run one rollout; returns its samples, the parts of the ranks, and what waits afterwards."""
        version = str(rollout_id + 1)
        self._load_weights(version)
        (Path(self._settings["run_dir"]) / "rollout_id").write_text(str(rollout_id))
        parts = ray.get(self._manager.generate.remote(rollout_id))
        dump = self._args.save_debug_rollout_data.format(rollout_id=rollout_id)
        samples = torch.load(dump, weights_only=False)["samples"]
        self._train(rollout_id)
        return {
            "weight_version": version,
            "samples": [_fields(sample) for sample in samples],
            "ranks": [ray.get(part.inner) for part in parts],
            "waiting": ray.get(self._manager.__ray_call__.remote(_waiting)),
        }

    def restart(self, rollout_id: int) -> dict[str, Any]:
        """Save after `rollout_id`, kill the manager and load another.

        Returns what waits in that one, and how many groups have been dropped since the job's start.
        """
        ray.get(self._manager.save.remote(rollout_id))
        ray.kill(self._manager)
        self._args.load = self._args.save
        self._manager = self._start_manager()
        ray.get(self._manager.load.remote(rollout_id))
        journal = status_of(Path(self._settings["midstream"]["run_dir"]) / "buffer")
        dropped = {reason: total.groups for reason, total in journal.dropped.items()}
        return {**ray.get(self._manager.__ray_call__.remote(_waiting)), "dropped": dropped}

    def end(self) -> None:
        """Kill the manager, so that another job has its place."""
        ray.kill(self._manager)

    def _start_manager(self) -> Any:
        placement = import_module(f"{self._host}.ray.placement_group")
        manager, _ = placement.create_rollout_manager(self._args, None)
        # What the trainer tells the manager once it knows its own layout.
        ranks = self._settings["data_parallel_size"]
        layout = {"dp_size": ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        ray.get(manager.set_train_parallel_config.remote(layout))
        return manager

    def _train(self, rollout_id: int) -> None:
        until = self._settings["train_until"].get(str(rollout_id))
        run_dir = Path(self._settings["run_dir"])
        while until is not None and len(list(run_dir.glob(until["pattern"]))) < until["count"]:
            time.sleep(_POLL_S)

    def _load_weights(self, version: str) -> None:
        body = json.dumps({"model_path": self._args.hf_checkpoint, "weight_version": version}).encode()
        request = urllib.request.Request(
            f"{self._engine_url}/update_weights_from_disk",
            body,
            {"Content-Type": "application/json"},
        )
        give_up_at = time.monotonic() + _PUSH_S
        while not (outcome := _answer(request))["success"]:
            # The engine refuses while it still works for a manager that was killed.
            if time.monotonic() > give_up_at:
                raise RuntimeError(
                    f"the engine did not take the weights of version {version}: {outcome['message']}"
                )
            time.sleep(_POLL_S)


def _answer(request: urllib.request.Request) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as refused:
        return {"success": False, "message": refused.read().decode(errors="replace")}


def _waiting(manager: Any) -> dict[str, Any]:
    """What lies in the buffer of our data source, and how many groups the host's prompts have given out.

    Runs in the manager's process.
    """
    source = manager.data_source
    return {
        "groups": source.get_buffer_length(),
        "rollouts": [rollout.to_json() for rollout in source.waiting()],
        "samples": [_fields(sample.to_dict()) for group in source.waiting_groups for sample in group],
        "given_out": source._prompts.source.sample_group_index,
    }


def _fields(sample: dict[str, Any]) -> dict[str, Any]:
    """What the tests see of a sample."""
    return {name: sample[name] for name in _SAMPLE_FIELDS}


class WorkerLogs:
    """What Ray's workers log in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def take(self) -> str:
        """What they logged since the last call."""
        found = []
        for log in sorted(self._folder.glob("session_latest/logs/worker-*")):
            with log.open("rb") as file:
                file.seek(self._read.get(log, 0))
                found.append(file.read().decode(errors="replace"))
                self._read[log] = file.tell()
        return "".join(found)


@contextlib.contextmanager
def _local_ray() -> Iterator[WorkerLogs]:
    """Run Ray on this machine."""
    hook = declare_torchvision_operators
    # Not in the run directory: Ray's sockets need a short path.
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as ray_dir,
        ray.init(
            num_cpus=_LOGICAL_CPUS,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,  # it forwards the last lines late or never
            # Every worker imports the host, and with it torchvision.
            runtime_env={"worker_process_setup_hook": f"{hook.__module__}.{hook.__qualname__}"},
            _temp_dir=ray_dir,
        ),
    ):
        yield WorkerLogs(Path(ray_dir))


def _plain(value: Any) -> Any:
    """JSON has no tensors, no ranges and no notes."""
    if isinstance(value, Note):
        return vars(value)
    return value.tolist() if isinstance(value, torch.Tensor) else list(value)


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Run the jobs that `settings` describe; returns what the rollouts of each returned, in order."""
    declare_torchvision_operators()
    router_log = Path(settings["result"]).with_name("router.log")
    results = []
    with router_before(settings["engine_url"], router_log) as router, _local_ray() as logs:
        for job_settings in settings["jobs"]:
            run_dir = Path(job_settings["run_dir"])
            args = parse_host_args(
                settings["host"],
                Path(settings["checkpoint"]),
                router,
                job_settings["flags"],
                job_settings["midstream"],
                run_dir,
            )
            try:
                job = Job(settings["host"], settings["engine_url"], job_settings, args)
                results.append(_run(job, job_settings))
            finally:
                (run_dir / "host.log").write_text(logs.take())
    return {"jobs": results}


def _run(job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    rollouts = []
    for rollout_id in range(settings["rollouts"]):
        reloaded = job.restart(rollout_id - 1) if rollout_id in settings["restart_before"] else None
        rollouts.append({**job.rollout(rollout_id), "reloaded": reloaded})
    job.end()
    return {"rollouts": rollouts}


if __name__ == "__main__":
    all_settings = json.loads(Path(sys.argv[1]).read_text())
    Path(all_settings["result"]).write_text(json.dumps(run(all_settings), default=_plain))
