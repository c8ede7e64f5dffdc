"""A comparison that was killed goes on where its last checkpoint was, and counts nothing twice."""

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from midstream.buffers.journal.errors import JournalInUse
from midstream.buffers.journal.lock import DirectoryLock
from midstream.conf.compose import compose_runs
from midstream.conf.errors import ConfigError
from midstream.local.checkpoint import LATEST_FILE
from midstream.local.compare import LOCK_FILE, compare
from midstream.local.events import read_run
from midstream.local.progress import SilentProgress
from tests.local import running

ARGUMENTS = ("--strategies", "wait,continue", "--steps", "4", "save_every=1")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a comparison whose second strategy was killed after a checkpoint."""
    run_dir = tmp_path_factory.mktemp("resume") / "run"
    with running.started(run_dir, *ARGUMENTS) as process:
        latest = run_dir / "continue" / "checkpoints" / LATEST_FILE
        running.wait_until(lambda: latest.exists() and latest.read_text() in ("1", "2"))
        below = running.descendants(process.pid)
        process.kill()
        process.wait()
    assert running.wait_gone(below) == []
    return run_dir


def test_other_settings_are_refused_by_their_names(killed: Path) -> None:
    for_the_machine = "server.launch_timeout_s=900"  # no result depends on it
    done = running.run(killed, *ARGUMENTS, "--resume", "trainer.lr=1e-4", for_the_machine, "--seed", "5")
    assert done.returncode == 2
    assert "trainer.lr: got 0.0001; use 0.0003" in done.stderr
    assert "seed: got 5; use 0" in done.stderr
    assert "launch_timeout_s" not in done.stderr


def test_a_used_directory_needs_to_be_resumed_explicitly(killed: Path) -> None:
    done = running.run(killed, *ARGUMENTS)
    assert done.returncode == 2
    assert "--resume" in done.stderr


def test_a_second_comparison_in_the_directory_is_refused_at_its_start(tmp_path: Path) -> None:
    runs = compose_runs(["job=smoke", f"run_dir={tmp_path}"])
    with (
        closing(DirectoryLock(tmp_path, LOCK_FILE)),
        pytest.raises(JournalInUse, match=f"{tmp_path} is in use by process {os.getpid()} on"),
    ):
        compare(runs, progress=SilentProgress())
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    runs = compose_runs(["job=smoke", f"run_dir={tmp_path}/file/run"])
    with pytest.raises(ConfigError, match="run_dir: got '.*; name a directory that can be made"):
        compare(runs, progress=SilentProgress())


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    done = running.run(tmp_path / "nothing", *ARGUMENTS, "--resume")
    assert done.returncode == 2
    assert "nothing to resume" in done.stderr
    assert not (tmp_path / "nothing").exists()


def test_it_goes_on_at_the_last_checkpoint(killed: Path) -> None:
    waited = (killed / "wait" / "events").glob("*.jsonl")
    before = {path: path.read_bytes() for path in waited}
    checkpoint = int((killed / "continue" / "checkpoints" / LATEST_FILE).read_text())
    done = running.run(killed, *ARGUMENTS, "--resume", "--json")
    assert done.returncode == 0, done.stderr
    wait, resumed = json.loads(done.stdout)["runs"]

    assert (wait["strategy"], wait["status"], wait["steps"]) == ("wait", "ok", 4)
    assert {path: path.read_bytes() for path in (killed / "wait" / "events").glob("*.jsonl")} == before

    assert (resumed["strategy"], resumed["status"], resumed["steps"]) == ("continue", "ok", 4)
    assert (resumed["restores_bad"], resumed["trained_rollouts"]) == (0, 4 * 16)
    recorded = read_run(killed / "continue")
    first, second = recorded.parts
    assert (first["resumed_at"], second["resumed_at"]) == (None, checkpoint + 1)
    assert [step["step"] for step in recorded.steps] == [0, 1, 2, 3]
    starts = [step["rollout_start"] for step in recorded.steps]
    assert starts == sorted(starts) and starts[checkpoint + 1] >= second["elapsed_s"] > 0
    trained = [group for step in recorded.steps for group in step["trained_groups"]]
    assert len(set(trained)) == len(trained) == 4 * 4
    generated = sum(step["generated_tokens"] for step in recorded.steps)
    assert resumed["generated_tokens"] == generated
    kept = sum(step["trained_tokens"] + step["wasted_tokens"] for step in recorded.steps)
    assert generated == kept + recorded.steps[3]["buffered_tokens"]

    again = running.run(killed, *ARGUMENTS, "--resume", "--json")
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout
