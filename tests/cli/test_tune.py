"""`midstream tune` as a user meets it, beside a job and without one."""

import json
import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from midstream.buffers.curriculum.state import save
from midstream.buffers.journal.lock import DirectoryLock
from midstream.cli.main import main
from midstream.conf.control.changes import path_of
from midstream.conf.control.job import Control
from midstream.conf.control.tuning import chain_of
from tests.buffers.curriculum.streams import curriculum, prompts
from tests.cli import foretold
from tests.conf.tuned import control_of, layer_config, tuned, write

Said = Callable[..., tuple[int, str, str]]


def take_steps(run_dir: Path, refuses: bool) -> None:
    """A job that takes a step every so often, for ever; at its start or, where it refuses, under other settings."""
    control = control_of(run_dir)
    if refuses:
        control = Control(run_dir, layer_config(run_dir, resume_policy="rewind"))
        (run_dir / "control" / "base.json").write_text(layer_config(run_dir).model_dump_json())
    step = 41
    while True:
        control.read()
        control.acknowledge(step)
        time.sleep(0.05)
        step += 1


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def say(*arguments: object) -> tuple[int, str, str]:
        code = main(["tune", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return say


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose job has stopped."""
    control_of(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def start() -> Iterator[Callable[..., None]]:
    """Starts jobs, each on a run directory."""
    jobs: list[Any] = []

    def begin(run_dir: Path, refuses: bool = False) -> None:
        job = multiprocessing.get_context("fork").Process(target=take_steps, args=(run_dir, refuses))
        job.start()
        jobs.append(job)
        while not (run_dir / "control" / "acknowledged.json").exists():
            time.sleep(0.01)

    yield begin
    for job in jobs:
        job.kill()
        job.join()


@pytest.fixture
def foretelling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "midstream.buffers.curriculum", ModuleType("curriculum"))
    monkeypatch.setitem(sys.modules, "midstream.buffers.curriculum.preview", foretold)


def test_a_change_is_checked_written_waited_for_and_its_step_printed(
    said: Said, start: Callable[..., None], run: Path
) -> None:
    start(run)
    code, out, err = said(run, "curriculum.gate.min_informative=0.4", "midstream.bounds.token=8")
    lines = out.splitlines()
    assert code == 0
    assert lines[:3] == [
        f"{run}: version 1",
        "  bounds.token                     16 → 8",
        "  curriculum.gate.min_informative  0.3 → 0.4",
    ]
    assert lines[3].startswith("taken up at step ") and " in process " in lines[3]
    assert "waiting for the job's next step, which was seen at step " in err
    code, out, _ = said(run, "bounds.token=7", "--json")
    told = json.loads(out)
    assert (code, told["version"], told["changes"]) == (0, 2, {"bounds.token": {"old": 8, "new": 7}})
    assert told["acknowledged"]["version"] == 2 and told["acknowledged"]["step"] > 41
    assert told["refused"] is None
    assert list(run.parent.iterdir()) == [run]


def test_nothing_is_written_where_anything_is_wrong(said: Said, run: Path) -> None:
    code, out, err = said(run, "bounds.token=8", "bounds.tokn=3", "curriculum.gate.explore=7")
    assert (code, out) == (2, "")
    assert "bounds.tokn: got '3'; there is no such key, did you mean bounds.token?" in err
    assert "curriculum.gate.explore: got 7; use 0.5 or less" in err
    assert chain_of(run).entries == ()


def test_what_is_so_already_is_not_written(said: Said, run: Path) -> None:
    assert said(run, "bounds.token=16") == (0, f"{run}: nothing changes, all is so already\n", "")
    assert chain_of(run).entries == ()


def test_a_change_that_no_job_takes_up_stands(said: Said, run: Path) -> None:
    code, out, err = said(run, "bounds.token=8", "--wait", 0.3)
    assert code == 3
    assert "not taken up in time; version 1 stands" in out and "of which nothing was seen yet" in err
    assert chain_of(run).layer.bounds.token == 8
    code, out, _ = said(run, "bounds.token=7", "--wait", 0, "--json")
    assert (code, json.loads(out)["acknowledged"]) == (3, None)
    code, out, err = said(run, "bounds.token=6", "--no-wait")
    assert (code, out, err) == (0, f"{run}: version 3\n  bounds.token  7 → 6\n", "")


def test_a_job_that_may_have_ended_is_told(said: Said, run: Path) -> None:
    control_of(run).acknowledge(3)
    left = "so that its job may have ended"
    assert left in said(run, "bounds.token=8", "--wait", 0)[2]
    (run / "buffer").mkdir()
    lock = DirectoryLock(run / "buffer")
    assert left not in said(run, "bounds.token=7", "--wait", 0)[2]
    lock.close()
    assert left in said(run, "bounds.token=6", "--wait", 0)[2]


def test_a_change_that_the_job_refuses_is_told(said: Said, start: Callable[..., None], run: Path) -> None:
    start(run, refuses=True)
    code, out, _ = said(run, "bounds.environment=4")
    assert code == 3
    assert "refused by the job at step " in out and "policies.rewind.max_lag: got 8" in out
    code, out, _ = said(run, "bounds.environment=5", "--json")
    assert (code, json.loads(out)["version"]) == (3, 2)
    assert "policies.rewind.max_lag" in json.loads(out)["refused"]


def test_ctrl_c_says_that_the_change_stands(run: Path) -> None:
    command = [sys.executable, "-m", "midstream.cli.main", "tune", str(run), "bounds.token=8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tune:
        assert tune.stderr is not None
        assert tune.stderr.readline().startswith("waiting for the job's next step")
        tune.send_signal(signal.SIGINT)
        out, err = tune.communicate()
    assert (tune.returncode, out) == (130, "")
    assert "not waited for; version 1 stands" in err
    assert chain_of(run).layer.bounds.token == 8


def test_undo_goes_back_and_further_back(said: Said, run: Path) -> None:
    for lag in (8, 7):
        tuned(run, f"bounds.token={lag}")
    code, out, _ = said(run, "--undo", "--dry-run")
    assert (code, out) == (0, f"{run}: version 3, which undoes version 2, would be\n  bounds.token  7 → 8\n")
    assert said(run, "--undo", "--no-wait")[:2] == (
        0,
        f"{run}: version 3, which undoes version 2\n  bounds.token  7 → 8\n",
    )
    told = json.loads(said(run, "--undo", "--no-wait", "--json")[1])
    assert (told["version"], told["undoes"], told["changes"]["bounds.token"]["new"]) == (4, 1, 16)
    code, out, err = said(run, "--undo")
    assert (code, out) == (1, "") and "no change left to undo" in err


def test_the_list_shows_what_can_be_changed(said: Said, run: Path) -> None:
    tuned(run, "curriculum.sampler.weights.math=2")
    code, out, _ = said(run, "--list")
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0 and out.startswith(f"{run}: version 1\n")
    assert rows["bounds.deadline_s"].split(maxsplit=3)[1:] == ["null", "null", "number or null, > 0"]
    assert '{"math": 2.0} (the job\'s own: {})' in rows["curriculum.sampler.weights"]
    told = json.loads(said(run, "--list", "--json")[1])
    found = {setting["key"]: setting for setting in told["settings"]}
    assert found.keys() == rows.keys() - {"key", f"{run}:"}
    assert found["curriculum.gate.by"] == {
        "key": "curriculum.gate.by",
        "value": "mean",
        "own": "mean",
        "default": "mean",
        "range": "mean | thompson",
        "meaning": "mean: the probability as it is expected. thompson: as it is under one pass rate drawn from what "
        "is believed.",
    }


def test_the_log_shows_who_changed_what(said: Said, run: Path) -> None:
    assert said(run, "--log")[:2] == (0, f"{run}\nnothing was changed\n")
    tuned(run, "bounds.token=8")
    said(run, "--undo", "--no-wait")
    code, out, _ = said(run, "--log")
    first, second = out.splitlines()[1:]
    who = chain_of(run).valid[0].who
    assert code == 0 and first.startswith("1  20") and first.endswith(f"  {who}  bounds.token 16 → 8")
    assert second.endswith(f"{who}  undoes version 1: bounds.token 8 → 16")


def test_the_log_names_files_that_cannot_be_used(said: Said, run: Path) -> None:
    content = tuned(run, "bounds.token=8").encoded()
    write(run, 2, content.replace(b'"version": 1', b'"version": 2').replace(b"@", b"\\u001b[2J@"))
    write(run, 3, content)
    control = control_of(run)
    control.read()
    control.acknowledge(5)
    code, out, _ = said(run, "--log")
    lines = out.splitlines()
    assert code == 3
    assert "\\x1b[2J@" in lines[2] and "\x1b" not in out
    assert lines[3] == "3  changes nothing: it says that it is version 1"
    assert lines[4].startswith("the job has taken up version 2, seen at step 5, ")
    assert lines[5] == "it refuses 000003.json: it says that it is version 1"
    told = json.loads(said(run, "--log", "--json")[1])
    assert [change["problem"] for change in told["changes"]] == [None, None, "it says that it is version 1"]
    assert told["acknowledged"]["step"] == 5


@pytest.mark.usefixtures("foretelling")
def test_a_dry_run_foretells_and_writes_nothing(said: Said, run: Path) -> None:
    words = (run, "curriculum.gate.min_informative=0.6", "--dry-run")
    code, out, _ = said(*words)
    assert code == 0
    assert out.splitlines() == [
        f"{run}: version 1, would be",
        "  curriculum.gate.min_informative  0.3 → 0.6",
        "what comes of it cannot be foretold: the run has kept no statistics of its prompts yet",
    ]
    (run / "played").touch()
    assert said(*words)[1].splitlines()[2:] == [
        "foretold from what is known of 900 of 1,200 prompts:",
        "  groups that inform, of those played    30 % → 60 %",
        "  prompts played, of those that come up  70 % → 40 %",
    ]
    told = json.loads(said(*words, "--json")[1])
    assert told["dry_run"] and told["effect"]["before"]["informative"] == 0.3
    assert told["effect"]["after"] == {"informative": 0.6, "played": 0.4, "prompts": 1200, "known": 900}
    assert chain_of(run).entries == ()


def test_a_curriculum_that_is_off_is_told(said: Said, tmp_path: Path) -> None:
    control_of(tmp_path / "off", curriculum={"enabled": False})
    idle = "this job has no curriculum, so that of it changes nothing: it needs midstream.curriculum.enabled"
    for last in ("--dry-run", "--no-wait"):
        code, out, _ = said(tmp_path / "off", "curriculum.gate.explore=0.1", last)
        assert (code, out.splitlines()[2:]) == (0, [idle])
    assert idle not in said(tmp_path / "off", "bounds.token=8", "--no-wait")[1]


def test_a_source_that_the_run_does_not_have_is_told(said: Said, run: Path) -> None:
    weights = "curriculum.sampler.weights"
    assert len(said(run, f"{weights}.hopless=0", "--no-wait")[1].splitlines()) == 2
    state = run / "curriculum" / "state.npz"
    save(curriculum(prompts(4, [0, 0, 1, 1], ["easy", "hopeless"])), state)
    _, out, _ = said(run, f"{weights}.maths=2", f"{weights}.easy=3", "--no-wait")
    assert out.splitlines()[2:] == [
        "no prompt is of the source hopless, maths, whose weight counts for nothing: the run has easy, hopeless"
    ]
    state.write_bytes(b"damaged")
    code, out, _ = said(run, f"{weights}.maths=1", "--no-wait")
    assert (code, len(out.splitlines())) == (0, 2)


def test_somebody_quicker_is_named(said: Said, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of(run)
    tuned(run, "bounds.token=9")
    monkeypatch.setattr("midstream.cli.tune_of_run.chain_of", lambda _: chain)
    code, out, err = said(run, "bounds.token=8")
    assert (code, out) == (1, "")
    assert "wrote version 1 at" in err and "(bounds.token 16 → 9); nothing of yours is written" in err
    assert not path_of(run, 2).exists()


def test_the_one_run_in_a_folder_is_found_and_several_are_not_guessed(said: Said, tmp_path: Path) -> None:
    control_of(tmp_path / "runs" / "mine" / "continue")
    assert said(tmp_path / "runs" / "mine", "bounds.token=8", "--no-wait")[0] == 0
    code, _, err = said(tmp_path / "runs", "--list")
    assert code == 1 and f"there is one in {tmp_path}/runs/mine/continue: name it" in err
    control_of(tmp_path / "runs" / "mine" / "wait")
    code, _, err = said(tmp_path / "runs" / "mine", "--list")
    assert code == 1 and "holds 2 runs: name one of" in err and "mine/wait" in err
    (tmp_path / "empty").mkdir()
    code, _, err = said(tmp_path / "empty", "--list")
    assert code == 1 and "its job has not begun, or midstream.run_dir is not set to this directory" in err


@pytest.mark.parametrize(
    "words",
    [[], ["--list", "--undo"], ["--list", "bounds.token=8"], ["--log", "--dry-run"], ["--wait", "-1"]],
)
def test_what_cannot_be_meant_is_refused(said: Said, run: Path, words: list[str]) -> None:
    code, out, err = said(run, *words)
    assert (code, out) == (2, "") and "Usage: midstream tune" in err
