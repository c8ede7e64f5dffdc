"""A scripted engine behind real HTTP and an environment with one number for a state.

They stand in for SGLang and a sandbox only where a test needs to decide when a call is cut off; the same
paths run on the real ones in tests/local and tests/contract.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from midstream.envs.errors import EnvironmentFailure, SnapshotMissing, WorkspaceLimit
from midstream.envs.protocol import Observation, Snapshot, Step, Task

WORDS = ["<end>", "add", "slow", "done", "break", "obs"] + [str(number) for number in range(30)]
IDS = {word: index for index, word in enumerate(WORDS)}


class WordTokenizer:
    """One token per word; ``<end>`` is special."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [IDS[word] for word in text.split()]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return " ".join(WORDS[i] for i in token_ids if not (skip_special_tokens and i == 0))


@dataclass
class ScriptedEngine:
    """Answers ``/generate`` with the next of ``answers``: words, and how the call ends.

    Asked to generate nothing, it says that each token of the input has the log-prob ``known``.
    """

    answers: list[tuple[str, str]]
    version: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    on_request: Callable[[int], None] = lambda number: None
    statuses: list[int] = field(default_factory=list)
    slow_s: float = 0.0
    cached_tokens: int = 0
    raw_answers: list[str] = field(default_factory=list)
    known: float = -0.5
    url: str = ""

    async def _generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if "return_logprob" not in asked:  # only its version is wanted
            return web.json_response({"text": "", "meta_info": {"weight_version": str(self.version)}})
        self.requests.append(asked)
        self.on_request(len(self.requests))
        await asyncio.sleep(self.slow_s)
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            return web.Response(status=status, text="not now")
        if self.raw_answers:
            return web.Response(text=self.raw_answers.pop(0), content_type="application/json")
        if asked["sampling_params"]["max_new_tokens"] == 0:
            return web.json_response(self._measured(asked))
        words, finish = self.answers.pop(0)
        tokens = [IDS[word] for word in words.split()]
        meta_info = {
            "finish_reason": {"type": finish},
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "weight_version": str(self.version),
            "weight_versions": [{"version": str(self.version), "start": 0, "end": len(tokens)}]
            if tokens
            else [],
            "prompt_tokens": len(asked["input_ids"]),
            "cached_tokens": self.cached_tokens,
        }
        return web.json_response({"text": words, "output_ids": tokens, "meta_info": meta_info})

    def _measured(self, request: dict[str, Any]) -> dict[str, Any]:
        tokens = request["input_ids"][request["logprob_start_len"] :]
        pairs = [[None if index == 0 else self.known, token, None] for index, token in enumerate(tokens)]
        return {"text": "", "meta_info": {"finish_reason": {"type": "length"}, "input_token_logprobs": pairs}}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self.url
        finally:
            await runner.cleanup()


@dataclass
class NumberEnvironments:
    """Environments whose state is a number; ``add`` adds one, ``slow`` adds one after a while."""

    slow_s: float = 0.0
    failing_steps: int = 0
    failing_snapshots: int = 0
    snapshot_s: float = 0.0
    failing_starts: int = 0
    failing_closes: int = 0
    closing_s: float = 0.0
    closed: int = 0
    spoiling: str = ""
    slow_starts_s: float = 0.0
    lost_snapshots: set[str] = field(default_factory=set)
    loss: type[EnvironmentFailure] = SnapshotMissing
    live: int = 0
    starts: int = 0
    resumed_from: list[str] = field(default_factory=list)
    executed: list[str] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    resting: list[int] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    async def forget(self, snapshots: list[Snapshot]) -> None:
        self.forgotten += [snapshot.id for snapshot in snapshots]

    async def start(self, task: Task) -> "NumberEnvironment":
        if self.failing_starts:
            self.failing_starts -= 1
            raise EnvironmentFailure("no sandbox to be had")
        await asyncio.sleep(self.slow_starts_s)
        self.starts += 1
        return NumberEnvironment(self, 0)

    async def resume(self, task: Task, snapshot: Snapshot) -> "NumberEnvironment":
        if snapshot.id in self.lost_snapshots:
            raise self.loss(f"snapshot {snapshot.id} is gone")
        self.resumed_from.append(snapshot.id)
        return NumberEnvironment(self, int(snapshot.id))


class NumberEnvironment:
    def __init__(self, owner: NumberEnvironments, number: int) -> None:
        self._owner = owner
        self.number = number
        owner.live += 1

    async def reset(self, task: Task) -> Observation:
        return Observation("")

    async def step(self, action: str) -> Step:
        owner = self._owner
        if action == "break" or owner.failing_steps:
            owner.failing_steps = max(0, owner.failing_steps - 1)
            raise EnvironmentFailure("the sandbox is gone")
        if action == "slow":
            await asyncio.sleep(owner.slow_s)
        owner.executed.append(action)
        self.number += action in ("add", "slow")
        return Step(observation=str(self.number), done=action == "done", reward=None, info={})

    async def snapshot(self) -> Snapshot:
        await asyncio.sleep(self._owner.snapshot_s)
        if self._owner.spoiling and self.number:
            raise WorkspaceLimit(self._owner.spoiling)
        if self._owner.failing_snapshots:
            self._owner.failing_snapshots -= 1
            raise EnvironmentFailure("no room for a snapshot")
        return Snapshot(id=str(self.number), digest=str(self.number), parent=None, changes=(), bytes=1)

    async def score(self) -> float:
        self._owner.scored.append(self.number)
        return float(self.number)

    async def rest(self) -> None:
        self._owner.live -= 1
        self._owner.resting.append(self.number)

    async def close(self) -> None:
        await asyncio.sleep(self._owner.closing_s)
        self._owner.live -= 1
        self._owner.closed += 1
        if self._owner.failing_closes:
            self._owner.failing_closes -= 1
            raise EnvironmentFailure("the sandbox cannot be removed")
