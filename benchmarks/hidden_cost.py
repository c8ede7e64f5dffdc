"""What snapshots cost a rollout that is played for real: wall-clock with them beside wall-clock without.

A real SGLang server generates every action, a real sandbox executes it; each action is made to edit files, so
that no snapshot is skipped. Both sides play the same rollouts at the same concurrency, in turn (A B B A ...) in
one process. The first figure is the ratio of their wall-clock times, round by round.

    python benchmarks/hidden_cost.py [--json] [--quick]
"""

import argparse
import asyncio
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from result import publish, target

from midstream.conf.compose import compose
from midstream.conf.schema import LayerConfig
from midstream.envs.protocol import Snapshot, Step, Task
from midstream.envs.workspace import WorkspaceEnvironment, WorkspaceFactory
from midstream.hooks.slime.generate import generate
from midstream.hooks.slime.settings import engine_of, environments_of
from midstream.local.model.checkpoint import build_hf_checkpoint
from midstream.local.model.tokenizer import build_tokenizer
from midstream.local.rollout import GenerateState
from midstream.local.sample import Sample
from midstream.local.server import EngineServer

TOP_RATIO = 1.02
TURNS = 6
TOKENS_PER_TURN = 24
FILES = 200
# Every turn edits, adds and deletes, whatever the model said.
COMMAND = (
    'n=$((n+1)); for i in 1 2 3 4 5; do echo "turn $n $RANDOM" >> src/module$((n*7+i)).py; done; '
    "echo log $n > out$n.txt; rm -f out$((n-2)).txt"
)
NOTHING = Snapshot(id="nothing", digest="nothing")


class Editing(WorkspaceEnvironment):
    """Every action edits files."""

    async def step(self, action: str) -> Step:
        return await super().step(COMMAND)


class EditingUnsaved(Editing):
    async def snapshot(self) -> Snapshot:
        return NOTHING


class SavedFactory(WorkspaceFactory):
    environment_class = Editing


class UnsavedFactory(WorkspaceFactory):
    environment_class = EditingUnsaved


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a minute's version: fewer and smaller rounds")
    parser.add_argument("--rounds", type=int, default=None, help="pairs of rounds (default 12, quick 4)")
    options = parser.parse_args()
    rounds = options.rounds or (4 if options.quick else 12)
    rollouts = 64 if options.quick else 192
    with tempfile.TemporaryDirectory(prefix="midstream-hidden-cost-") as scratch:
        rows = asyncio.run(measure(Path(scratch), rounds=rounds, rollouts=rollouts))
    ratios = [row["with_s"] / row["without_s"] for row in rows]
    publish(
        [target("rollouts with snapshots / without", ratios, "ratio", "<=", TOP_RATIO)],
        rows,
        as_json=options.json,
    )


async def measure(scratch: Path, *, rounds: int, rollouts: int) -> list[dict[str, Any]]:
    """Seconds of both sides per round; one server for all."""
    config = compose([f"run_dir={scratch}"])
    checkpoint = build_hf_checkpoint(scratch / "checkpoint", config.model)
    server = EngineServer(config.server, model_path=checkpoint, log_path=scratch / "server.log")
    await asyncio.to_thread(server.start, weight_version=0)
    sides = {
        "with_s": _args(config.server.max_running_requests, server, scratch / "with", "SavedFactory"),
        "without_s": _args(config.server.max_running_requests, server, scratch / "without", "UnsavedFactory"),
    }
    try:
        for args in sides.values():  # warm up
            await _round(args, rollouts // 4)
        rows = []
        for number in range(rounds):
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            row: dict[str, Any] = {"round": number, "rollouts": rollouts, "turns": rollouts * TURNS}
            for name in order:
                server.flush()
                started = time.perf_counter()
                await _round(sides[name], rollouts)
                row[name] = time.perf_counter() - started
            rows.append(row)
        return rows
    finally:
        for args in sides.values():
            await environments_of(args).close()
            await engine_of(args).close()
        await asyncio.to_thread(server.stop)


async def _round(args: Namespace, rollouts: int) -> None:
    async def one(number: int) -> None:
        sample = Sample(prompt="p", tokens=[5] * 16, group_index=0, index=number, metadata=_task().metadata)
        async with args.generate_state.concurrency:
            await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 4096, "ignore_eos": True})
        turns = len(sample.metadata["midstream"]["turns"])
        if turns != TURNS:
            raise RuntimeError(f"a rollout had {turns} turns instead of {TURNS}")

    await asyncio.gather(*(one(number) for number in range(rollouts)))


def _task() -> Task:
    files = {f"src/module{i}.py": f"def function{i}():\n    return {i}\n" * 20 for i in range(FILES)}
    return Task("p", None, {"files": files, "eval_cmd": "true"})


def _args(concurrency: int, server: EngineServer, run_dir: Path, factory: str) -> Namespace:
    layer = LayerConfig.model_validate(
        {
            "run_dir": str(run_dir),
            "environment": {"factory": f"{__name__}:{factory}"},
            "turns": {"max_turns": TURNS, "max_tokens_per_turn": TOKENS_PER_TURN},
        }
    )
    return Namespace(
        sglang_router_ip=server.host,
        sglang_router_port=server.port,
        midstream=layer.model_dump(mode="json"),
        generate_state=GenerateState(build_tokenizer(), asyncio.Semaphore(concurrency)),
    )


if __name__ == "__main__":
    main()
