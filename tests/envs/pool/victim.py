"""A job that a test kills: it leases, parks and forks sandboxes of folders and processes until then.

Run as `python -m tests.envs.pool.victim ROOT SHARED TEMP`; prints a line once its first sandbox is there.
"""

import asyncio
import random
import sys
import tempfile
from pathlib import Path

from midstream.envs.ownership import claims
from midstream.envs.pool.leases import Lease
from midstream.envs.pool.pool import Pool
from midstream.envs.pool.settings import PoolSettings
from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.protocol import SandboxSpec
from tests.envs.pool.scripted import FolderBackend


async def rollout(pool: Pool) -> None:
    while True:
        leases = [await pool.lease(SandboxSpec())]
        leases += [each for each in await pool.fork(SandboxSpec(), START, 2) if isinstance(each, Lease)]
        print("lives", flush=True)
        await asyncio.sleep(random.random() * 0.01)
        for lease in leases:
            await (pool.park(lease, START) if random.random() < 0.3 else pool.release(lease))


async def main(root: Path, shared: Path) -> None:
    settings = PoolSettings(
        max_sandboxes=12, hot=3, shared_path=shared, sandbox_root=root, reap_interval_s=0.05
    )
    pool = Pool(FolderBackend(root), settings, job="victim")
    await asyncio.gather(*[rollout(pool) for _ in range(3)])


START = Snapshot("start", "start")

if __name__ == "__main__":
    tempfile.tempdir = sys.argv[3]
    own = Path(tempfile.mkdtemp(prefix=claims.temp_prefix()))
    (own / "file").write_text("content")
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
