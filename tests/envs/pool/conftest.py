"""Pools that are closed at the end of each test, on the loop that they began on."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midstream.envs.pool.pool import Pool
from midstream.envs.pool.settings import PoolSettings
from midstream.envs.sandboxes.protocol import Backend


@pytest.fixture(autouse=True)
def _own_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pool's reaper finds in the temp directory is that of this test."""
    temp = tmp_path / "temp"
    temp.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temp))


@pytest.fixture
def new_pool(loop: asyncio.Runner) -> Iterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def make(backend: Backend, **settings: object) -> Pool:
        pools.append(Pool(backend, PoolSettings(**settings), job="test"))  # type: ignore[arg-type]
        return pools[-1]

    yield make
    for pool in pools:
        loop.run(pool.close())
