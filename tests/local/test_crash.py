"""A short form of `benchmarks/crash.py`: a real run, killed in several phases, loses and leaves nothing."""

import json
import subprocess
import sys
from pathlib import Path

from tests.local import running

KILLS = 5


def command(repository: Path, run_dir: Path, kills: int) -> list[str]:
    program = [sys.executable, str(repository / "benchmarks" / "crash.py")]
    return [*program, "--json", "--kills", str(kills), "--keep", str(run_dir)]


def test_a_run_that_is_killed_again_and_again_loses_and_leaves_nothing(
    repository: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        command(repository, tmp_path / "run", KILLS),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    found = {target["name"]: target["value"] for target in result["targets"]}
    assert found.pop("kills") == KILLS
    assert set(found.values()) == {0}, result["rows"]


def test_ctrl_c_ends_the_job_its_server_and_its_sandboxes(repository: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with subprocess.Popen(
        command(repository, run_dir, 1000), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            running.wait_until(lambda: process.poll() is None and any(run_dir.glob("*/events/*.jsonl")))
            below = running.descendants(process.pid)
            assert below
            running.interrupt(process)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert running.wait_gone(below) == []
