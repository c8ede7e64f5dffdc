"""The control group of a sandbox: its processes are born there, and this process never stays in it nor dies with it."""

import errno
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.sandboxes import spawning
from midstream.envs.sandboxes.isolation.cgroups import Cgroup, CgroupRoot, find_cgroup_root
from midstream.envs.sandboxes.isolation.limits import ProcessLimits
from midstream.envs.sandboxes.spawning import spawner
from midstream.envs.sandboxes.tree import ProcessTree
from tests.envs.started import open_file_count, started_here, wait_until_gone

TIMEOUT_S = 20.0


@pytest.fixture(autouse=True)
def root() -> CgroupRoot:
    root = find_cgroup_root()
    if root is None:
        pytest.skip("no control groups can be made here")
    return root


@pytest.fixture
def births(root: CgroupRoot) -> None:
    if root.own is None:
        pytest.skip("only version 1 lets a thread move itself")


def groups(root: CgroupRoot) -> list[Path]:
    return [path for path in root.path.iterdir() if path.name.startswith("midstream+")]


def groups_of_the_spawner() -> str:
    return spawner().submit(Path("/proc/thread-self/cgroup").read_text).result()


@pytest.mark.usefixtures("births")
def test_a_sandbox_is_born_in_its_group(sandbox, loop, root, monkeypatch):
    monkeypatch.setattr(ProcessTree, "join_group", lambda self: pytest.fail("it had to be moved"))
    own, before = groups_of_the_spawner(), set(groups(root))
    loop.run(sandbox.start())
    (group,) = set(groups(root)) - before
    inside = {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
    assert inside == set(started_here())
    assert groups_of_the_spawner() == own


def test_where_it_cannot_be_born_there_it_is_moved(sandbox, loop, root, monkeypatch):
    monkeypatch.setattr(Cgroup, "births", lambda self: nullcontext(False))
    before = set(groups(root))
    loop.run(sandbox.exec("true", TIMEOUT_S))
    (group,) = set(groups(root)) - before
    inside = {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
    assert inside and inside <= set(started_here())


@pytest.mark.usefixtures("births")
def test_a_program_that_cannot_be_started_leaves_no_group(sandbox, loop, root, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    own, before, files = groups_of_the_spawner(), groups(root), open_file_count()
    monkeypatch.setattr(spawning.subprocess, "Popen", fail)
    with pytest.raises(EnvironmentFailure, match="cannot start a shell"):
        loop.run(sandbox.start())
    monkeypatch.undo()
    assert groups(root) == before
    assert groups_of_the_spawner() == own
    assert open_file_count() <= files + 4  # the lifeline and the loop's own


def test_a_lack_of_descriptors_after_the_start_leaves_nothing(new_sandbox, loop, root, monkeypatch):
    def fail(_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    sandbox, before = new_sandbox(), groups(root)
    monkeypatch.setattr(spawning.os, "pidfd_open", fail)
    with pytest.raises(EnvironmentFailure, match="Too many open files"):
        loop.run(sandbox.start())
    monkeypatch.undo()
    assert not wait_until_gone(started_here())
    assert groups(root) == before


@pytest.mark.usefixtures("births")
def test_who_removes_a_group_while_being_in_it_lives_on(root):
    group = root.new(ProcessLimits())
    script = (
        "import sys; from pathlib import Path\n"
        "from midstream.envs.sandboxes.isolation.cgroups import Cgroup, find_cgroup_root\n"
        "root = find_cgroup_root(); group = Cgroup(Path(sys.argv[1]), 1, root.own)\n"
        "with group.births() as born:\n"
        "    assert born; group.kill(); print('alive', end='')\n"
    )
    try:
        told = subprocess.run(
            [sys.executable, "-c", script, group.path], capture_output=True, text=True, check=False
        )
    finally:
        group.remove()
    assert (told.returncode, told.stdout) == (0, "alive"), told.stderr


@pytest.mark.usefixtures("births")
def test_a_process_that_was_moved_meanwhile_gets_its_threads_back(root):
    """Its groups are still made where it was: what it starts is then not born there."""
    group = root.new(ProcessLimits())
    other = root.new(ProcessLimits())
    script = (
        "import os, sys; from pathlib import Path\n"
        "from midstream.envs.sandboxes.isolation.cgroups import Cgroup, find_cgroup_root\n"
        "root = find_cgroup_root(); group = Cgroup(Path(sys.argv[1]), 1, root.own)\n"
        "Cgroup(Path(sys.argv[2]), 1).add(os.getpid())\n"
        "before = Path('/proc/thread-self/cgroup').read_text()\n"
        "with group.births() as born: assert not born\n"
        "assert Path('/proc/thread-self/cgroup').read_text() == before\n"
    )
    try:
        argv = [sys.executable, "-c", script, group.path, other.path]
        told = subprocess.run(argv, capture_output=True, text=True, check=False)
    finally:
        group.remove()
        other.remove()
    assert told.returncode == 0, told.stderr
