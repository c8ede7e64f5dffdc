"""The server is alive again before anybody goes on."""

import asyncio
import threading
import time

import pytest

from midstream.local.supervision import supervised


class DyingServer:
    def __init__(self) -> None:
        self.is_alive = False
        self.restarted = threading.Event()

    def alive(self) -> bool:
        return self.is_alive

    def restart(self) -> None:
        time.sleep(1.0)
        self.is_alive = True
        self.restarted.set()


def test_work_that_ends_during_a_restart_waits_for_it() -> None:
    server = DyingServer()

    async def work() -> str:
        await asyncio.sleep(0.8)
        return "done"

    assert asyncio.run(supervised(work(), server, server.restart)) == "done"
    assert server.restarted.is_set()


def test_a_server_that_cannot_be_restarted_ends_the_work() -> None:
    cancelled = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    def restart() -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        asyncio.run(supervised(work(), DyingServer(), restart))
    assert cancelled == [True]


def test_a_server_that_lives_is_left_alone() -> None:
    server = DyingServer()
    server.is_alive = True

    async def work() -> str:
        await asyncio.sleep(0.7)
        return "done"

    assert asyncio.run(supervised(work(), server, server.restart)) == "done"
    assert not server.restarted.is_set()
