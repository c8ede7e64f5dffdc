"""Sandboxes over layers, driven as a local sandbox drives them."""

import asyncio
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.isolation.base import Isolation
from midstream.envs.sandboxes.overlay.files import OverlayFiles
from midstream.envs.sandboxes.overlay.layers import Layers
from midstream.envs.sandboxes.overlay.probe import overlay_fault
from midstream.envs.sandboxes.protocol import SandboxSpec
from midstream.envs.sandboxes.session import ShellSession
from midstream.envs.store.store import SnapshotStore

SPEC = SandboxSpec(
    {
        "src/one.py": "1\n",
        "src/two.py": "2\n",
        "src/deep/three.py": "3\n",
        "data/a": "a\n",
        "data/b": "b\n",
        "README": "read\n",
    },
    base="task",
)


class Box:
    """A live sandbox: its workspace and its shell."""

    def __init__(self, directory: Path, layers: Layers, isolation: Isolation, loop: asyncio.Runner) -> None:
        self.files = OverlayFiles(directory, layers)
        self.session = ShellSession(directory, isolation, attach=self.files.attach)
        self._loop = loop

    def run(self, command: str) -> str:
        """What a command says that exits 0."""
        result = self._loop.run(self.session.exec(command, 30))
        assert result.exit_code == 0, result
        return result.output

    def fails(self, command: str) -> str:
        result = self._loop.run(self.session.exec(command, 30))
        assert result.exit_code != 0, result
        return result.output

    def snapshot(self) -> Snapshot:
        with self.session.stopped() as running:
            frozen = self.files.freeze(self.session.state(), running)
        if frozen.remounted:
            self._loop.run(self.session.reenter())
        return self.files.harvest(frozen)

    def restore(self, snapshot: Snapshot) -> None:
        self._loop.run(self.session.end())
        self.session.set_state(self.files.restore(snapshot, SandboxSpec()))

    def end_shell(self) -> None:
        self._loop.run(self.session.end())

    def copy(self, to: Path) -> Path:
        """A plain copy of what the sandbox sees."""
        fd = self.files.open(self.session.init_pid)
        try:
            to.mkdir()
            subprocess.run(["cp", "-a", f"/proc/self/fd/{fd}/.", to], pass_fds=[fd], check=True)
        finally:
            os.close(fd)
        return to

    def lowers(self) -> list[str]:
        """The layers below the one that it writes to, as it can read their names."""
        (mount,) = [line for line in self.run("cat /proc/self/mountinfo").splitlines() if " overlay " in line]
        return [name for names in re.findall(r"lowerdir\+?=([\d:]+)", mount) for name in names.split(":")]

    def close(self) -> None:
        self._loop.run(self.session.close())
        self.files.destroy()


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "store", fsync="never")


@pytest.fixture
def overlays(tmp_path: Path, bubblewrap: Isolation) -> Isolation:
    """The isolation, on machines where overlay works."""
    fault = overlay_fault(tmp_path, bubblewrap)
    if fault is not None:
        pytest.skip(f"overlay does not work here: {fault}")
    return bubblewrap


@pytest.fixture
def new_layers(tmp_path: Path, store: SnapshotStore, overlays: Isolation) -> Iterator[Callable[..., Layers]]:
    made: list[Layers] = []

    def make(**settings: object) -> Layers:
        made.append(Layers(tmp_path / "layers", store, overlays.owner, **settings))
        return made[-1]

    yield make
    for layers in made:
        layers.close()
    assert list((tmp_path / "layers").iterdir()) == []


@pytest.fixture
def layers(new_layers: Callable[..., Layers]) -> Layers:
    return new_layers()


@pytest.fixture
def new_box(
    tmp_path: Path, layers: Layers, overlays: Isolation, loop: asyncio.Runner
) -> Iterator[Callable[..., Box]]:
    opened: list[Box] = []

    def make(snapshot: Snapshot | None = None, of: Layers | None = None) -> Box:
        opened.append(Box(tmp_path / f"box{len(opened)}", of or layers, overlays, loop))
        if snapshot is None:
            opened[-1].files.create(SPEC)
        else:
            opened[-1].restore(snapshot)
        return opened[-1]

    yield make
    for box in opened:
        box.close()


@pytest.fixture
def box(new_box: Callable[..., Box]) -> Box:
    return new_box()
