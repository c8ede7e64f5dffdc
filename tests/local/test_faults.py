"""What goes wrong: a clear message, a code that is not zero, and nothing left running."""

import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.local import running


def steps(run_dir: Path, strategy: str) -> list[dict[str, Any]]:
    return [event for event in running.events(run_dir, strategy) if event["kind"] == "step"]


def engine_pid(process: subprocess.Popen[str]) -> int:
    return next(pid for pid, line in running.descendants(process.pid).items() if "engine.launch" in line)


def test_a_dead_server_is_restarted_and_ctrl_c_leaves_the_record_and_nothing_running(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with running.started(run_dir, "--steps", "50", "--strategies", "continue") as process:
        running.wait_until(lambda: steps(run_dir, "continue"))
        os.kill(engine_pid(process), signal.SIGKILL)
        alarm = running.wait_until(
            lambda: [e for e in running.events(run_dir, "continue") if e["kind"] == "alarm"]
        )
        before = len(steps(run_dir, "continue"))
        running.wait_until(lambda: len(steps(run_dir, "continue")) >= before + 2)
        below = running.descendants(process.pid)
        running.interrupt(process)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "the server died; starting it again with policy version" in alarm[0]["message"]
    assert alarm[0]["message"] in errors
    assert "interrupted" in errors and "Traceback" not in errors
    assert running.wait_gone(below) == []
    for step in steps(run_dir, "continue"):
        assert (step["trained_rollouts"], step["restores_bad"]) == (16, 0)
        assert (step["logprob_gap_fresh"] or 0) <= 1e-4
    assert running.events(run_dir, "continue")[-1]["status"] == "interrupted"
    assert json.loads((run_dir / "compare.json").read_text())["runs"][0]["status"] == "interrupted"
    assert (run_dir / "report.html").is_file()


def test_ctrl_c_twice_while_the_server_starts_leaves_nothing_running(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with running.started(run_dir, "--steps", "50", "--strategies", "continue") as process:
        below = running.wait_until(
            lambda: len(running.descendants(process.pid)) > 2 and running.descendants(process.pid)
        )
        running.interrupt(process)
        running.interrupt(process)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert "Traceback" not in errors
        assert running.wait_gone(below) == []


def test_kill_9_leaves_no_process(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with running.started(run_dir, "--steps", "50", "--strategies", "continue") as process:
        running.wait_until(lambda: steps(run_dir, "continue"))
        below = running.descendants(process.pid)
        assert below
        process.kill()
        process.wait()
        assert running.wait_gone(below) == []


def test_a_full_disk_is_named_and_nothing_is_half_written(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Urm", "true"], check=False).returncode:
        pytest.skip("needs unprivileged user namespaces, to mount a disk that is too small")
    disk = tmp_path / "disk"
    disk.mkdir()
    inside = (
        f"mount -t tmpfs -o size=400k tmpfs {disk} && "
        f"{{ {subprocess.list2cmdline(running.command(disk / 'run', '--strategies', 'wait'))}; code=$?; "
        f"find {disk} -name '.*' -type f >&2; exit $code; }}"
    )
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", inside], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "No space left on device" in done.stderr
    assert str(disk) in done.stderr
    assert "Traceback" not in done.stderr
    assert not [line for line in done.stderr.splitlines() if line.startswith(f"{disk}/")], (
        "half-written files"
    )


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = running.run(tmp_path / "run", f"server.port={port}")
    assert done.returncode == 1
    assert f"port {port}" in done.stderr and "server.port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "/nowhere/tasks.jsonl"], ["/nowhere/tasks.jsonl"]),
        (["--strategies", "continu"], ["continu", "did you mean 'continue'"]),
        (["trainer.lr=-1"], ["trainer.lr", "-1"]),
        (["rollout.rollout_batch_sise=4"], ["rollout_batch_sise", "rollout_batch_size"]),
    ],
)
def test_bad_input_is_named(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    done = running.run(tmp_path / "run", *arguments, timeout_s=60)
    assert done.returncode == 2, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_broken_line_of_the_tasks_file_is_named(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    good = {
        "prompt": "start f0 <act>",
        "label": "",
        "metadata": {"files": {}, "pre_commands": [], "eval_cmd": "true"},
    }
    tasks.write_text(json.dumps(good) + "\n" + '{"prompt": "start f1\n')
    done = running.run(tmp_path / "run", "--tasks", str(tasks), timeout_s=60)
    assert done.returncode != 0
    assert f"{tasks}:2" in done.stderr
    assert not (tmp_path / "run").exists()
