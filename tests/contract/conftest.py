"""Runs the driver in the host's own environment, once for each host."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from midstream.local.server import EngineServer
from tests.contract.jobs import jobs_of

HOSTS = ("miles", "slime")
JOB_TIMEOUT_S = 600.0

Result = dict[str, Any]


@pytest.fixture(scope="session", params=HOSTS)
def host(request: pytest.FixtureRequest) -> str:
    """The package of a host. Skips slime where no checkout of it is named."""
    if request.param == "slime":
        request.getfixturevalue("slime_home")
    return request.param


@pytest.fixture(scope="session")
def slime_home() -> str:
    """A checkout of slime. Skips where none is named."""
    found = os.environ.get("SLIME_HOME")
    if not found:
        pytest.skip(
            "real slime is not on the package index: name a checkout in SLIME_HOME to test against it"
        )
    return found


@pytest.fixture(scope="session")
def results(
    host: str,
    repository: Path,
    engine_server: EngineServer,
    engine_checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Result]:
    """What the host made of each job, by the job's name, and what it logged meanwhile."""
    folder = tmp_path_factory.mktemp(host)
    jobs = jobs_of(host, folder)
    settings = {
        "host": host,
        "engine_url": engine_server.url,
        "checkpoint": str(engine_checkpoint),
        "jobs": list(jobs.values()),
        "result": str(folder / "result.json"),
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    logs = _run_driver(host, repository, folder, [Path(job["run_dir"]) for job in jobs.values()])
    made = json.loads((folder / "result.json").read_text())["jobs"]
    return {name: {**result, "log": log} for name, result, log in zip(jobs, made, logs, strict=True)}


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
