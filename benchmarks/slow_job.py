"""The local job with slow tools: what the comparisons of strategies and of estimators run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from told import run_jobs

from midstream.conf.compose import compose
from midstream.conf.schema import JobConfig
from midstream.local.events import RunEvents
from midstream.local.tasks.chain_fix import write_tasks
from midstream.local.tasks.slow_tools import ToolTimes, write_slow_tasks

GROUPS, GROUP_SIZE = 4, 8  # of a training step
# Rollouts that are played at once, half as many again as a batch has: `wait` has all of its own in play, and
# `discard` throws away about as much as it does in published jobs.
SLOTS = 48
FULL = 4.0  # groups launched per group needed: enough for a slot to find a rollout whenever it is free
TASKS = 8  # few, so that `wait` too plays all of them several times, and lengths compare on the same mixture
DIFFICULTY = 1.0
# The slowest hundredth of calls takes four times the median (the tasks' own spread apart).
TIMES = ToolTimes(median_s=0.35, spread=0.6, task_spread=0.2, longest_s=5.0)
ABORT_GRACE_S = 0.2  # the default is for calls of seconds


class Bench:
    """Runs variants of the job one after the other on one server and one set of tasks."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        seconds: float,
        *,
        tasks: int = TASKS,
        held_out: int = 0,
        more: Sequence[str] = (),
    ) -> None:
        """`more` are settings of all variants, as on a command line."""
        self._folder = folder
        self._seed = seed
        self._seconds = seconds
        self._held_out = held_out
        self._more = more
        self._tasks = write_slow_tasks(folder / "tasks.jsonl", tasks, TIMES, seed=seed, difficulty=DIFFICULTY)
        # Scoring needs no slow tools.
        self._held_out_tasks = write_tasks(
            folder / "held_out.jsonl", max(held_out, 1), seed=seed, difficulty=DIFFICULTY, split="held_out"
        )

    def run(self, variants: Mapping[str, Sequence[str]]) -> Mapping[str, RunEvents]:
        """What was recorded, by the variant's name; each is what sets its job apart, as on a command line."""
        configs = {name: self._config(own, number) for number, (name, own) in enumerate(variants.items())}
        return run_jobs(configs)

    def _config(self, own: Sequence[str], number: int) -> JobConfig:
        return compose(
            [
                "job=quick",
                f"seed={self._seed}",
                f"run_dir={self._folder}",
                f"midstream.run_dir={self._folder}/{number}",
                "steps=100000",
                f"max_seconds={self._seconds}",
                f"rollout.rollout_batch_size={GROUPS}",
                f"rollout.n_samples_per_prompt={GROUP_SIZE}",
                f"rollout.sglang_server_concurrency={SLOTS}",
                f"tasks.path={self._tasks}",
                f"tasks.held_out={self._held_out}",
                f"tasks.held_out_path={self._held_out_tasks}",
                f"midstream.environment.step_timeout_s={4 * TIMES.longest_s}",
                *self._more,
                *own,
            ]
        )
