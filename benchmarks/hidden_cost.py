"""What snapshots cost a rollout that is played for real: wall-clock with them beside wall-clock without.

A real SGLang server generates every action, a real sandbox executes it; each action is made to edit files, so
that no snapshot is skipped. Both sides play the same rollouts at the same concurrency, in turn (A B B A ...) in
one process. The first figures are the part of a rollout's time in which it waits for a snapshot and for nothing
else, and the ratio of the two wall-clock times, round by round; where a machine's speed varies by more than some
per cent from one round to the next, the second says less than the first.

A snapshot is to be hidden behind the engine's work, which it is not where the engine runs on the very cores that
the snapshot takes: the engine is therefore given one half of the cores, and the rest the other half. `--together`
lets all of them use all cores. How much work there is to hide behind depends on how long an action is: the rounds
are played with actions of each of these lengths.

    python benchmarks/hidden_cost.py [--json] [--quick] [--together] [--tokens N ...]
"""

import asyncio
import tempfile
import time
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from cores import apart
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

TOP_SHARE, TOP_RATIO = 0.02, 1.02
TURNS = 6
TOKENS_PER_TURN = (24, 256)
# How long a round is, in tokens.
ROUND_TOKENS, QUICK_ROUND_TOKENS = 36_864, 12_288
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


# Of all rollouts of a round: the seconds that they took, and those of them in which they waited for snapshots.
Waits = dict[str, float]


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
    options = parse_options(__doc__, _add_options)
    targets, rows = [], []
    for tokens in options.tokens:
        with tempfile.TemporaryDirectory(prefix="midstream-hidden-cost-") as scratch:
            measured = asyncio.run(measure(Path(scratch), options, tokens=tokens))
        ratios = [row["with_s"] / row["without_s"] for row in measured]
        where = "engine on the same cores" if options.together else "engine on cores of its own"
        shares = [row["waited_s"] / row["rollouts_s"] for row in measured]
        how = f"{tokens} tokens a turn, {where}"
        targets += [
            target(
                f"part of the rollouts' time in which they wait for snapshots, {how}",
                shares,
                "ratio",
                "<=",
                TOP_SHARE,
            ),
            target(f"rollouts with snapshots / without, {how}", ratios, "ratio", "<=", TOP_RATIO),
        ]
        rows += measured
    publish(targets, rows, as_json=options.json)


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--together", action="store_true", help="let the engine and the rest share all cores")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS_PER_TURN, help="tokens of an action")


async def measure(scratch: Path, options: Namespace, *, tokens: int) -> list[dict[str, Any]]:
    """Seconds of both sides per round; one server for all."""
    round_tokens = QUICK_ROUND_TOKENS if options.quick else ROUND_TOKENS
    async with running_engine(scratch) as (server, concurrency):
        rollouts = max(8, round_tokens // (TURNS * tokens))
        both = {
            "with_s": _args(concurrency, server, scratch / "with", "SavedFactory", tokens),
            "without_s": _args(concurrency, server, scratch / "without", "UnsavedFactory", tokens),
        }

        waits: list[Waits] = []

        def side(name: str) -> Side:
            async def one_round(number: int) -> None:
                waited = await _round(both[name], rollouts // 4 if number == WARM_UP else rollouts)
                if name == "with_s" and number != WARM_UP:
                    waits.append(waited)

            return one_round

        sides = {name: side(name) for name in both}
        assert server.pid is not None
        try:
            with nullcontext() if options.together else apart(server.pid):
                for one_side in sides.values():
                    await one_side(WARM_UP)
                fields = {"tokens": tokens, "rollouts": rollouts, "turns": rollouts * TURNS}
                rows = await interleaved(sides, server, options.rounds, fields)
                return [{**row, **wait} for row, wait in zip(rows, waits, strict=True)]
        finally:
            for args in both.values():
                await environments_of(args).close()
                await engine_of(args).close()


async def _round(args: Namespace, rollouts: int) -> Waits:
    total: Waits = {"rollouts_s": 0.0, "waited_s": 0.0}

    async def one(number: int) -> None:
        sample = Sample(
            prompt="p", tokens=[5] * 16, group_index=0, index=number, metadata=dict(TASK.metadata)
        )
        async with args.generate_state.concurrency:
            began = time.perf_counter()
            await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 4096, "ignore_eos": True})
            total["rollouts_s"] += time.perf_counter() - began
        record = sample.metadata["midstream"]
        total["waited_s"] += record["snapshot_wait_s"]
        if len(record["turns"]) != TURNS:
            raise RuntimeError(f"a rollout had {len(record['turns'])} turns instead of {TURNS}")

    await asyncio.gather(*(one(number) for number in range(rollouts)))
    return total


def _args(concurrency: int, server: EngineServer, run_dir: Path, factory: str, tokens: int) -> Namespace:
    layer = LayerConfig.model_validate(
        {
            "run_dir": str(run_dir),
            "environment": {"factory": f"{__name__}:{factory}"},
            "turns": {"max_turns": TURNS, "max_tokens_per_turn": tokens},
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
