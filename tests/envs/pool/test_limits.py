"""Slots and rate, within one process and between processes that are killed."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midstream.envs.errors import SandboxFailure
from midstream.envs.ownership.owners import Owner, this_process
from midstream.envs.pool import limits as limits_module
from midstream.envs.pool.ledger import Ledger
from midstream.envs.pool.limits import Limits, SharedCounts, Slot, reserve

NewLimits = Callable[..., Limits]
KILLS = 30 if os.environ.get("MIDSTREAM_SOAK") else 4

# Holds as many slots as it gets, each for a moment, and says when it began to hold one and when it ended.
HOLDER = """
import asyncio, random, sys, time
from pathlib import Path
from midstream.envs.pool.ledger import Ledger
from midstream.envs.pool.limits import Limits
from midstream.envs.ownership.owners import this_process

async def hold(limits, until):
    while time.time() < until:
        slot = await limits.take(60)
        began = time.time()
        await asyncio.sleep(random.random() * 0.02)
        print("held", began, time.time(), flush=True)
        slot.release()

async def begin(limits, until):
    while time.time() < until:
        await limits.pace(60)
        print("began", time.time(), flush=True)

async def main(what, path, maximum, rate, seconds):
    limits = Limits(int(maximum), float(rate), Path(path), this_process())
    print("ready", flush=True)
    sys.stdin.readline()
    await asyncio.gather(*[what(limits, time.time() + float(seconds)) for _ in range(8)])
    await limits.close()

asyncio.run(main({"hold": hold, "begin": begin}[sys.argv[1]], *sys.argv[2:]))
"""


@pytest.fixture
def new_limits(loop: asyncio.Runner) -> Iterator[NewLimits]:
    made: list[Limits] = []

    def make(maximum: int = 2, rate: float | None = None, shared_path: Path | None = None) -> Limits:
        made.append(Limits(maximum, rate, shared_path, this_process(f"pool{len(made)}")))
        return made[-1]

    yield make
    for limits in made:
        loop.run(limits.close())


@pytest.fixture(params=["own", "shared"])
def limits(request: pytest.FixtureRequest, new_limits: NewLimits, tmp_path: Path) -> Limits:
    return new_limits(shared_path=tmp_path / "shared" if request.param == "shared" else None)


@contextlib.contextmanager
def holders(count: int, *arguments: object) -> Iterator[list[subprocess.Popen[str]]]:
    """So many processes that share a path; killed at the end."""
    command = [sys.executable, "-c", HOLDER, *map(str, arguments)]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(count)]
    try:
        for holder in started:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
        for holder in started:
            assert holder.stdin is not None
            holder.stdin.close()
        yield started
    finally:
        for holder in started:
            holder.kill()
            holder.wait()
            assert holder.stdout is not None
            holder.stdout.close()


def said(holder: subprocess.Popen[str]) -> list[list[float]]:
    assert holder.stdout is not None
    return [[float(word) for word in line.split()[1:]] for line in holder.stdout.read().splitlines()]


def taken_by_another(path: Path, maximum: int) -> list[bool]:
    """What a second pool finds when it asks twice more often than there are slots."""
    other = SharedCounts(path, this_process("other"), maximum)
    found = [other.take() for _ in range(2 * maximum)]
    other.leave()
    return found


def test_reserved_times_are_spread_and_a_late_one_reserves_nothing() -> None:
    assert reserve(0.0, 100.0, 4.0, 1.0) == (100.0, 100.25)
    assert reserve(100.25, 100.0, 4.0, 1.0) == (100.25, 100.5)
    assert reserve(101.5, 100.0, 4.0, 1.0) == (101.5, 101.5)
    assert reserve(101.0, 100.0, 4.0, 1.0) == (101.0, 101.25)


def test_no_more_slots_than_allowed_and_those_who_wait_come_in_order(
    loop: asyncio.Runner, limits: Limits
) -> None:
    async def body() -> list[int]:
        first = [await limits.take(5) for _ in range(2)]
        order: list[int] = []

        async def wait(number: int) -> None:
            slot = await limits.take(30)
            order.append(number)
            slot.release()

        waiting = [asyncio.create_task(wait(number)) for number in range(6)]
        await asyncio.sleep(0.05)
        assert order == [] and limits.waiting == 6 and limits.held == 2
        first[0].release()
        first[0].release()
        await asyncio.gather(*waiting)
        first[1].release()
        return order

    assert loop.run(body()) == list(range(6))
    assert limits.held == 0


def test_waiting_ends_with_the_timeout_and_says_what_to_do(loop: asyncio.Runner, limits: Limits) -> None:
    async def body() -> None:
        slots = [await limits.take(5) for _ in range(2)]
        with pytest.raises(SandboxFailure, match="all 2 sandboxes.*raise max_sandboxes") as failed:
            await limits.take(0.05)
        assert failed.value.kind == "quota"
        for slot in slots:
            slot.release()
        (await limits.take(5)).release()

    loop.run(body())


def test_a_backlog_beyond_the_deadline_fails_at_once_and_reserves_nothing(
    loop: asyncio.Runner, new_limits: NewLimits, tmp_path: Path
) -> None:
    for shared_path in (None, tmp_path):
        limits = new_limits(rate=0.5, shared_path=shared_path)

        async def body(limits: Limits = limits) -> None:
            await limits.pace(0)
            for _ in range(3):
                with pytest.raises(SandboxFailure, match="raise creations_per_s") as failed:
                    await limits.pace(1)
                assert failed.value.kind == "throttled"
                # Had the refused ones been given their time, it would be 4 s and more.
                assert failed.value.retry_after_s is not None and failed.value.retry_after_s <= 2.0

        loop.run(body())


def test_an_idle_one_is_given_up_for_whoever_waits(loop: asyncio.Runner, limits: Limits) -> None:
    async def body() -> None:
        idle = [await limits.take(5) for _ in range(2)]

        async def relieve() -> bool:
            if not idle:
                return False
            idle.pop().release()
            return True

        taken = [await limits.take(5, relieve) for _ in range(2)]
        assert limits.held == 2 and not idle
        for slot in taken:
            slot.release()

    loop.run(body())


def test_cancelled_waits_leak_nothing(loop: asyncio.Runner, limits: Limits) -> None:
    chance = random.Random(1)

    async def one() -> None:
        slot: Slot = await limits.take(30)
        try:
            await asyncio.sleep(chance.random() * 0.002)
        finally:
            slot.release()

    async def body() -> None:
        for _ in range(20):
            tasks = [asyncio.create_task(one()) for _ in range(20)]
            await asyncio.sleep(chance.random() * 0.005)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    loop.run(body())

    async def all_are_free() -> None:
        for slot in [await limits.take(5) for _ in range(2)]:
            slot.release()

    loop.run(all_are_free())
    assert limits.held == 0 and limits.waiting == 0


def test_two_processes_never_hold_more_than_allowed(tmp_path: Path) -> None:
    with holders(2, "hold", tmp_path, 3, 1000, 1.5) as both:
        held = sorted(each for holder in both for each in said(holder))
        assert [holder.wait() for holder in both] == [0, 0]
    assert len(held) > 20
    # Between its two times a slot was held for certain, so that no instant may lie within four of them.
    edges = sorted([(began, 1) for began, _ in held] + [(ended, -1) for _, ended in held])
    most = now = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    assert most == 3


def test_two_processes_together_keep_to_the_rate(tmp_path: Path) -> None:
    rate = 40.0
    before = time.time()
    with holders(2, "begin", tmp_path, 1, rate, 2.0) as both:
        begun = sorted(at for holder in both for [at] in said(holder))
        assert [holder.wait() for holder in both] == [0, 0]
    before = max(before, begun[0] - 1 / rate)
    assert len(begun) > rate
    # The times given out lie 1/rate apart. A busy machine wakes some sleepers late, so that two can begin closer
    # together, but none begins early: until any moment no more have begun than had their time by then. The
    # first of all may itself be late; it is taken to be so by one interval at most.
    for index, at in enumerate(begun):
        assert index <= rate * (at - before) + 1


def test_a_killed_process_leaves_no_slot_taken(tmp_path: Path) -> None:
    chance = random.Random(2)
    for _ in range(KILLS):
        with holders(1, "hold", tmp_path, 3, 1000, 60) as [holder]:
            time.sleep(chance.random() * 0.1)
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            assert taken_by_another(tmp_path, 3) == [True] * 3 + [False] * 3


def test_a_living_process_keeps_its_slots_however_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_module, "SILENT_S", 0.0)
    holder = SharedCounts(tmp_path, this_process("holder"), 3)
    assert [holder.take() for _ in range(2)] == [True, True]
    for _ in range(2):
        assert taken_by_another(tmp_path, 3) == [True] + [False] * 5


def test_slots_of_another_host_come_back_when_it_has_been_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_module, "SILENT_S", 0.2)
    away = Owner(1, 2, 3, "abcdef01", "elsewhere")
    remote = SharedCounts(tmp_path, away, 1)
    assert remote.take()
    here = SharedCounts(tmp_path, this_process(), 1)
    for _ in range(8):
        assert not here.take()
        time.sleep(0.05)
        remote.beat()
    assert not here.take()
    time.sleep(0.25)
    assert here.take()
    # It was only stopped: what it says counts again.
    remote.beat()
    here.give_back()
    assert not here.take()


def test_whoever_waits_is_seen_by_the_others(tmp_path: Path) -> None:
    one, other = (SharedCounts(tmp_path, this_process(), 1) for _ in range(2))
    assert one.take()
    other.waiting = 2
    assert not other.take()
    assert one.beat() == 2


def test_a_clock_that_was_set_back_does_not_hold_everybody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = SharedCounts(tmp_path, this_process(), 1)
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)
    counts.reserve(1.0, 30.0)
    monkeypatch.setattr(time, "time", lambda: 900_000.0)
    assert counts.reserve(1.0, 30.0) == 0.0
    assert counts.reserve(1.0, 30.0) == 1.0


def test_the_file_holds_only_who_lives(tmp_path: Path) -> None:
    with holders(2, "hold", tmp_path, 3, 1000, 60):
        time.sleep(0.1)
    counts = SharedCounts(tmp_path, this_process(), 3)
    counts.take()
    with Ledger(tmp_path / "sandboxes.ledger").changing() as content:
        [(key, entry)] = content["owners"].items()
        assert key.startswith(this_process().label) and entry == [1, 0, 0]
