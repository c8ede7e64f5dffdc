"""Both local backends, each with a store of its own, as on two hosts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.envs.sandboxes.backend import LocalBackend
from midstream.envs.sandboxes.choose import choose_backend
from midstream.envs.store.store import SnapshotStore
from tests.envs.conftest import isolation_or_skip


@pytest.fixture
def backends(tmp_path: Path, loop: asyncio.Runner) -> Iterator[dict[str, LocalBackend]]:
    isolation = isolation_or_skip("bubblewrap")
    made = {}
    for name in ("overlay", "store"):
        root = tmp_path / name
        root.mkdir()
        made[name] = choose_backend(
            name, root, SnapshotStore(root / "snapshots"), isolation, setup_timeout_s=10.0
        )
    yield made
    for backend in made.values():
        loop.run(backend.close())
