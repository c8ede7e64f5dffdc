"""Many isolated sandboxes at once, from a cold pool and from spares, beside as many bare bubblewraps."""

import asyncio
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from remains import available_bytes, children_proportional_bytes, own_bytes

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.pool.leases import Lease
from midstream.envs.pool.pool import Pool
from midstream.envs.pool.settings import PoolSettings
from midstream.envs.sandboxes.backend import LocalBackend
from midstream.envs.sandboxes.choose import choose_backend
from midstream.envs.sandboxes.isolation import choose_isolation
from midstream.envs.sandboxes.isolation.bubblewrap import find_bubblewrap
from midstream.envs.sandboxes.protocol import SandboxSpec
from midstream.envs.store.store import SnapshotStore

IN_FLIGHT = 64
SETUP_TIMEOUT_S = 60.0
EXEC_TIMEOUT_S = 60.0
# A machine on which spares take longer has no place in this.
SPARES_WITHIN_S = 120.0
SPEC = SandboxSpec(
    files={f"src/module{number}.py": f"VALUE = {number}\n" * 20 for number in range(20)}, base="crowd"
)
# What a sandbox has, with as little around it as bubblewrap can do.
BARE = (
    *("--unshare-all", "--die-with-parent", "--as-pid-1", "--ro-bind", "/", "/"),
    *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
    *("bash", "--norc", "--noprofile", "-c", "echo ready; read -r _"),
)


@dataclass
class Crowd:
    """What became of `wanted` sandboxes; times in seconds, memory in bytes per sandbox.

    `left` is what was there after the end and not before, by name.
    """

    wanted: int
    backend: str = ""
    started_s: float = 0.0
    acquired_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)
    closed_s: float = 0.0
    left: dict[str, int] = field(default_factory=dict)


def new_backend(root: Path) -> LocalBackend:
    """The best backend of this machine."""
    isolation = choose_isolation("bubblewrap")
    store = SnapshotStore(root / "store")
    return choose_backend("auto", root / "sandboxes", store, isolation, setup_timeout_s=SETUP_TIMEOUT_S)


async def start_and_close_one(root: Path) -> None:
    """What a process keeps from its first sandbox on is then there."""
    backend = new_backend(root)
    pool = Pool(backend, PoolSettings(warm=1, hot=0, sandbox_root=backend.root))
    try:
        await pool.release(await pool.lease(SPEC))
    finally:
        await pool.close()
        await backend.close()


async def crowd(root: Path, wanted: int) -> Crowd:
    """All alive at once: each is started, and when all are, each computes something."""
    found = Crowd(wanted)
    backend = new_backend(root)
    pool = Pool(
        backend,
        PoolSettings(max_sandboxes=wanted, creations_in_flight=IN_FLIGHT, hot=0, sandbox_root=backend.root),
    )
    found.backend = backend.name
    memory = own_bytes(), available_bytes()
    try:
        began = time.perf_counter()
        leases = await _acquire(pool, wanted, found)
        found.started_s = time.perf_counter() - began
        await asyncio.gather(*(_compute(lease, number, found) for number, lease in enumerate(leases)))
        found.memory = await asyncio.to_thread(_memory_each, memory, wanted)
    finally:
        began = time.perf_counter()
        await pool.close()
        await backend.close()
        found.closed_s = time.perf_counter() - began
    return found


async def _acquire(pool: Pool, wanted: int, found: Crowd) -> list[Lease]:
    """So many leases, IN_FLIGHT asked for at a time."""
    leases: list[Lease] = []
    numbers = iter(range(wanted))

    async def ask() -> None:
        for _ in numbers:
            began = time.perf_counter()
            try:
                leases.append(await pool.lease(SPEC))
            except EnvironmentFailure as failure:
                found.failures.append(str(failure))
            found.acquired_s.append(time.perf_counter() - began)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(IN_FLIGHT):
            tasks.create_task(ask())
    return leases


async def _compute(lease: Lease, number: int, found: Crowd) -> None:
    try:
        result = await lease.sandbox.exec(f"echo $(({number} * 2)); ls src | wc -l", EXEC_TIMEOUT_S)
    except EnvironmentFailure as failure:
        found.failures.append(str(failure))
        return
    if result.output != f"{number * 2}\n20\n":
        found.failures.append(f"a sandbox said {result.output!r}")


async def acquire_spares(root: Path, rounds: int) -> Crowd:
    """IN_FLIGHT acquisitions at once, each time that as many spares lie ready."""
    found = Crowd(rounds * IN_FLIGHT)
    backend = new_backend(root)
    # Half of the slots are for the spares that are made while the others are in use.
    pool = Pool(
        backend, PoolSettings(max_sandboxes=2 * IN_FLIGHT, warm=IN_FLIGHT, hot=0, sandbox_root=backend.root)
    )
    found.backend = backend.name
    try:
        pool.prepare(SPEC)
        for _ in range(rounds):
            async with asyncio.timeout(SPARES_WITHIN_S):
                while pool.metrics()["warm"] < IN_FLIGHT:  # noqa: ASYNC110 (a pool has no such event)
                    await asyncio.sleep(0.05)
            began = time.perf_counter()
            leases = await _acquire(pool, IN_FLIGHT, found)
            found.started_s += time.perf_counter() - began
            await asyncio.gather(*(pool.release(lease) for lease in leases))
        missed = found.wanted - pool.metrics()["warm_hits"]
        if missed:
            found.failures.append(f"{missed:.0f} acquisitions found no spare")
    finally:
        await pool.close()
        await backend.close()
    return found


def bare_bubblewraps(wanted: int) -> Crowd:
    """As many bubblewraps with a bash that says when it is there, started by as many threads as are in flight."""
    program = find_bubblewrap()
    found = Crowd(wanted, "bare bubblewrap")
    started: list[subprocess.Popen[bytes]] = []

    def start(_: int) -> float:
        began = time.perf_counter()
        process = subprocess.Popen([program, *BARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        said = process.stdout.readline()
        if said != b"ready\n":
            found.failures.append(f"a bare bubblewrap said {said!r}")
        return time.perf_counter() - began

    memory = own_bytes(), available_bytes()
    # They die with the thread that started them: it outlives them.
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        try:
            began = time.perf_counter()
            found.acquired_s = list(threads.map(start, range(wanted)))
            found.started_s = time.perf_counter() - began
            found.memory = _memory_each(memory, wanted)
        finally:
            began = time.perf_counter()
            for process in started:
                process.kill()
            for process in started:
                process.communicate()
            found.closed_s = time.perf_counter() - began
    return found


def _memory_each(before: tuple[int, int], count: int) -> dict[str, float]:
    own, available = before
    return {
        "children_pss": children_proportional_bytes() / count,
        "ours": (own_bytes() - own) / count,
        "machine": (available - available_bytes()) / count,
    }
