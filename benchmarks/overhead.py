"""What midstream's generate costs beside a bare loop over the same server.

Both sides ask for the same number of tokens for the same prompts, at the same concurrency, in turn
(A B B A ...) in one process. The first figure is the ratio of their wall-clock times, round by round.

    python benchmarks/overhead.py [--json] [--quick]
"""

import asyncio
import random
import tempfile
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from result import publish, target
from rounds import WARM_UP, Side, interleaved, parse_options, running_engine

from midstream.hooks.slime.generate import generate
from midstream.hooks.slime.settings import engine_of
from midstream.local.rollout import GenerateState
from midstream.local.sample import Sample
from midstream.local.server import EngineServer

PROMPT_TOKENS = 32
TOP_RATIO = 1.03
# Generates for the prompts, and says how many tokens.
Play = Callable[[Namespace, EngineServer, list[list[int]]], Awaitable[int]]


def main() -> None:
    options = parse_options(__doc__)
    requests = 128 if options.quick else 512
    with tempfile.TemporaryDirectory(prefix="midstream-overhead-") as scratch:
        rows = asyncio.run(measure(Path(scratch), rounds=options.rounds, requests=requests))
    ratios = [row["midstream_s"] / row["bare_s"] for row in rows]
    publish([target("overhead of generate", ratios, "ratio", "<=", TOP_RATIO)], rows, as_json=options.json)


async def measure(scratch: Path, *, rounds: int, requests: int) -> list[dict[str, Any]]:
    """Seconds of both sides per round; one server for all."""
    async with running_engine(scratch) as (server, concurrency):
        args = _args(concurrency, server, scratch)

        def side(play: Play) -> Side:
            async def one_round(number: int) -> None:
                generated = await play(args, server, _prompts(requests, seed=number))
                if generated != requests * args.tokens:
                    raise RuntimeError(f"{generated} tokens instead of {requests * args.tokens}")

            return one_round

        sides = {"bare_s": side(_bare_round), "midstream_s": side(_midstream_round)}
        for one_side in sides.values():
            await one_side(WARM_UP)
        fields = {"requests": requests, "tokens": args.tokens}
        try:
            return await interleaved(sides, server, rounds, fields)
        finally:
            await engine_of(args).close()


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
