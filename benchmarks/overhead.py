"""What midstream's generate costs beside a bare loop over the same server.

Both sides ask for the same number of tokens for the same prompts, at the same concurrency, in turn
(A B B A ...) in one process. The first figure is the ratio of their wall-clock times, round by round.

    python benchmarks/overhead.py [--json] [--quick]
"""

import argparse
import asyncio
import random
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import aiohttp
from result import publish, target

from midstream.conf.compose import compose
from midstream.hooks.slime.generate import generate
from midstream.hooks.slime.settings import engine_of
from midstream.local.model.checkpoint import build_hf_checkpoint
from midstream.local.rollout import GenerateState
from midstream.local.sample import Sample
from midstream.local.server import EngineServer

PROMPT_TOKENS = 32
TOP_RATIO = 1.03


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a minute's version: fewer and smaller rounds")
    parser.add_argument("--rounds", type=int, default=None, help="pairs of rounds (default 12, quick 4)")
    options = parser.parse_args()
    rounds = options.rounds or (4 if options.quick else 12)
    requests = 128 if options.quick else 512
    with tempfile.TemporaryDirectory(prefix="midstream-overhead-") as scratch:
        rows = asyncio.run(measure(Path(scratch), rounds=rounds, requests=requests))
    ratios = [row["midstream_s"] / row["bare_s"] for row in rows]
    publish([target("overhead of generate", ratios, "ratio", "<=", TOP_RATIO)], rows, as_json=options.json)


async def measure(scratch: Path, *, rounds: int, requests: int) -> list[dict[str, Any]]:
    """Seconds of both sides per round; one server for all."""
    config = compose([f"run_dir={scratch}"])
    checkpoint = build_hf_checkpoint(scratch / "checkpoint", config.model)
    server = EngineServer(config.server, model_path=checkpoint, log_path=scratch / "server.log")
    await asyncio.to_thread(server.start, weight_version=0)
    try:
        args = _args(config.server.max_running_requests, server, scratch)
        sides = {"bare_s": _bare_round, "midstream_s": _midstream_round}
        for side in sides.values():  # warm up
            await side(args, server, _prompts(requests, seed=-1))
        rows = []
        for number in range(rounds):
            prompts = _prompts(requests, seed=number)
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            row: dict[str, Any] = {"round": number, "requests": requests, "tokens": args.tokens}
            for name in order:
                server.flush()
                started = time.perf_counter()
                generated = await sides[name](args, server, prompts)
                row[name] = time.perf_counter() - started
                if generated != requests * args.tokens:
                    raise RuntimeError(f"{name}: {generated} tokens instead of {requests * args.tokens}")
            rows.append(row)
        await engine_of(args).close()
        return rows
    finally:
        await asyncio.to_thread(server.stop)


async def _bare_round(args: Namespace, server: EngineServer, prompts: list[list[int]]) -> int:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        slots = asyncio.Semaphore(args.concurrency)

        async def one(prompt: list[int]) -> int:
            payload = {"input_ids": prompt, "sampling_params": _sampling(args), "return_logprob": True}
            async with slots, session.post(f"{server.url}/generate", json=payload) as response:
                answer = await response.json()
            pairs = answer["meta_info"]["output_token_logprobs"]
            tokens, log_probs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
            assert len(tokens) == len(log_probs)
            return len(tokens)

        return sum(await asyncio.gather(*(one(prompt) for prompt in prompts)))


async def _midstream_round(args: Namespace, server: EngineServer, prompts: list[list[int]]) -> int:
    slots = asyncio.Semaphore(args.concurrency)

    async def one(prompt: list[int]) -> int:
        sample = Sample(prompt="", tokens=list(prompt), group_index=0, index=0)
        async with slots:
            return int((await generate(args, sample, _sampling(args))).response_length)

    return sum(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def _args(concurrency: int, server: EngineServer, scratch: Path) -> Namespace:
    return Namespace(
        concurrency=concurrency,
        tokens=16,
        sglang_router_ip=server.host,
        sglang_router_port=server.port,
        midstream={
            "run_dir": str(scratch),
            "environment": {"factory": "midstream.envs.single_turn:SingleTurnFactory"},
        },
        generate_state=GenerateState(_TOKENIZER, asyncio.Semaphore(concurrency)),
    )


class _Tokenizer:
    """Prompts are token ids already, and a single turn's text is nobody's command."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return []

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return ""


_TOKENIZER = _Tokenizer()


def _sampling(args: Namespace) -> dict[str, Any]:
    return {"temperature": 1.0, "max_new_tokens": args.tokens, "ignore_eos": True}


def _prompts(count: int, *, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(5, 60) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


if __name__ == "__main__":
    main()
