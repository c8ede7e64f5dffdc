"""A job that a test kills: rollouts in real sandboxes that edit, rest, go on, fork and end, until then.

Run as `python -m tests.envs.kills.job RUN_DIR SANDBOX_ROOT BACKEND ISOLATION`. After each snapshot that was
acknowledged it prints a line: the snapshot as JSON and the content that its file `log` must have; before it forgets
some, it says which.
"""

import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path

from midstream.conf.schema import LayerConfig
from midstream.envs.errors import EnvironmentFailure
from midstream.envs.protocol import Task
from midstream.envs.workspace import WorkspaceFactory

TASK = Task(
    "p", None, {"files": {f"d{i}/f{j}": "x" * 100 for i in range(5) for j in range(4)}, "eval_cmd": "true"}
)


def config(run_dir: str, sandbox_root: str, backend: str, isolation: str) -> LayerConfig:
    environment = {"sandbox_root": Path(sandbox_root), "backend": backend, "isolation": isolation}
    return LayerConfig.model_validate(
        {"run_dir": Path(run_dir), "environment": {**environment, "pool": {"hot": 4, "warm": 1}}}
    )


async def rollout(factory: WorkspaceFactory) -> None:
    while True:
        try:
            await episode(factory)
        except EnvironmentFailure as failure:
            # One of its helpers was killed under it.
            print(json.dumps({"failure": str(failure)}), flush=True)


async def episode(factory: WorkspaceFactory) -> None:
    environment = await factory.start(TASK)
    written, snapshots = "", []
    try:
        for turn in range(random.randint(1, 5)):
            written += f"{turn}\n"
            step = await environment.step(
                f"echo {turn} >> log; echo {random.random()} > d{turn}/new; rm d{turn}/f1; sleep 100 &"
            )
            if step.info["exit_code"] != 0:
                # Without namespaces a kill of the shell looks like a command's own doing.
                raise EnvironmentFailure(f"the shell was killed in a step: {step.info}")
            snapshot = await environment.snapshot()
            snapshots.append(snapshot)
            print(json.dumps({"snapshot": snapshot.to_json(), "log": written}), flush=True)
            if random.random() < 0.5:
                await environment.rest()
                environment = await factory.resume(TASK, snapshot)
        fork = await factory.resume(TASK, snapshot)
        await fork.close()
        await environment.score()
        print(json.dumps({"forgets": [snapshot.id for snapshot in snapshots]}), flush=True)
        await factory.forget(snapshots)
    finally:
        await environment.close()


async def main(arguments: list[str]) -> None:
    factory = WorkspaceFactory(config(*arguments))
    await asyncio.gather(*(rollout(factory) for _ in range(4)))


if __name__ == "__main__":
    tempfile.tempdir = sys.argv[2]
    asyncio.run(main(sys.argv[1:]))
