"""Rollouts without end: many at once, turn after turn with a snapshot each, for as long as is asked."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from remains import children_bytes, descriptors, own_bytes

from midstream.conf.schema import LayerConfig
from midstream.envs.errors import AgentFault, EnvironmentFailure
from midstream.envs.protocol import Snapshot, Task
from midstream.envs.workspace import WorkspaceEnvironment, WorkspaceFactory

T = TypeVar("T")

TASKS = 8
FILES = 60
FEWEST_TURNS, MOST_TURNS = 5, 10
# Share of turns after which a rollout is cut off, rests and is resumed.
REST_SHARE = 0.1
# Where an engine would generate the next action: 200 to 600 tokens, 40 a second.
THINK_S = (5.0, 15.0)
REST_S = (0.5, 3.0)
SAMPLES = 60


@dataclass(frozen=True)
class Sample:
    """`at_s` seconds after the start: resident bytes, open descriptors, and rollouts that have a sandbox."""

    at_s: float
    own: int
    children: int
    descriptors: int
    live: int


@dataclass
class Soak:
    """What came of it. Times in seconds; `left` is what was there after the end and not before, by name."""

    backend: str = ""
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    snapshot_s: list[float] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    closed_s: float = 0.0
    left: dict[str, int] = field(default_factory=dict)

    def growth(self, what: str) -> float:
        """`own` or `children` at the end over the same at half-time, each the mean over a tenth of the time."""
        half, tenth = self.seconds / 2, self.seconds / 10
        values = [(sample.at_s, getattr(sample, what)) for sample in self.samples]
        middle = [value for at_s, value in values if half <= at_s < half + tenth]
        last = [value for at_s, value in values if at_s >= self.seconds - tenth]
        return fmean(last) / fmean(middle)

    def live(self) -> list[int]:
        """How many rollouts had a sandbox, sample by sample, in the second half."""
        return [sample.live for sample in self.samples if sample.at_s >= self.seconds / 2]


async def soak(root: Path, rollouts: int, minutes: float, think_s: Sequence[float] = THINK_S) -> Soak:
    """Keeps so many rollouts going; each that ends is followed by another one."""
    found = Soak(seconds=minutes * 60)
    config = {
        "environment": {
            "sandbox_root": str(root / "sandboxes"),
            "isolation": "bubblewrap",
            "pool": {"max_sandboxes": rollouts + rollouts // 10, "hot": rollouts // 10},
        },
        "snapshots": {"path": str(root / "store")},
    }
    factory = WorkspaceFactory(LayerConfig.model_validate(config))
    found.backend = factory.backend.name
    began = time.monotonic()
    deadline = began + found.seconds
    watch = asyncio.create_task(_watch(factory, found, began))
    players = [
        asyncio.create_task(_play_on(factory, random.Random(number), deadline, think_s, found))
        for number in range(rollouts)
    ]
    try:
        await asyncio.gather(*players)
    finally:
        for task in (watch, *players):
            task.cancel()
        await asyncio.gather(watch, *players, return_exceptions=True)
        found.metrics = factory.metrics()
        began = time.monotonic()
        await factory.close()
        found.closed_s = time.monotonic() - began
    return found


async def _play_on(
    factory: WorkspaceFactory, draw: random.Random, deadline: float, think_s: Sequence[float], found: Soak
) -> None:
    # Not all at the same turn at the same time.
    await asyncio.sleep(draw.uniform(0, think_s[1]))
    while time.monotonic() < deadline:
        rollout = _Rollout(factory, draw, think_s, found)
        try:
            await rollout.play(deadline)
        except (AgentFault, EnvironmentFailure) as failure:
            found.failures.append(f"{type(failure).__name__}: {failure}")
        finally:
            await rollout.end()


class _Rollout:
    def __init__(
        self, factory: WorkspaceFactory, draw: random.Random, think_s: Sequence[float], found: Soak
    ) -> None:
        self._factory = factory
        self._draw = draw
        self._think_s = think_s
        self._found = found
        self._task = _task(draw.randrange(TASKS))
        self._environment: WorkspaceEnvironment | None = None
        self._snapshots: list[Snapshot] = []

    async def play(self, deadline: float) -> None:
        """Turns, with a rest now and then, and the score, which tells whether all turns are in the files."""
        self._environment = await self._clocked(self._factory.start(self._task), self._found.start_s)
        turns = self._draw.randint(FEWEST_TURNS, MOST_TURNS)
        for turn in range(turns):
            await asyncio.sleep(self._draw.uniform(*self._think_s))
            if time.monotonic() > deadline:
                self._found.counts["cut short by the end"] += 1
                return
            await self._turn(turn)
            if self._draw.random() < REST_SHARE:
                await self._rest()
        await self._environment.step(f"echo {turns} > expected")
        if await self._environment.score() != 1.0:
            self._found.failures.append("a rollout's files do not hold all of its turns")
        self._found.counts["rollouts"] += 1

    async def end(self) -> None:
        if self._environment is not None:
            await self._environment.close()
        await self._factory.forget(self._snapshots)

    async def _turn(self, turn: int) -> None:
        assert self._environment is not None
        edits = [f"echo 'turn {turn} {self._draw.random()}' >> {_path(n)}" for n in self._edited()]
        command = "; ".join(
            [*edits, f"echo {turn} >> turns", f"echo new > new{turn}", f"rm -f new{turn - 2}"]
        )
        step = await self._clocked(self._environment.step(command), self._found.step_s)
        if step.info["exit_code"] != 0:
            self._found.failures.append(f"a step failed: {step.observation}")
        self._snapshots.append(
            await self._clocked(self._environment.snapshot(), self._found.snapshot_s),
        )
        self._found.counts["turns"] += 1

    async def _rest(self) -> None:
        assert self._environment is not None
        environment, self._environment = self._environment, None
        await environment.rest()
        await asyncio.sleep(self._draw.uniform(*REST_S))
        self._environment = await self._factory.resume(self._task, self._snapshots[-1])
        self._found.counts["rests"] += 1

    def _edited(self) -> list[int]:
        return self._draw.sample(range(FILES), 8)

    async def _clocked(self, work: Awaitable[T], times: list[float]) -> T:
        began = time.perf_counter()
        result = await work
        times.append(time.perf_counter() - began)
        return result


async def _watch(factory: WorkspaceFactory, found: Soak, began: float) -> None:
    """Takes SAMPLES, until the first rollouts end for good."""
    while (at_s := time.monotonic() - began) < found.seconds:
        metrics = factory.metrics()
        live = int(metrics["sandbox/in_use"] + metrics["sandbox/hot"])
        children = await asyncio.to_thread(children_bytes)
        found.samples.append(Sample(at_s, own_bytes(), children, descriptors(), live))
        await asyncio.sleep(found.seconds / SAMPLES)


def _task(number: int) -> Task:
    files = {_path(n): f"def function{n}():\n    return {number}\n" * 20 for n in range(FILES)}
    # Each turn has left its line.
    check = 'test "$(wc -l < turns)" -eq "$(cat expected)"'
    return Task(f"task {number}", None, {"files": files, "eval_cmd": check})


def _path(number: int) -> str:
    return f"src/module{number}.py"
