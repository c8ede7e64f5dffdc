"""One sandbox of a backend, used by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.pool.inventory import inventory
from midstream.envs.sandboxes.choose import choose_backend
from midstream.envs.sandboxes.protocol import SandboxSpec
from midstream.envs.store.store import SnapshotStore

TIMEOUT_S = 20.0

WITHOUT_ITS_MODULE_IN_C = """
import sys
sys.modules["midstream.envs.sandboxes.overlay._native"] = None
from pathlib import Path
from midstream.envs.errors import SandboxFailure
from midstream.envs.pool.inventory import inventory
from midstream.envs.sandboxes.choose import choose_backend
from midstream.envs.sandboxes.isolation import choose_isolation
from midstream.envs.store.store import SnapshotStore
root = Path(sys.argv[1])
for name in ("store", "auto", "overlay"):
    try:
        isolation = choose_isolation("bubblewrap")
        print(choose_backend(name, root, SnapshotStore(root / "store"), isolation, setup_timeout_s=10).name)
    except SandboxFailure as failure:
        print(failure)
"""


@pytest.fixture(params=["overlay", "store"])
def sandbox(request, tmp_path, bubblewrap, loop):
    (root := tmp_path / "sandboxes").mkdir()
    try:
        backend = choose_backend(
            request.param, root, SnapshotStore(tmp_path / "store"), bubblewrap, setup_timeout_s=TIMEOUT_S
        )
    except EnvironmentFailure as failure:
        pytest.skip(str(failure))
    yield loop.run(backend.create(SandboxSpec(files={"a": "one\n"})))
    loop.run(backend.close())


def test_a_file_that_is_not_there_spoils_nothing(sandbox, loop):
    with pytest.raises(FileNotFoundError):
        loop.run(sandbox.read_file("nope", 100))
    for path in ("../a", "."):
        with pytest.raises((OSError, ValueError)):
            loop.run(sandbox.read_file(path, 100))
    with pytest.raises(ValueError, match="bytes"):
        loop.run(sandbox.read_file("a", 1))
    with pytest.raises(ValueError, match="no folder"):
        loop.run(sandbox.write_file("a/b", b"under a file"))
    assert loop.run(sandbox.read_file("a", 100)) == b"one\n"
    assert loop.run(sandbox.exec("cat a", TIMEOUT_S)).output == "one\n"


def test_the_inventory_counts_the_processes_of_a_sandbox(sandbox, loop):
    loop.run(sandbox.exec("sleep 1000 & sleep 1000 &", TIMEOUT_S))
    (found,) = [it for it in inventory([sandbox._files.directory.parent], None) if it.path.name == sandbox.id]
    # bubblewrap, its shell, and what that runs.
    assert found.processes == 4


def test_without_a_compiler_workspaces_are_plain_folders(bubblewrap, tmp_path: Path):
    argv = [sys.executable, "-c", WITHOUT_ITS_MODULE_IN_C, tmp_path]
    told = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told[:2] == ["store", "store"]
    assert "install a C compiler" in told[2] and "environment.backend=store" in told[2]
