"""Whatever is killed, and whenever: the next start finds every acknowledged snapshot, and leaves nothing else.

`MIDSTREAM_SOAK=70 python -m pytest tests/envs/kills` kills each kind of job so often, 210 times in all.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from midstream.envs.pool.inventory import inventory
from midstream.envs.pool.reaper import reap
from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.isolation.cgroups import list_leftover_cgroups
from midstream.envs.sandboxes.processes import descendants
from midstream.envs.workspace import WorkspaceFactory
from tests.envs.conftest import isolation_or_skip
from tests.envs.kills.job import TASK, config
from tests.envs.started import read_command, wait_until_gone

ROOT = Path(__file__).parents[3]
KILLS = int(os.environ.get("MIDSTREAM_SOAK", "2"))
CHECKED = 6


@pytest.mark.parametrize(
    ("backend", "isolation"), [("overlay", "bubblewrap"), ("store", "bubblewrap"), ("store", "none")]
)
def test_kill_9_at_any_moment_loses_and_leaves_nothing(
    backend: str, isolation: str, loop: asyncio.Runner, tmp_path: Path
) -> None:
    isolation_or_skip(isolation)
    (sandboxes := tmp_path / "sandboxes").mkdir()
    arguments = [str(tmp_path / "run"), str(sandboxes), backend, isolation]
    for _ in range(KILLS):
        pid, acknowledged, started = killed_job(arguments)
        loop.run(next_start(arguments, acknowledged))
        # The reaper of the next start, which may have been closed before it was through, has had its turn.
        assert left_behind(sandboxes, pid) == []
        assert [described(left) for left in wait_until_gone(started)] == []


def killed_job(arguments: list[str]) -> tuple[int, list[dict[str, Any]], list[int]]:
    """Runs a job and kills a helper of it and then itself.

    Its number, what it had acknowledged and not forgotten, and the processes that it had started.
    """
    job = subprocess.Popen(
        [sys.executable, "-m", "tests.envs.kills.job", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert job.stdout is not None
    try:
        lines = [job.stdout.readline() for _ in range(random.randint(5, 30))]
        if random.random() < 0.5 and (helpers := descendants(job.pid)):
            os.kill(random.choice(helpers), signal.SIGKILL)
        time.sleep(random.random() * 0.2)
        started = descendants(job.pid)
    finally:
        job.kill()
    lines += job.stdout.readlines()
    job.stdout.close()
    job.wait()
    # The kill may have cut the last line.
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    forgotten = {snapshot_id for line in whole for snapshot_id in line.get("forgets", ())}
    acknowledged = [line for line in whole if "snapshot" in line]
    kept = [line for line in acknowledged if line["snapshot"]["id"] not in forgotten]
    return job.pid, kept, started


async def next_start(arguments: list[str], acknowledged: list[dict[str, Any]]) -> None:
    """What the job had acknowledged and not forgotten is there as it was; the store has nothing half done."""
    factory = WorkspaceFactory(config(*arguments))
    try:
        store = factory.backend.store
        assert store.verify() == []
        snapshots = [Snapshot.from_json(line["snapshot"]) for line in acknowledged]
        assert [snapshot.id for snapshot in snapshots if snapshot not in store] == []
        for line in random.sample(acknowledged, min(CHECKED, len(acknowledged))):
            environment = await factory.resume(TASK, Snapshot.from_json(line["snapshot"]))
            assert (await environment.step("cat log")).observation + "\n" == line["log"]
            await environment.close()
        assert factory.counters.restores_bad == 0
    finally:
        await factory.close()


def described(pid: int) -> str:
    """What a process is and does, for whoever has to find out why it is there."""
    status, kernel = (Path(f"/proc/{pid}/{name}").read_text() for name in ("status", "wchan"))
    return f"{pid} {read_command(pid)!r} {status} in {kernel}"


def left_behind(sandboxes: Path, pid: int) -> list[str]:
    """What a reaper still finds, or misses, of the sandboxes of this job."""
    reaped = reap([sandboxes], sandboxes)
    return [
        *reaped.failed,
        *(str(found) for found in inventory([sandboxes], sandboxes)),
        *(str(group) for group in list_leftover_cgroups() if f"+{pid}." in group.name),
        *(str(path) for path in sandboxes.rglob("*") if not path.is_dir()),
    ]
