"""The pool over the backends of this machine: real shells, real workspaces, real snapshots."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midstream.envs.errors import SandboxFailure
from midstream.envs.pool.leases import Lease
from midstream.envs.pool.pool import Pool
from midstream.envs.sandboxes.backend import LocalBackend
from midstream.envs.sandboxes.choose import BackendName, choose_backend
from midstream.envs.sandboxes.protocol import SandboxSpec
from midstream.envs.store.store import SnapshotStore
from tests.envs.conftest import isolation_or_skip
from tests.envs.pool.test_pool import until
from tests.envs.started import started_here

NewPool = Callable[..., Pool]
TASK = SandboxSpec(files={"notes": "start\n"}, base="task")
TIMEOUT_S = 30.0


@pytest.fixture(params=["store", "overlay"])
def backend(
    request: pytest.FixtureRequest, tmp_path: Path, loop: asyncio.Runner, new_pool: NewPool
) -> Iterator[LocalBackend]:
    name: BackendName = request.param
    root = tmp_path / "sandboxes"
    root.mkdir()
    isolation = isolation_or_skip("bubblewrap")
    try:
        backend = choose_backend(
            name, root, SnapshotStore(tmp_path / "store"), isolation, setup_timeout_s=TIMEOUT_S
        )
    except SandboxFailure as failure:
        pytest.skip(str(failure))
    yield backend
    loop.run(backend.close())


async def said(lease: Lease, command: str) -> str:
    return (await lease.sandbox.exec(command, TIMEOUT_S)).output


def test_a_rollout_that_is_cut_off_goes_on_hot_and_cold(
    loop: asyncio.Runner, new_pool: NewPool, backend: LocalBackend
) -> None:
    pool = new_pool(backend)

    async def body() -> None:
        lease = await pool.lease(TASK)
        await said(lease, "echo one >> notes; mkdir deep; cd deep; export SEEN=1")
        snapshot = await lease.sandbox.snapshot()
        assert await pool.park(lease, snapshot)
        hot = await pool.resume(TASK, snapshot)
        assert hot.sandbox is lease.sandbox and pool.metrics()["hot_hits"] == 1
        look = "cat ../notes; basename $PWD; echo $SEEN"
        assert await said(hot, look) == "start\none\ndeep\n1\n"
        await pool.release(hot)
        cold = await pool.resume(TASK, snapshot)
        assert await said(cold, look) == "start\none\ndeep\n1\n" and pool.metrics()["hot_misses"] == 1

    loop.run(body())
    loop.run(pool.close())


def test_one_in_which_something_went_on_after_the_snapshot_is_not_resumed_hot(
    loop: asyncio.Runner, new_pool: NewPool, backend: LocalBackend
) -> None:
    pool = new_pool(backend)

    async def body() -> None:
        lease = await pool.lease(TASK)
        snapshot = await lease.sandbox.snapshot()
        await said(lease, "echo later >> notes")
        await pool.park(lease, snapshot)
        resumed = await pool.resume(TASK, snapshot)
        assert resumed.sandbox is not lease.sandbox and await said(resumed, "cat notes") == "start\n"

    loop.run(body())
    loop.run(pool.close())


def test_spares_and_forks_are_as_new_and_go_their_own_ways(
    loop: asyncio.Runner, new_pool: NewPool, backend: LocalBackend
) -> None:
    pool = new_pool(backend, warm=2)

    async def body() -> None:
        pool.prepare(TASK)
        await until(lambda: pool.metrics()["warm"] == 2)
        first, second = [await pool.lease(TASK) for _ in range(2)]
        assert pool.metrics()["warm_hits"] == 2
        await said(first, "echo first >> notes")
        assert await said(second, "cat notes") == "start\n"
        snapshot = await first.sandbox.snapshot()
        forks = [each for each in await pool.fork(TASK, snapshot, 4) if isinstance(each, Lease)]
        for number, fork in enumerate(forks):
            await said(fork, f"echo {number} >> notes")
        assert [await said(fork, "cat notes") for fork in forks] == [f"start\nfirst\n{n}\n" for n in range(4)]

    loop.run(body())
    loop.run(pool.close())
    assert pool.metrics()["slots"] == 0


def test_a_spare_whose_shell_was_killed_is_replaced(
    loop: asyncio.Runner, new_pool: NewPool, backend: LocalBackend
) -> None:
    pool = new_pool(backend, warm=1)

    async def body() -> None:
        pool.prepare(TASK)
        await until(lambda: pool.metrics()["warm"] == 1)
        for pid in started_here():
            os.kill(pid, signal.SIGKILL)
        lease = await pool.lease(TASK)
        assert await said(lease, "cat notes") == "start\n"
        assert pool.metrics()["warm_hits"] == 0 and pool.metrics()["warm_dead"] == 1

    loop.run(body())
    loop.run(pool.close())


def test_cancelled_creations_leave_nothing_running(
    loop: asyncio.Runner, new_pool: NewPool, backend: LocalBackend
) -> None:
    pool = new_pool(backend, max_sandboxes=6, creations_in_flight=3)

    async def body() -> None:
        for number in range(12):
            leasing = [asyncio.create_task(pool.lease(TASK)) for _ in range(6)]
            await asyncio.sleep(0.004 * number)
            for task in leasing:
                task.cancel()
            for made in await asyncio.gather(*leasing, return_exceptions=True):
                if isinstance(made, Lease):
                    await pool.release(made)
        await until(lambda: pool.metrics()["slots"] == 0)

    loop.run(body())
    loop.run(pool.close())
    assert started_here() == []
