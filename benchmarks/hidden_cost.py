"""What snapshots cost a rollout that is played for real: wall-clock with them beside wall-clock without.

A real SGLang server generates every action, a real sandbox executes it; each action is made to edit files, so
that no snapshot is skipped. Both sides play the same rollouts at the same concurrency, in turn (A B B A ...) in
one process. The first figure is the ratio of their wall-clock times, round by round.

    python benchmarks/hidden_cost.py [--json] [--quick]
"""

import asyncio
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from result import publish, target
from rounds import WARM_UP, Side, interleaved, parse_options, running_engine

from midstream.conf.schema import LayerConfig
from midstream.envs.protocol import Snapshot, Step, Task
from midstream.envs.workspace import WorkspaceEnvironment, WorkspaceFactory
from midstream.hooks.slime.generate import generate
from midstream.hooks.slime.settings import engine_of, environments_of
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
TASK = Task(
    "p",
    None,
    {
        "files": {f"src/module{i}.py": f"def function{i}():\n    return {i}\n" * 20 for i in range(FILES)},
        "eval_cmd": "true",
    },
)


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
    options = parse_options(__doc__)
    rollouts = 64 if options.quick else 192
    with tempfile.TemporaryDirectory(prefix="midstream-hidden-cost-") as scratch:
        rows = asyncio.run(measure(Path(scratch), rounds=options.rounds, rollouts=rollouts))
    ratios = [row["with_s"] / row["without_s"] for row in rows]
    publish(
        [target("rollouts with snapshots / without", ratios, "ratio", "<=", TOP_RATIO)],
        rows,
        as_json=options.json,
    )


async def measure(scratch: Path, *, rounds: int, rollouts: int) -> list[dict[str, Any]]:
    """Seconds of both sides per round; one server for all."""
    async with running_engine(scratch) as (server, concurrency):
        both = {
            "with_s": _args(concurrency, server, scratch / "with", "SavedFactory"),
            "without_s": _args(concurrency, server, scratch / "without", "UnsavedFactory"),
        }

        def side(args: Namespace) -> Side:
            return lambda number: _round(args, rollouts // 4 if number == WARM_UP else rollouts)

        sides = {name: side(args) for name, args in both.items()}
        try:
            for one_side in sides.values():
                await one_side(WARM_UP)
            fields = {"rollouts": rollouts, "turns": rollouts * TURNS}
            return await interleaved(sides, server, rounds, fields)
        finally:
            for args in both.values():
                await environments_of(args).close()
                await engine_of(args).close()


async def _round(args: Namespace, rollouts: int) -> None:
    async def one(number: int) -> None:
        sample = Sample(
            prompt="p", tokens=[5] * 16, group_index=0, index=number, metadata=dict(TASK.metadata)
        )
        async with args.generate_state.concurrency:
            await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 4096, "ignore_eos": True})
        turns = len(sample.metadata["midstream"]["turns"])
        if turns != TURNS:
            raise RuntimeError(f"a rollout had {turns} turns instead of {TURNS}")

    await asyncio.gather(*(one(number) for number in range(rollouts)))


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
