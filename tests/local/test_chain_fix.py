"""chain-fix: the tasks keep their promises, and the rules in Python are those of the real shell."""

import itertools
import json
import os
import random
import resource
import signal
import statistics
import subprocess
from pathlib import Path

import pytest

from midstream.local.model.tokenizer import SPECIAL_WORDS, VOCABULARY
from midstream.local.tasks.chain_fix import (
    FILES,
    MAX_IDEAL_TURNS,
    SUBMIT,
    ChainTask,
    Split,
    chain_tasks,
    write_tasks,
)
from midstream.local.tasks.chain_world import ChainWorld
from midstream.local.tasks.demonstrations import demonstrations


def first_tasks(
    count: int, *, seed: int = 0, difficulty: float = 0.5, split: Split = "train"
) -> list[ChainTask]:
    return list(itertools.islice(chain_tasks(seed=seed, difficulty=difficulty, split=split), count))


def run_in_bash(task: ChainTask, actions: list[str], workdir: Path) -> tuple[list[str], bool]:
    """Observations of real shell functions on real files, and what the real check says."""
    metadata = task.to_json()["metadata"]
    for name, content in metadata["files"].items():
        (workdir / name).write_text(content)
    script = ". ./.bashrc\n" + "".join(f"{action}\nprintf '\\0'\n" for action in actions)
    shell = subprocess.run(
        ["bash", "--noprofile", "--norc"],
        cwd=workdir,
        input=script,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shell.stderr == ""
    check = subprocess.run(["bash", "-c", metadata["eval_cmd"]], cwd=workdir, check=False)
    assert check.returncode in (0, 1)
    return [answer.strip() for answer in shell.stdout.split("\0")[:-1]], check.returncode == 0


def run_in_python(task: ChainTask, actions: list[str]) -> tuple[list[str], bool]:
    world = ChainWorld(task)
    return [world.step(action) for action in actions], world.solved()


def random_script(task: ChainTask, draw: random.Random) -> list[str]:
    """The solution with actions lost, repeated, and mixed with what a confused model might write."""
    odd = ["fix", "cat", "cat f9", "fix f9", "cat f1 f2", "ok", "next f3", "start f1", "submit f1", "bad end"]
    actions = []
    for action in task.solution():
        if draw.random() < 0.8:
            actions.append(action)
        if draw.random() < 0.3:
            actions.append(draw.choice([*odd, f"fix {draw.choice(FILES)}", f"cat {draw.choice(FILES)}"]))
    return actions


def test_the_solution_succeeds_in_a_real_shell(tmp_path: Path) -> None:
    for index, task in enumerate(first_tasks(12, difficulty=0.2)):
        workdir = tmp_path / str(index)
        workdir.mkdir()
        observations, solved = run_in_bash(task, task.solution(), workdir)
        assert solved
        assert (observations, solved) == run_in_python(task, task.solution())


def test_the_shell_and_the_python_rules_agree(tmp_path: Path) -> None:
    draw = random.Random(0)
    outcomes = []
    for index, task in enumerate(first_tasks(40, seed=1, difficulty=0.0)):
        actions = random_script(task, draw)
        workdir = tmp_path / str(index)
        workdir.mkdir()
        real = run_in_bash(task, actions, workdir)
        assert real == run_in_python(task, actions), actions
        outcomes.append(real[1])
    assert set(outcomes) == {True, False}


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda task: task.solution()[:-1], id="never submitted"),
        pytest.param(lambda task: [f"fix {decoy(task)}", *task.solution()], id="another file changed"),
        pytest.param(lambda task: [f"fix {task.bad_links[0]}", *task.solution()], id="fixed twice"),
        pytest.param(lambda _: [SUBMIT], id="nothing fixed"),
    ],
)
def test_the_check_refuses(spoil, tmp_path: Path) -> None:
    task = next(task for task in first_tasks(50, difficulty=0.1) if 1 < len(task.chain) < len(FILES))
    _, solved = run_in_bash(task, spoil(task), tmp_path)
    assert not solved


def decoy(task: ChainTask) -> str:
    return next(name for name in FILES if name not in task.chain)


def test_a_fix_takes_its_time_and_writes_nothing_before_its_end(tmp_path: Path) -> None:
    task = first_tasks(1)[0]
    name = task.bad_links[0]
    slow = ChainTask(task.chain, task.lines, dict.fromkeys(FILES, 30.0))
    for file, content in slow.to_json()["metadata"]["files"].items():
        (tmp_path / file).write_text(content)
    fixing = subprocess.Popen(
        ["bash", "-c", f". ./.bashrc; fix {name}"], cwd=tmp_path, start_new_session=True
    )
    with pytest.raises(subprocess.TimeoutExpired):
        fixing.wait(timeout=0.5)
    os.killpg(fixing.pid, signal.SIGKILL)
    fixing.wait()
    assert (tmp_path / name).read_text() == task.lines[name] + "\n"


@pytest.mark.parametrize("difficulty", [0.0, 0.5, 1.0])
def test_every_task_can_be_solved_in_time_and_needs_a_fix(difficulty: float) -> None:
    for task in first_tasks(500, difficulty=difficulty):
        assert 3 <= len(task.solution()) <= MAX_IDEAL_TURNS
        assert task.bad_links
        assert run_in_python(task, task.solution())[1]


def test_chains_and_fixes_have_heavy_tails() -> None:
    tasks = first_tasks(2000)
    lengths = sorted(len(task.chain) for task in tasks)
    assert lengths[len(lengths) // 2] <= 2
    assert sum(length >= 6 for length in lengths) >= 0.1 * len(tasks)
    seconds = sorted(sum(task.fix_s[name] for name in task.bad_links) for task in tasks)
    assert statistics.mean(seconds) > 2 * statistics.median(seconds)


def test_long_tasks_are_the_slow_ones() -> None:
    tasks = first_tasks(2000)

    def median_s(shortest: int, longest: int) -> float:
        chosen = [task for task in tasks if shortest <= len(task.chain) <= longest]
        return statistics.median(sum(t.fix_s[name] for name in t.bad_links) for t in chosen)

    assert median_s(6, 8) > 4 * median_s(1, 2)


def test_difficulty_lengthens_chains_and_slows_fixes() -> None:
    easy, hard = first_tasks(1000, difficulty=0.2), first_tasks(1000, difficulty=0.9)
    assert statistics.mean(len(t.chain) for t in hard) > statistics.mean(len(t.chain) for t in easy) + 0.5
    assert statistics.median(min(t.fix_s.values()) for t in hard) > statistics.median(
        min(t.fix_s.values()) for t in easy
    )


def test_difficulty_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"difficulty is 1\.5"):
        first_tasks(1, difficulty=1.5)


def test_seed_and_split_choose_the_tasks() -> None:
    train = first_tasks(50)
    assert train == first_tasks(50)
    for other in (first_tasks(50, seed=1), first_tasks(50, split="held_out")):
        assert sum(a == b for a, b in zip(train, other, strict=True)) == 0


def test_the_tasks_file_has_a_coding_agents_shape(tmp_path: Path) -> None:
    path = write_tasks(tmp_path / "deep" / "tasks.jsonl", 5, seed=3, difficulty=0.5)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [task.prompt for task in first_tasks(5, seed=3)]
    assert all({"files", "pre_commands", "eval_cmd", "workdir"} <= row["metadata"].keys() for row in rows)


def test_a_full_disk_leaves_no_tasks_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_tasks(tmp_path / "tasks.jsonl", 500, seed=0, difficulty=0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_demonstrations_speak_the_models_words_and_slip_often() -> None:
    shown = list(itertools.islice(demonstrations(seed=0), 1000))
    assert {word for transcript in shown for word in transcript.split()} <= set(VOCABULARY)
    tasks = itertools.islice(chain_tasks(seed=0, difficulty=0.5, split="demonstrations"), len(shown))
    solved = [run_in_python(task, actions_of(text))[1] for task, text in zip(tasks, shown, strict=True)]
    assert 0.15 <= statistics.mean(solved) <= 0.4


def actions_of(transcript: str) -> list[str]:
    turns = transcript.split("<act>")[1:]
    actions = [turn.split("<end>")[0].strip() for turn in turns]
    assert not any(word in action for action in actions for word in SPECIAL_WORDS)
    return actions
