"""What becomes of a process that keeps layers, and of one without privilege."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from midstream.envs.sandboxes.isolation.base import Isolation
from midstream.envs.sandboxes.overlay.layers import Layers
from midstream.envs.sandboxes.processes import descendants
from midstream.envs.store.store import SnapshotStore

REPOSITORY = Path(__file__).parents[3]
TESTS = Path(__file__).parent
UNPRIVILEGED = 54321

_OWNER = """
import asyncio, sys
from pathlib import Path
from midstream.envs.sandboxes.isolation.choose import choose_isolation
from midstream.envs.sandboxes.overlay.layers import Layers
from midstream.envs.store.store import SnapshotStore
from tests.envs.overlay.conftest import Box

root = Path(sys.argv[1])
isolation = choose_isolation("bubblewrap")
with asyncio.Runner() as loop:
    layers = Layers(root / "layers", SnapshotStore(root / "store"), isolation.owner)
    from tests.envs.overlay.conftest import SPEC
    for number in range(3):
        box = Box(root / f"box{number}", layers, isolation, loop)
        box.files.create(SPEC)
        box.run("echo x > x; chmod 000 src")
        box.snapshot()
        box.run("sleep 1000 & rm -r data")
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path: Path, overlays: Isolation):
    """A process with three live sandboxes."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_next_start_removes_what_a_killed_process_left(
    owner: subprocess.Popen[str], tmp_path: Path, store: SnapshotStore, overlays: Isolation
):
    left = descendants(owner.pid)
    assert len(left) >= 6
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in left) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [pid for pid in left if Path(f"/proc/{pid}").exists()] == []
    layers = Layers(tmp_path / "layers", store, overlays.owner)
    layers.settle()
    assert {path.name for path in (tmp_path / "layers").iterdir()} == {
        layers.places.path.name,
        f"{layers.places.path.name}.lock",
    }
    layers.close()


def test_a_live_process_keeps_what_it_has(
    owner: subprocess.Popen[str], new_layers: Callable[..., Layers], tmp_path: Path
):
    before = sorted((tmp_path / "layers").glob("*/*"))
    new_layers().settle()
    assert set(before) <= set((tmp_path / "layers").glob("*/*"))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    new_layers().settle()


def test_no_mount_is_left_on_the_host(owner: subprocess.Popen[str], new_layers: Callable[..., Layers]):
    assert " overlay overlay " not in Path("/proc/self/mountinfo").read_text()
    owner.kill()
    owner.wait()
    new_layers().settle()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_all_of_it_works_without_privilege(tmp_path_factory: pytest.TempPathFactory, overlays: Isolation):
    temporary = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    identity = [f"--reuid={UNPRIVILEGED}", f"--regid={UNPRIVILEGED}", "--clear-groups"]
    try:
        os.chown(temporary, UNPRIVILEGED, UNPRIVILEGED)
        as_user = ["setpriv", *identity, "--", sys.executable]
        if subprocess.run([*as_user, "-c", "import midstream.envs, pytest"], cwd="/", check=False).returncode:
            pytest.skip(f"another user cannot read {sys.executable} and its packages")
        tests = subprocess.run(
            [
                *as_user,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                f"--basetemp={temporary}/t",
                "tests/envs/overlay",
            ],
            cwd=REPOSITORY,
            env={**os.environ, "HOME": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        subprocess.run(["rm", "-rf", str(temporary)], check=False)
    assert tests.returncode == 0, tests.stdout + tests.stderr
    assert "passed" in tests.stdout
