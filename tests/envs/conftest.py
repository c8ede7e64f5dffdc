"""Sandboxes of both kinds, closed at the end of each test."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from midstream.envs.sandboxes.isolation import Isolation, IsolationUnavailable, choose_isolation
from midstream.envs.sandboxes.processes import descendants
from midstream.envs.sandboxes.session import ShellSession
from tests.envs.started import earlier


def isolation_or_skip(name: str) -> Isolation:
    try:
        return choose_isolation(name)
    except IsolationUnavailable as unavailable:
        pytest.skip(str(unavailable))


@pytest.fixture
def bubblewrap() -> Isolation:
    return isolation_or_skip("bubblewrap")


@pytest.fixture(params=["bubblewrap", "none"])
def isolation(request: pytest.FixtureRequest) -> Isolation:
    return isolation_or_skip(request.param)


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    """Runs coroutines one after the other on the same event loop."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def new_sandbox(
    tmp_path: Path, isolation: Isolation, loop: asyncio.Runner
) -> Iterator[Callable[..., ShellSession]]:
    opened: list[ShellSession] = []

    def make(**settings: Any) -> ShellSession:
        directory = tmp_path / f"sandbox{len(opened)}"
        directory.mkdir()
        if isolation.owner is not None:
            os.chown(directory, *isolation.owner)
        opened.append(ShellSession(directory, isolation, **settings))
        return opened[-1]

    yield make
    for sandbox in opened:
        loop.run(sandbox.close())


@pytest.fixture
def sandbox(new_sandbox: Callable[..., ShellSession]) -> ShellSession:
    return new_sandbox()


@pytest.fixture
def bubblewrap_sandbox(tmp_path: Path, bubblewrap: Isolation, loop: asyncio.Runner) -> Iterator[ShellSession]:
    directory = tmp_path / "sandbox"
    directory.mkdir()
    if bubblewrap.owner is not None:
        os.chown(directory, *bubblewrap.owner)
    sandbox = ShellSession(directory, bubblewrap)
    loop.run(sandbox.start())
    yield sandbox
    loop.run(sandbox.close())


@pytest.fixture(autouse=True)
def _what_ran_before():
    earlier.clear()
    earlier.update(descendants(os.getpid()))
