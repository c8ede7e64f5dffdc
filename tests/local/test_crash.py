"""A short form of `benchmarks/crash.py`: a real run, killed in several phases, loses and leaves nothing."""

import json
import subprocess
import sys
from pathlib import Path

KILLS = 4


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
