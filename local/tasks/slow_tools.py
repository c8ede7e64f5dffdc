"""chain-fix with tools that take their time, as those of a coding agent do: a workload that has a tail.

Every `cat`, `fix` and `submit` waits for a draw from a log-normal distribution, anew at every call: the same
command takes now longer and now less, as builds, tests and shared machines make it. The median is the task's own,
log-normal over the tasks. How many calls a rollout makes has the heavy tail of the chains' length. What is cut off
while it waits has written nothing; run again, it draws again.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import NormalDist

from midstream.local.tasks.chain_fix import SUBMIT, ChainTask, chain_tasks
from midstream.local.tasks.lines import TaskLine, write_lines

TOOLS = ("cat", "fix", SUBMIT)
DRAWS = 64  # quantiles that a task's shell chooses from


@dataclass(frozen=True)
class ToolTimes:
    """Seconds of a call: log-normal, with `spread` and `task_spread` in nats, cut at `longest_s`."""

    median_s: float
    spread: float
    task_spread: float
    longest_s: float

    def quantiles(self, task: random.Random) -> list[float]:
        """DRAWS equally likely durations for one task, ascending; `task` draws how slow the task is."""
        median_s = self.median_s * math.exp(task.gauss(0.0, self.task_spread))
        normal = NormalDist(math.log(median_s), self.spread)
        return [min(self.longest_s, math.exp(normal.inv_cdf((k + 0.5) / DRAWS))) for k in range(DRAWS)]


def write_slow_tasks(path: Path, count: int, times: ToolTimes, *, seed: int, difficulty: float) -> Path:
    """Write `count` tasks as JSONL to `path`, whole or not at all, and return it."""
    draw = random.Random(f"slow-tools/{seed}")
    tasks = islice(chain_tasks(seed=seed, difficulty=difficulty), count)
    return write_lines(path, (slow_task(task, times.quantiles(draw)) for task in tasks))


def slow_task(task: ChainTask, quantiles_s: Sequence[float]) -> TaskLine:
    """The task as a line of the tasks file, with tools that wait."""
    line = task.to_json()
    line["metadata"]["files"][".bashrc"] += _waits(quantiles_s)
    return line


def _waits(quantiles_s: Sequence[float]) -> str:
    """Shell code after chain-fix's own: each of its commands waits first, and `fix` does not sleep besides.

    SRANDOM needs no seed, so that sandboxes which are copies of each other draw differently.
    """
    return f"""\
tool_s=({" ".join(f"{value:.4f}" for value in quantiles_s)})
sleep() {{ :; }}
wait_for_tool() {{ command sleep "${{tool_s[SRANDOM % {len(quantiles_s)}]}}"; }}
for tool in {" ".join(TOOLS)}; do
  eval "chain_$(declare -f "$tool")"
  eval "$tool() {{ wait_for_tool; chain_$tool \\"\\$@\\"; }}"
done
"""
