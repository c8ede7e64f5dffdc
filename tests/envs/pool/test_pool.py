"""The pool over a backend that answers as it is told."""

import asyncio
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from midstream.envs.errors import EnvironmentFailure, SandboxFailure, SnapshotMissing
from midstream.envs.pool.leases import Lease
from midstream.envs.pool.pool import Pool
from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.protocol import SandboxSpec
from tests.envs.pool.scripted import ScriptedBackend, ScriptedSandbox

STORMS = 400 if os.environ.get("MIDSTREAM_SOAK") else 15
NewPool = Callable[..., Pool]
SPEC = SandboxSpec()
SNAPSHOT = Snapshot("s1", "digest-1", bytes=100)
FAST = {"retry_first_s": 0.01, "retry_longest_s": 0.05}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


def scripted(lease: Lease) -> ScriptedSandbox:
    assert isinstance(lease.sandbox, ScriptedSandbox)
    return lease.sandbox


def failures(leases: list[Lease | SandboxFailure]) -> list[str]:
    return [each.kind for each in leases if isinstance(each, SandboxFailure)]


def test_a_lease_is_a_new_sandbox_with_an_owner_and_ends_with_it(
    loop: asyncio.Runner, new_pool: NewPool
) -> None:
    backend = ScriptedBackend()
    pool = new_pool(backend)

    async def body() -> None:
        lease = await pool.lease(SPEC)
        assert lease.owner == pool.owner and backend.owners == {pool.owner}
        assert pool.metrics()["in_use"] == pool.metrics()["slots"] == 1
        await pool.release(lease)
        await pool.release(lease)
        assert not backend.live
        metrics = pool.metrics()
        assert metrics["starts"] == 1 and metrics["in_use"] == metrics["slots"] == 0
        assert metrics["start_seconds_p99"] == metrics["start_seconds_sum"] > 0

    loop.run(body())


def test_number_and_creations_in_flight_stay_within_their_bounds(
    loop: asyncio.Runner, new_pool: NewPool
) -> None:
    backend = ScriptedBackend(seconds=0.005)
    pool = new_pool(backend, max_sandboxes=12, creations_in_flight=4)

    async def rollout() -> None:
        lease = await pool.lease(SPEC)
        await asyncio.sleep(0.003)
        await pool.release(lease)

    async def body() -> None:
        await asyncio.gather(*[rollout() for _ in range(100)])

    loop.run(body())
    assert backend.most_live <= 12 and backend.most_in_flight == 4
    assert not backend.live


async def stormy_rollout(pool: Pool, number: int, seconds: float) -> None:
    """Gets sandboxes in one of the ways, uses them for a while, and gives all back, however it ends."""
    spec = SandboxSpec(base=f"task{number % 2}")
    snapshot = Snapshot(f"s{number % 5}", f"d{number % 5}")
    if number % 4 == 3:
        leases = [each for each in await pool.fork(spec, snapshot, 3) if isinstance(each, Lease)]
    elif number % 4 == 2:
        leases = [await pool.resume(spec, snapshot)]
    else:
        leases = [await pool.lease(spec)]
    try:
        await asyncio.sleep(seconds)
    finally:
        for lease in leases:
            scripted(lease).state = snapshot
        give_back = [pool.release(lease) if number % 4 else pool.park(lease, snapshot) for lease in leases]
        await asyncio.shield(asyncio.gather(*give_back))


@pytest.mark.parametrize("shared", [False, True])
def test_a_storm_of_cancellations_leaks_neither_slot_nor_sandbox(
    loop: asyncio.Runner, new_pool: NewPool, tmp_path: Path, shared: bool
) -> None:
    backend = ScriptedBackend(seconds=0.003)
    shared_path = tmp_path / "shared" if shared else None
    pool = new_pool(
        backend, max_sandboxes=8, creations_in_flight=3, hot=2, warm=1, shared_path=shared_path, **FAST
    )
    chance = random.Random(3)
    backend.outage = lambda: SandboxFailure("broke") if chance.random() < 0.2 else None

    async def storm() -> None:
        tasks = [
            asyncio.create_task(stormy_rollout(pool, number, chance.random() * 0.005)) for number in range(24)
        ]
        await asyncio.sleep(chance.random() * 0.03)
        for task in tasks:
            if chance.random() < 0.8:
                task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError | SandboxFailure)

    def at_rest() -> bool:
        metrics = pool.metrics()
        return metrics["slots"] == metrics["hot"] + metrics["warm"] and metrics["in_use"] == 0

    async def body() -> None:
        for _ in range(STORMS):
            await storm()
        await until(at_rest)
        assert backend.most_live <= 8 and pool.metrics()["waiting"] == 0
        # All slots can be had.
        leases = await asyncio.gather(*[pool.lease(SPEC) for _ in range(8)])
        assert len(backend.live) == 8
        for lease in leases:
            await pool.release(lease)

    loop.run(body())
    loop.run(pool.close())
    assert not backend.live and backend.in_flight == 0
    assert pool.metrics()["slots"] == 0


def test_a_creation_whose_caller_is_gone_keeps_its_slot_until_its_sandbox_is_destroyed(
    loop: asyncio.Runner, new_pool: NewPool
) -> None:
    backend = ScriptedBackend(seconds=0.05)
    pool = new_pool(backend, max_sandboxes=1)

    async def body() -> None:
        leasing = asyncio.create_task(pool.lease(SPEC))
        await until(lambda: backend.in_flight == 1)
        leasing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leasing
        assert pool.metrics()["slots"] == 1
        lease = await pool.lease(SPEC)
        assert list(backend.live) == [lease.sandbox.id] and backend.destroys == 1

    loop.run(body())
    assert backend.most_live == 1


def test_a_sandbox_that_will_not_go_gives_its_slot_back_and_is_asked_again(
    loop: asyncio.Runner, new_pool: NewPool
) -> None:
    backend = ScriptedBackend()
    backend.destroy_failures = 2
    pool = new_pool(backend, max_sandboxes=1, reap_interval_s=0.05)

    async def body() -> None:
        await pool.release(await pool.lease(SPEC))
        assert pool.metrics()["failures_destroy"] == 1 and pool.metrics()["slots"] == 0
        await until(lambda: not backend.live)
        assert backend.destroys == 3

    loop.run(body())


def test_failures_are_retried_by_their_kind_and_counted(loop: asyncio.Runner, new_pool: NewPool) -> None:
    backend = ScriptedBackend(
        failures=[
            SandboxFailure("slow down", "throttled", 0.2),
            SandboxFailure("it broke", "transient"),
            EnvironmentFailure("no process is to be had"),
            SandboxFailure("account full", "quota"),
        ]
    )
    pool = new_pool(backend, **FAST)

    async def body() -> None:
        await pool.release(await pool.lease(SPEC))
        assert backend.calls[1] - backend.calls[0] >= 0.2
        backend.failures.append(SandboxFailure("no such image", "permanent"))
        with pytest.raises(SandboxFailure, match="no such image"):
            await pool.lease(SPEC)
        assert len(backend.calls) == 6

    loop.run(body())
    metrics = pool.metrics()
    assert [metrics[f"failures_{kind}"] for kind in ("throttled", "transient", "quota", "permanent")] == [
        1,
        2,
        1,
        1,
    ]
    assert metrics["slots"] == 0 and metrics["starts"] == 1


def test_a_full_account_is_tried_again_when_a_sandbox_is_given_back(
    loop: asyncio.Runner, new_pool: NewPool
) -> None:
    backend = ScriptedBackend()
    backend.outage = lambda: SandboxFailure("account full", "quota") if len(backend.live) >= 2 else None
    pool = new_pool(backend, max_sandboxes=10, retry_first_s=30.0, retry_longest_s=30.0)

    async def body() -> None:
        held = [await pool.lease(SPEC) for _ in range(2)]
        third = asyncio.create_task(pool.lease(SPEC))
        await until(lambda: pool.metrics()["failures_quota"] == 1)
        await pool.release(held[0])
        async with asyncio.timeout(10):  # long before the next attempt by time alone
            await third
        # A parked one is spilled for it at once.
        await pool.park(held[1], SNAPSHOT)
        async with asyncio.timeout(10):
            await pool.lease(SPEC)
        assert pool.metrics()["spilled"] == 1

    loop.run(body())


def test_a_snapshot_that_is_missing_is_no_outage_and_not_asked_for_again(
    loop: asyncio.Runner, new_pool: NewPool
) -> None:
    backend = ScriptedBackend()
    pool = new_pool(backend, breaker_results=1, breaker_failed_share=0.1)

    async def body() -> None:
        for _ in range(3):
            with pytest.raises(SnapshotMissing):
                await pool.resume(SPEC, Snapshot("missing", "d"))
        with pytest.raises(SnapshotMissing):
            await pool.fork(SPEC, Snapshot("missing", "d"), 6)
        await pool.lease(SPEC)
        assert pool.metrics()["slots"] == len(backend.live) == 1

    loop.run(body())
    assert pool.metrics()["failures_snapshot"] >= 4


def test_a_creation_that_hangs_is_a_failure_that_passes(loop: asyncio.Runner, new_pool: NewPool) -> None:
    backend = ScriptedBackend(seconds=60)
    pool = new_pool(backend, create_timeout_s=0.05, retry_attempts=2, **FAST)

    async def body() -> None:
        with pytest.raises(SandboxFailure, match=r"did not come up within 0.05 s.*attempt 2 of 2"):
            await pool.lease(SPEC)
        assert backend.in_flight == 0 and pool.metrics()["slots"] == 0

    loop.run(body())


def test_in_an_outage_one_probe_asks_and_all_go_on_when_it_is_over(
    loop: asyncio.Runner, new_pool: NewPool
) -> None:
    backend = ScriptedBackend()
    down = True
    backend.outage = lambda: SandboxFailure("no route to host") if down else None
    pool = new_pool(
        backend, breaker_results=4, breaker_open_s=0.1, breaker_longest_s=0.1, retry_attempts=50, **FAST
    )

    async def body() -> None:
        nonlocal down
        waiting = [asyncio.create_task(pool.lease(SPEC)) for _ in range(20)]
        await until(lambda: pool.metrics()["breaker_open"] == 1)
        await asyncio.sleep(0.05)
        asked = len(backend.calls)
        await asyncio.sleep(0.5)
        # Those that were on their way are back: from now on it is one probe in 0.1 s.
        assert len(backend.calls) - asked <= 6
        assert pool.metrics()["waiting"] == 20
        down = False
        await asyncio.gather(*waiting)
        assert pool.metrics()["breaker_open"] == 0

    loop.run(body())
    assert pool.metrics()["breaker_opened"] >= 1


def test_whoever_cannot_wait_for_the_probe_fails_at_once(loop: asyncio.Runner, new_pool: NewPool) -> None:
    backend = ScriptedBackend()
    backend.outage = lambda: SandboxFailure("no route to host")
    pool = new_pool(backend, acquire_timeout_s=2.0, breaker_results=2, breaker_open_s=60.0, **FAST)

    async def body() -> None:
        with pytest.raises(SandboxFailure):
            await pool.lease(SPEC)
        asked = len(backend.calls)
        begun = time.monotonic()
        with pytest.raises(SandboxFailure, match="look after the sandboxes' host or provider"):
            await pool.lease(SPEC)
        assert time.monotonic() - begun < 2.0 and len(backend.calls) == asked
        assert pool.metrics()["slots"] == 0

    loop.run(body())


def test_a_probe_that_is_cancelled_does_not_keep_the_breaker_open(
    loop: asyncio.Runner, new_pool: NewPool
) -> None:
    backend = ScriptedBackend()
    backend.outage = lambda: SandboxFailure("no route to host")
    pool = new_pool(backend, breaker_results=2, breaker_open_s=0.02, retry_attempts=2, **FAST)

    async def body() -> None:
        with pytest.raises(SandboxFailure):
            await pool.lease(SPEC)
        backend.outage = lambda: None
        backend.seconds = 0.05
        probe = asyncio.create_task(pool.lease(SPEC))
        await until(lambda: backend.in_flight == 1)
        probe.cancel()
        async with asyncio.timeout(10):
            await pool.lease(SPEC)

    loop.run(body())


def test_a_lease_past_its_deadline_is_reported_and_its_sandbox_destroyed(
    loop: asyncio.Runner, new_pool: NewPool, caplog: pytest.LogCaptureFixture
) -> None:
    backend = ScriptedBackend()
    pool = new_pool(backend, lease_s=0.5)

    async def body() -> None:
        stuck, beating = [await pool.lease(SPEC) for _ in range(2)]
        while stuck.sandbox.id in backend.live:
            assert pool.heartbeat(beating)
            await asyncio.sleep(0.02)
        assert not pool.heartbeat(stuck)
        assert not await pool.park(stuck, SNAPSHOT)
        await pool.release(stuck)
        assert list(backend.live) == [beating.sandbox.id]
        assert f"sandbox {stuck.sandbox.id} was held" in caplog.text
        assert pool.metrics()["expired"] == pool.metrics()["reaped"] == 1

    loop.run(body())


def test_forks_fail_one_by_one_and_passing_failures_are_tried_again(
    loop: asyncio.Runner, new_pool: NewPool
) -> None:
    # The backend forks four at a time: the second of the first call never works, the third does later.
    script = [
        None,
        SandboxFailure("no such region", "permanent"),
        SandboxFailure("it broke", "transient"),
        *[None] * 20,
    ]
    backend = ScriptedBackend()
    backend.outage = lambda: script.pop(0)
    pool = new_pool(backend, **FAST)

    async def body() -> None:
        leases = await pool.fork(SPEC, SNAPSHOT, 10)
        assert len(leases) == 10 and failures(leases) == ["permanent"]
        assert len(backend.live) == pool.metrics()["slots"] == pool.metrics()["in_use"] == 9
        assert {sandbox.state.id for sandbox in backend.live.values()} == {"s1"}

    loop.run(body())
    assert pool.metrics()["forks"] == 10


def test_forks_beyond_the_number_wait_and_then_fail_one_by_one(
    loop: asyncio.Runner, new_pool: NewPool
) -> None:
    backend = ScriptedBackend()
    pool = new_pool(backend, max_sandboxes=5, acquire_timeout_s=0.3, **FAST)

    async def body() -> None:
        assert failures(await pool.fork(SPEC, SNAPSHOT, 7)) == ["quota", "quota"]
        assert len(backend.live) == pool.metrics()["slots"] == 5

    loop.run(body())


def test_forks_that_need_more_than_there_is_together_come_one_after_the_other(
    loop: asyncio.Runner, new_pool: NewPool
) -> None:
    backend = ScriptedBackend()
    pool = new_pool(backend, max_sandboxes=8)

    async def rollout() -> None:
        leases = [each for each in await pool.fork(SPEC, SNAPSHOT, 5) if isinstance(each, Lease)]
        assert len(leases) == 5
        for lease in leases:
            await pool.release(lease)

    async def body() -> None:
        # Had two of them a part each, they would wait for each other for as long as an acquisition may.
        async with asyncio.timeout(30):
            await asyncio.gather(*[rollout() for _ in range(12)])

    loop.run(body())
    assert backend.most_live <= 8 and not backend.live


def test_no_other_loop_may_use_it(new_pool: NewPool) -> None:
    backend = ScriptedBackend()
    pool = Pool(backend)
    with asyncio.Runner() as first:
        first.run(pool.lease(SPEC))
        with asyncio.Runner() as second, pytest.raises(RuntimeError, match="event loop .* is another one"):
            second.run(pool.lease(SPEC))
        with asyncio.Runner() as second, pytest.raises(RuntimeError, match="close it there"):
            second.run(pool.close())
        first.run(pool.close())
    assert not backend.live


def test_close_ends_those_who_wait_and_all_sandboxes(loop: asyncio.Runner, new_pool: NewPool) -> None:
    backend = ScriptedBackend(seconds=0.01)
    pool = new_pool(backend, max_sandboxes=6, creations_in_flight=1, hot=2, warm=1)

    async def body() -> None:
        parked = await pool.lease(SPEC)
        assert await pool.park(parked, SNAPSHOT)
        pool.prepare(SandboxSpec(base="task"))
        await until(lambda: pool.metrics()["warm"] == 1)
        await pool.lease(SPEC)
        backend.seconds = 0.1
        waiting = [asyncio.create_task(pool.lease(SPEC)) for _ in range(12)]
        await until(lambda: backend.in_flight == 1)
        await asyncio.gather(pool.close(), pool.close())
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, EnvironmentFailure) and "closed" in str(result)
        with pytest.raises(EnvironmentFailure, match="make a new one"):
            await pool.lease(SPEC)

    loop.run(body())
    assert not backend.live and backend.in_flight == 0
    metrics = pool.metrics()
    assert metrics["slots"] == metrics["hot"] == metrics["warm"] == metrics["waiting"] == 0


def test_every_metric_is_there_from_the_start(new_pool: NewPool) -> None:
    metrics = new_pool(ScriptedBackend()).metrics()
    wanted = {
        "starts",
        "start_seconds_p50",
        "start_seconds_p99",
        "in_use",
        "warm",
        "hot",
        "spilled",
        "reaped",
    }
    wanted |= {f"failures_{kind}" for kind in ("throttled", "quota", "transient", "permanent")}
    assert wanted | {"hot_hits", "waiting", "breaker_open"} <= metrics.keys()
    assert set(metrics.values()) == {0.0}
