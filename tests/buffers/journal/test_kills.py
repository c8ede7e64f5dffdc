"""Whenever a job is killed: after the roll-back to its last checkpoint all groups are there, as they were then.

`MIDSTREAM_SOAK=200 python -m pytest tests/buffers` kills so many jobs, one after the other on one journal.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.status import status_of
from tests.buffers.journal.job import member

ROOT = Path(__file__).parents[3]
KILLS = int(os.environ.get("MIDSTREAM_SOAK", "4"))
LONGEST_S = 0.5


def killed_job(directory: Path, seed: int, last: int) -> list[dict[str, Any]]:
    """Runs a job, kills it after a while, and returns the checkpoints that it told of."""
    command = [sys.executable, "-m", "tests.buffers.journal.job", str(directory), str(seed), str(last)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as job:
        assert job.stdout is not None
        lines = [job.stdout.readline()]
        time.sleep(random.Random(seed).uniform(0, LONGEST_S))
        job.kill()
        lines += job.stdout.readlines()
    return [json.loads(line) for line in lines if line.endswith("\n")]


def test_kill_9_at_any_moment_loses_no_group_and_no_snapshot(tmp_path: Path) -> None:
    last = -1
    for seed in range(KILLS):
        told = killed_job(tmp_path, seed, last)[-1]
        assert status_of(tmp_path).checkpoints[-1] >= told["step"]
        with Journal(tmp_path) as journal:
            restored = journal.roll_back(told["step"])
            assert restored.damaged == ()
            expected = {key: tuple(map(member, numbers)) for key, numbers in told["held"].items()}
            assert {waiting.key: journal.load(waiting.key) for waiting in restored.waiting} == expected
            referred = {s for members in expected.values() for m in members for s in m.summary.snapshots}
            assert referred <= journal.snapshots_in_use()
            assert journal.status().handed.groups == 0
        last = told["step"]
