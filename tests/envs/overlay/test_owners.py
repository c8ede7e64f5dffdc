"""What becomes of a process that keeps layers, and of one without privilege."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midstream.envs.sandboxes.isolation.base import Isolation
from midstream.envs.sandboxes.overlay.layers import Layers
from midstream.envs.sandboxes.processes import descendants
from midstream.envs.store.store import SnapshotStore

REPOSITORY = Path(__file__).parents[3]
PYTHONS = [sys.executable, "/usr/bin/python3"]
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


@pytest.fixture
def others_overlays() -> frozenset[str]:
    """Those of the host before the test: that of a container's root, say."""
    return overlays_of_the_host()


def overlays_of_the_host() -> frozenset[str]:
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return frozenset(line for line in mounts if " - overlay " in line)


def test_no_mount_is_left_on_the_host(
    others_overlays: frozenset[str], owner: subprocess.Popen[str], new_layers: Callable[..., Layers]
):
    assert overlays_of_the_host() <= others_overlays
    owner.kill()
    owner.wait()
    new_layers().settle()


@pytest.fixture
def as_user() -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs Python, with our packages, as a user without privilege, in a folder of theirs."""
    folder = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    os.chown(folder, UNPRIVILEGED, UNPRIVILEGED)
    (folder / "midstream").symlink_to(REPOSITORY)
    path = os.pathsep.join([str(folder), *sys.path])
    settings = {
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def run(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        identity = [f"--reuid={UNPRIVILEGED}", f"--regid={UNPRIVILEGED}", "--clear-groups"]
        return subprocess.run(
            ["setpriv", *identity, "--", python, *arguments],
            cwd=REPOSITORY,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            check=False,
        )

    yield run
    subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_all_of_it_works_without_privilege(as_user: Callable[..., subprocess.CompletedProcess[str]]):
    # An interpreter below somebody's home is closed to others; that of the system is not.
    uses = (
        "import subprocess, sys, pytest, midstream.envs.sandboxes.overlay._native; "
        "subprocess.run([sys.executable, '-V'])"
    )
    python = next((one for one in PYTHONS if as_user(one, "-c", uses).returncode == 0), None)
    if python is None:
        pytest.skip(f"another user cannot run any of {PYTHONS} with our packages")
    tests = as_user(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent))
    assert tests.returncode == 0, tests.stdout + tests.stderr
    assert "skipped" in tests.stdout
    assert "2 skipped" not in tests.stdout
