"""The set-up's own parts: one step, and the lists of what it installs."""

import re
import subprocess
from pathlib import Path

import pytest


def step(repository: Path, log: Path, *command: str) -> subprocess.CompletedProcess[str]:
    script = repository / "requirements" / "step.sh"
    return subprocess.run(
        [script, log, "[1/1] the thing", *command], capture_output=True, text=True, check=False
    )


def test_a_step_says_what_it_does_and_keeps_the_rest_in_its_log(repository, tmp_path):
    log = tmp_path / "new folder" / "setup.log"
    done = step(repository, log, "echo", "downloading")
    assert done.returncode == 0
    assert re.fullmatch(r"\[1/1\] the thing \.\.\.\n    done in \d+ s\n", done.stdout)
    assert "downloading" in log.read_text()


def test_a_failed_step_shows_why_and_fails(repository, tmp_path):
    log = tmp_path / "setup.log"
    failed = step(repository, log, "bash", "-c", "echo no space left; exit 7")
    assert failed.returncode == 7
    assert "no space left" in failed.stderr
    assert str(log) in failed.stderr


def pins(path: Path) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


@pytest.mark.parametrize("name", ["torch", "engine", "no-deps", "miles"])
def test_versions_fixed_in_a_list_are_those_of_the_constraints(repository, name):
    locked = pins(repository / "requirements" / "constraints.txt")
    listed = pins(repository / "requirements" / f"{name}.txt")
    assert listed
    assert {package: locked.get(package, version) for package, version in listed.items()} == listed
