"""Runs the driver in the host's own environment, once for each host."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from midstream.local.server import EngineServer
from tests.contract import workload

HOSTS = ("miles", "slime")
JOB_TIMEOUT_S = 600.0

HOOKS = {
    "custom_generate_function_path": "midstream.hooks.slime.generate.generate",
    "data_source_path": "midstream.hooks.slime.data_source.DataSource",
    "custom_reward_post_process_path": "midstream.hooks.slime.rewards.post_process",
    "custom_rollout_log_function_path": "midstream.hooks.slime.log.log_rollout",
}

Drive = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session", params=HOSTS)
def host(request: pytest.FixtureRequest) -> str:
    """The package of a host. Skips slime where no checkout of it is named."""
    if request.param == "slime" and not os.environ.get("SLIME_HOME"):
        pytest.skip(
            "real slime is not on the package index: name a checkout in SLIME_HOME to test against it"
        )
    return request.param


@pytest.fixture(scope="session")
def drive(
    host: str,
    repository: Path,
    engine_server: EngineServer,
    engine_checkpoint: Path,
) -> Drive:
    """Call it with jobs; it returns what the host made of each of them, and what it logged meanwhile."""

    def drive(folder: Path, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        settings = {
            "host": host,
            "engine_url": engine_server.url,
            "checkpoint": str(engine_checkpoint),
            "jobs": jobs,
            "result": str(folder / "result.json"),
        }
        (folder / "settings.json").write_text(json.dumps(settings))
        logs = _run_driver(host, repository, folder, [Path(job["run_dir"]) for job in jobs])
        results = json.loads((folder / "result.json").read_text())["jobs"]
        return [{**result, "log": log} for result, log in zip(results, logs, strict=True)]

    return drive


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


def _run_driver(host: str, repository: Path, folder: Path, run_dirs: list[Path]) -> list[str]:
    """Returns what the host logged for each job."""
    python = repository / ".venv-miles" / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(f"{python} is missing: run `make setup-miles`")
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
    if host == "slime":
        environment["PYTHONPATH"] = os.environ["SLIME_HOME"]
    log_path = folder / "driver.log"
    with log_path.open("wb") as log:
        driver = subprocess.Popen(
            [python, Path(__file__).with_name("driver.py"), folder / "settings.json"],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = driver.wait(JOB_TIMEOUT_S * len(run_dirs))
        except BaseException:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
            raise
    host_logs = [run_dir / "host.log" for run_dir in run_dirs]
    logs = [path.read_text(errors="replace") for path in (*host_logs, log_path) if path.exists()]
    assert code == 0, f"the driver ended with {code}; its logs end with:\n" + "\n".join(
        log[-4000:] for log in logs
    )
    return logs[: len(run_dirs)]
