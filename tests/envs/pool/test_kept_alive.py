"""Sandboxes that nobody uses at the moment: parked ones and spares."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.pool.leases import Lease
from midstream.envs.pool.pool import Pool
from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.protocol import SandboxSpec
from tests.envs.pool.scripted import ScriptedBackend, ScriptedSandbox
from tests.envs.pool.test_pool import SPEC, scripted, until

NewPool = Callable[..., Pool]
TASK = SandboxSpec(files={"a": "1"}, base="task")


def snapshot(number: int, size: int = 10) -> Snapshot:
    return Snapshot(f"s{number}", f"digest-{number}", bytes=size)


async def parked(pool: Pool, number: int, size: int = 10) -> Lease:
    lease = await pool.lease(SPEC)
    scripted(lease).state = snapshot(number, size)
    await pool.park(lease, snapshot(number, size))
    return lease


def test_a_parked_sandbox_goes_on_where_it_was(loop: asyncio.Runner, new_pool: NewPool) -> None:
    pool = new_pool(ScriptedBackend())

    async def body() -> None:
        lease = await parked(pool, 1)
        sandbox = scripted(lease)
        assert sandbox.paused and pool.metrics()["hot"] == 1 and pool.metrics()["in_use"] == 0
        again = await pool.resume(SPEC, snapshot(1))
        assert again.sandbox is sandbox and not sandbox.paused
        # It can be had once; the second resume is a cold one.
        cold = await pool.resume(SPEC, snapshot(1))
        assert cold.sandbox is not sandbox and scripted(cold).state == snapshot(1)
        assert pool.metrics()["hot_hits"] == pool.metrics()["hot_misses"] == 1
        assert pool.metrics()["slots"] == 2

    loop.run(body())


def changed(sandbox: ScriptedSandbox) -> None:
    sandbox.state = snapshot(99)


def died(sandbox: ScriptedSandbox) -> None:
    sandbox.dead = True


@pytest.mark.parametrize("what_happened", [changed, died])
def test_one_that_is_not_as_it_was_parked_is_never_handed_out(
    loop: asyncio.Runner, new_pool: NewPool, what_happened: Callable[[ScriptedSandbox], None]
) -> None:
    backend = ScriptedBackend()
    pool = new_pool(backend)

    async def body() -> None:
        lease = await parked(pool, 1)
        what_happened(scripted(lease))
        again = await pool.resume(SPEC, snapshot(1))
        assert again.sandbox is not lease.sandbox and scripted(again).state == snapshot(1)
        await until(lambda: list(backend.live) == [again.sandbox.id])
        assert pool.metrics()["hot_misses"] == 1

    loop.run(body())


def test_a_backend_that_cannot_pause_parks_all_the_same(loop: asyncio.Runner, new_pool: NewPool) -> None:
    pool = new_pool(ScriptedBackend())

    async def cannot() -> None:
        raise NotImplementedError

    async def body() -> None:
        lease = await pool.lease(SPEC)
        sandbox = scripted(lease)
        sandbox.state, sandbox.pause, sandbox.resume = snapshot(1), cannot, cannot  # type: ignore[method-assign]
        assert await pool.park(lease, snapshot(1))
        assert (await pool.resume(SPEC, snapshot(1))).sandbox is sandbox

    loop.run(body())


def test_beyond_the_number_the_one_parked_longest_ago_goes(loop: asyncio.Runner, new_pool: NewPool) -> None:
    backend = ScriptedBackend()
    pool = new_pool(backend, hot=2)

    async def body() -> None:
        leases = [await parked(pool, number) for number in range(3)]
        assert set(backend.live) == {lease.sandbox.id for lease in leases[1:]}
        assert pool.metrics()["spilled"] == 1 and pool.metrics()["slots"] == 2

    loop.run(body())


def test_beyond_the_bytes_as_many_go_as_must(loop: asyncio.Runner, new_pool: NewPool) -> None:
    backend = ScriptedBackend()
    pool = new_pool(backend, hot_bytes=100)

    async def body() -> None:
        leases = [await parked(pool, number, size) for number, size in enumerate((40, 30, 20))]
        assert pool.metrics()["hot_bytes"] == 90
        fourth = await parked(pool, 4, 60)
        assert set(backend.live) == {leases[2].sandbox.id, fourth.sandbox.id}
        # One that is larger than the budget spills nobody else.
        await parked(pool, 5, 101)
        assert set(backend.live) == {leases[2].sandbox.id, fourth.sandbox.id}
        assert pool.metrics()["spilled"] == 3

    loop.run(body())


def test_whoever_waits_for_a_slot_gets_that_of_a_parked_one(loop: asyncio.Runner, new_pool: NewPool) -> None:
    backend = ScriptedBackend()
    pool = new_pool(backend, max_sandboxes=2)

    async def body() -> None:
        first = await parked(pool, 1)
        await parked(pool, 2)
        held = await pool.lease(SPEC)
        assert first.sandbox.id not in backend.live
        other = await pool.lease(SPEC)
        assert pool.metrics()["hot"] == 0
        waiting = asyncio.create_task(pool.lease(SPEC))
        await until(lambda: pool.metrics()["waiting"] == 1)
        # Parking, too, is a chance for whoever waits already.
        assert not await pool.park(held, snapshot(3))
        await waiting
        await pool.release(other)
        assert pool.metrics()["spilled"] == 3

    loop.run(body())


def test_whoever_waits_in_another_pool_gets_that_of_a_parked_one_here(
    loop: asyncio.Runner, new_pool: NewPool, tmp_path: Path
) -> None:
    here, there = ScriptedBackend(), ScriptedBackend()
    idle = new_pool(here, max_sandboxes=3, warm=1, shared_path=tmp_path / "shared")
    busy = new_pool(there, max_sandboxes=3, shared_path=tmp_path / "shared")

    async def body() -> None:
        idle.prepare(TASK)
        await until(lambda: idle.metrics()["warm"] == 1)
        await parked(idle, 1)
        await idle.lease(SPEC)
        async with asyncio.timeout(20):
            await busy.lease(SPEC)
            assert idle.metrics()["hot"] == 0 and len(here.live) == 2
            await busy.lease(SPEC)
        assert idle.metrics()["warm"] == 0 and len(here.live) == 1

    loop.run(body())


def test_whoever_begins_to_wait_while_one_is_being_parked_gets_its_slot(
    loop: asyncio.Runner, new_pool: NewPool
) -> None:
    pool = new_pool(ScriptedBackend(), max_sandboxes=1)

    async def body() -> None:
        lease = await pool.lease(SPEC)
        pausing, waits = asyncio.Event(), asyncio.Event()

        async def pause() -> None:
            pausing.set()
            await waits.wait()

        scripted(lease).pause = pause  # type: ignore[method-assign]
        parking = asyncio.create_task(pool.park(lease, snapshot(1)))
        await pausing.wait()
        waiting = asyncio.create_task(pool.lease(SPEC))
        await asyncio.sleep(0.02)
        waits.set()
        async with asyncio.timeout(20):
            await asyncio.gather(parking, waiting)

    loop.run(body())


def test_what_will_not_be_resumed_can_be_given_up(loop: asyncio.Runner, new_pool: NewPool) -> None:
    backend = ScriptedBackend()
    pool = new_pool(backend)

    async def body() -> None:
        await parked(pool, 1)
        assert await pool.discard(snapshot(1)) and not backend.live
        assert not await pool.discard(snapshot(1))
        assert pool.metrics()["slots"] == 0

    loop.run(body())


def test_two_parked_in_the_same_state_are_both_kept(loop: asyncio.Runner, new_pool: NewPool) -> None:
    pool = new_pool(ScriptedBackend())

    async def body() -> None:
        both = {(await parked(pool, 1)).sandbox.id for _ in range(2)}
        assert {(await pool.resume(SPEC, snapshot(1))).sandbox.id for _ in range(2)} == both

    loop.run(body())


def test_spares_are_there_after_the_first_of_their_base_and_are_made_up_for(
    loop: asyncio.Runner, new_pool: NewPool
) -> None:
    backend = ScriptedBackend()
    pool = new_pool(backend, warm=2)

    async def body() -> None:
        await pool.lease(TASK)
        await until(lambda: pool.metrics()["warm"] == 2)
        ready = set(backend.live)
        backend.seconds = 0.2
        begun = backend.most_in_flight and len(backend.calls)
        lease = await pool.lease(TASK)
        assert lease.sandbox.id in ready and pool.metrics()["warm_hits"] == 1
        assert len(backend.calls) == begun  # nothing had to be made for it
        backend.seconds = 0.001
        await until(lambda: pool.metrics()["warm"] == 2)
        # Nobody else's.
        other = await pool.lease(SandboxSpec(files={"a": "2"}, base="other"))
        assert other.sandbox.id not in ready

    loop.run(body())


def test_a_spec_of_the_same_base_but_other_contents_gets_no_spare_of_it(
    loop: asyncio.Runner, new_pool: NewPool
) -> None:
    backend = ScriptedBackend()
    pool = new_pool(backend, warm=1)

    async def body() -> None:
        pool.prepare(TASK)
        await until(lambda: pool.metrics()["warm"] == 1)
        spare = next(iter(backend.live))
        lease = await pool.lease(SandboxSpec(files={"a": "changed"}, base="task"))
        assert lease.sandbox.id != spare
        await until(lambda: spare not in backend.live)

    loop.run(body())


def test_a_spare_that_died_is_replaced_and_never_handed_out(loop: asyncio.Runner, new_pool: NewPool) -> None:
    backend = ScriptedBackend()
    pool = new_pool(backend, warm=2)

    async def body() -> None:
        pool.prepare(TASK)
        await until(lambda: pool.metrics()["warm"] == 2)
        for sandbox in backend.live.values():
            sandbox.dead = True
        dead = set(backend.live)
        lease = await pool.lease(TASK)
        assert lease.sandbox.id not in dead
        await until(lambda: pool.metrics()["warm"] == 2 and not dead & backend.live.keys())
        assert pool.metrics()["warm_dead"] == 2

    loop.run(body())


def test_spares_are_kept_for_the_bases_asked_for_last(loop: asyncio.Runner, new_pool: NewPool) -> None:
    backend = ScriptedBackend()
    pool = new_pool(backend, warm=1, warm_bases=2)

    async def body() -> None:
        for name in ("a", "b", "c"):
            pool.prepare(SandboxSpec(base=name))
        await until(lambda: pool.metrics()["warm"] == 2)
        await until(lambda: len(backend.live) == 2)
        assert len(backend.calls) == 2 or pool.metrics()["slots"] == 2
        for name in ("b", "c"):
            await pool.lease(SandboxSpec(base=name))
        assert pool.metrics()["warm_hits"] == 2

    loop.run(body())


def test_spares_take_no_slot_from_those_who_wait_and_give_theirs_up(
    loop: asyncio.Runner, new_pool: NewPool
) -> None:
    backend = ScriptedBackend()
    pool = new_pool(backend, max_sandboxes=3, warm=3)

    async def body() -> None:
        pool.prepare(TASK)
        await until(lambda: pool.metrics()["warm"] == 3)
        leases = [await pool.lease(SPEC) for _ in range(3)]
        assert pool.metrics()["warm"] == 0
        for lease in leases:
            await pool.release(lease)
        await until(lambda: pool.metrics()["warm"] == 3)

    loop.run(body())


def test_spares_are_not_made_in_an_outage(loop: asyncio.Runner, new_pool: NewPool) -> None:
    backend = ScriptedBackend()
    backend.outage = lambda: EnvironmentFailure("no disk")
    pool = new_pool(backend, warm=2)

    async def body() -> None:
        pool.prepare(TASK)
        await until(lambda: pool.metrics()["failures_transient"] >= 2)
        asked = len(backend.calls)
        await asyncio.sleep(0.2)
        assert len(backend.calls) == asked and pool.metrics()["slots"] == 0

    loop.run(body())
