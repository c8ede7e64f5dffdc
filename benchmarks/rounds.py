"""Two sides of a comparison over one real engine, timed in turn (A B B A ...), so that drift hits both alike."""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from midstream.conf.compose import compose
from midstream.local.model.checkpoint import build_hf_checkpoint
from midstream.local.server import EngineServer

# Plays one round, whose number it is given.
Side = Callable[[int], Awaitable[None]]
# What a warm-up is told that it is.
WARM_UP = -1


def parse_options(
    description: str | None, more: Callable[[argparse.ArgumentParser], object] = lambda _: None
) -> argparse.Namespace:
    """`json`, `quick` and `rounds` of the command line, and what `more` adds."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a minute's version: fewer and smaller rounds")
    parser.add_argument("--rounds", type=int, default=None, help="pairs of rounds (default 12, quick 4)")
    more(parser)
    options = parser.parse_args()
    options.rounds = options.rounds or (4 if options.quick else 12)
    return options


@asynccontextmanager
async def running_engine(scratch: Path) -> AsyncIterator[tuple[EngineServer, int]]:
    """A server with a fresh model, and how many requests it takes at once."""
    config = compose([f"run_dir={scratch}"])
    checkpoint = build_hf_checkpoint(scratch / "checkpoint", config.model)
    server = EngineServer(config.server, model_path=checkpoint, log_path=scratch / "server.log")
    await asyncio.to_thread(server.start, weight_version=0)
    try:
        yield server, config.server.max_running_requests
    finally:
        await asyncio.to_thread(server.stop)


async def interleaved(
    sides: Mapping[str, Side], server: EngineServer, rounds: int, fields: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A row for each round: its number, the fields, and the seconds of each side by name."""
    rows = []
    for number in range(rounds):
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        row: dict[str, Any] = {"round": number, **fields}
        for name in order:
            server.flush()
            started = time.perf_counter()
            await sides[name](number)
            row[name] = time.perf_counter() - started
        rows.append(row)
    return rows
