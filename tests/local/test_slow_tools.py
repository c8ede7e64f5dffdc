"""Tools that take their time, in a real shell."""

import itertools
import json
import random
import statistics
import subprocess
from pathlib import Path

from midstream.local.tasks.chain_fix import chain_tasks
from midstream.local.tasks.slow_tools import ToolTimes, slow_task, write_slow_tasks

TIMES = ToolTimes(median_s=0.3, spread=0.8, task_spread=0.0, longest_s=5.0)


def in_bash(metadata: dict, script: str, workdir: Path) -> subprocess.CompletedProcess[str]:
    for name, content in metadata["files"].items():
        (workdir / name).write_text(content)
    return subprocess.run(
        ["bash", "--noprofile", "--norc"],
        cwd=workdir,
        input=f". ./.bashrc\n{script}\n",
        capture_output=True,
        text=True,
        check=True,
    )


def test_the_solution_still_succeeds_and_every_tool_waits(tmp_path: Path) -> None:
    task = next(chain_tasks(seed=0, difficulty=0.5))
    metadata = slow_task(task, [0.125])["metadata"]
    # The shell's own sleep only says for how long: the waits of all calls, and nothing of chain-fix's own.
    script = "command() { echo waited $2; }\n" + "\n".join(task.solution())
    done = in_bash(metadata, script, tmp_path)
    assert done.stderr == ""
    assert done.stdout.splitlines().count("waited 0.1250") == len(task.solution())
    assert subprocess.run(["bash", "-c", metadata["eval_cmd"]], cwd=tmp_path, check=False).returncode == 0


def test_calls_draw_anew_from_all_quantiles(tmp_path: Path) -> None:
    task = next(chain_tasks(seed=0, difficulty=0.5))
    metadata = slow_task(task, [1.0, 2.0, 3.0])["metadata"]
    script = "command() { echo $2; }\nfor call in {1..200}; do wait_for_tool; done"
    drawn = in_bash(metadata, script, tmp_path).stdout.split()
    assert set(drawn) == {"1.0000", "2.0000", "3.0000"}


def test_quantiles_are_those_of_a_log_normal_distribution() -> None:
    quantiles_s = TIMES.quantiles(random.Random(0))
    assert quantiles_s == sorted(quantiles_s)
    assert abs(statistics.median(quantiles_s) - 0.3) < 0.01
    # One standard deviation above the median lie 84 of 100.
    assert abs(quantiles_s[int(0.8413 * len(quantiles_s))] / 0.3 - 2.2255) < 0.1
    assert max(ToolTimes(0.3, 3.0, 0.0, 5.0).quantiles(random.Random(0))) == 5.0


def test_the_same_seed_writes_the_same_tasks(tmp_path: Path) -> None:
    spread = ToolTimes(0.3, 0.8, 0.5, 5.0)
    first, again, other = (
        write_slow_tasks(tmp_path / str(k), 5, spread, seed=seed, difficulty=0.5).read_text()
        for k, seed in enumerate((0, 0, 1))
    )
    assert first == again != other
    known = [task.prompt for task in itertools.islice(chain_tasks(seed=0, difficulty=0.5), 5)]
    assert [json.loads(line)["prompt"] for line in first.splitlines()] == known
