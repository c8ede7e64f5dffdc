"""Nothing in a sandbox runs while it is held still, and what writes past every stat is named."""

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.sandboxes.processes import descendants
from tests.envs.started import open_file_count, started_here

TIMEOUT_S = 20.0
GROWING_S = 0.3

# Writes one byte of one page of a shared mapping again and again; its first write is the last one that a stat
# of the file shows.
MAPPED_WRITER = """
import mmap, os, sys, time
fd = os.open("page", os.O_RDWR | os.O_CREAT, 0o644)
os.ftruncate(fd, 4096)
page = mmap.mmap(fd, 4096, mmap.MAP_SHARED)
os.close(fd)
print("mapped", flush=True)
number = 0
while True:
    number += 1
    page[0] = number % 251
    time.sleep(0.001)
"""


@pytest.fixture
def sh(loop, sandbox):
    def run(command: str):
        return loop.run(sandbox.exec(command, TIMEOUT_S))

    return run


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists() or not path.stat().st_size:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def grows(path: Path) -> bool:
    """Whether the file changes within a while that is many times that between two writes to it."""
    before = path.stat().st_size
    time.sleep(GROWING_S)
    return path.stat().st_size != before


@pytest.mark.parametrize("leave", ["", "setsid "], ids=["child", "own session"])
def test_nothing_writes_while_it_is_stopped_and_all_goes_on_afterwards(sh, sandbox, leave):
    sh(f"{leave}bash -c 'while :; do echo x; sleep 0.01; done' > ticks & disown")
    ticks = sandbox.directory / "ticks"
    wait_for(ticks)
    with sandbox.stopped() as running:
        assert running.background >= 1
        assert running.init_pid == sandbox.init_pid
        assert not grows(ticks)
    assert grows(ticks)


def test_a_process_that_the_agent_has_stopped_stays_so(sh, sandbox):
    sh("bash -c 'while :; do echo x; sleep 0.01; done' > ticks & echo $! > pid; sleep 0.1; kill -STOP $!")
    ticks = sandbox.directory / "ticks"
    wait_for(ticks)
    with sandbox.stopped() as running:
        assert running.background >= 1
    assert not grows(ticks)
    sh("kill -CONT $(cat pid)")
    assert grows(ticks)


def test_a_shell_that_is_alone_has_no_background(sh, sandbox):
    sh("true & wait; sleep 0")
    with sandbox.stopped() as running:
        assert (running.background, running.mapped) == (0, frozenset())
    assert sh("echo on").output == "on\n"


def test_without_a_shell_there_is_nothing_to_stop(sandbox):
    with sandbox.stopped() as running:
        assert (running.init_pid, running.background) == (None, 0)


@pytest.mark.parametrize("processes", [1, 40])
def test_processes_that_start_others_are_stopped_too(sh, sandbox, processes):
    """Each writes through short-lived children, which come and go while they are looked for."""
    start = f"for i in {{1..{processes}}}; do (while :; do bash -c 'echo x >> ticks'; done) & done"
    sh(start)
    ticks = sandbox.directory / "ticks"
    wait_for(ticks)
    for _ in range(5):
        with sandbox.stopped():
            before = ticks.stat().st_size
            time.sleep(0.02)
            assert ticks.stat().st_size == before


def test_a_shared_mapping_is_named_whose_writes_no_stat_shows(sh, sandbox):
    (sandbox.directory / "writer.py").write_text(MAPPED_WRITER)
    sh("python3 writer.py > said & until [[ -s said ]]; do sleep 0.01; done; sleep 0.1")
    page = sandbox.directory / "page"
    with sandbox.stopped() as running:
        first, before = page.read_bytes(), page.stat()
        assert (before.st_dev, before.st_ino) in running.mapped
        time.sleep(0.02)
        assert page.read_bytes() == first
    deadline = time.monotonic() + TIMEOUT_S
    while page.read_bytes() == first:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    after = page.stat()
    # This is what makes the name worth having: the content is another one, the stat is not.
    assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)


def test_a_private_mapping_is_nobodys_concern(sh, sandbox):
    sh("head -c 4096 /dev/zero > page")
    (sandbox.directory / "reader.py").write_text(
        "import mmap, time\n"
        "file = open('page', 'r+b')\npage = mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE)\n"
        "page[0] = 1\nprint('mapped', flush=True)\ntime.sleep(1000)\n"
    )
    sh("python3 reader.py > said & until [[ -s said ]]; do sleep 0.01; done")
    status = (sandbox.directory / "page").stat()
    with sandbox.stopped() as running:
        assert running.background == 1
        assert (status.st_dev, status.st_ino) not in running.mapped


def test_a_paused_sandbox_does_nothing_until_it_is_resumed(sh, sandbox, loop):
    sh("(while :; do echo x; sleep 0.01; done) > ticks &")
    ticks = sandbox.directory / "ticks"
    wait_for(ticks)
    sandbox.pause()
    sandbox.pause()
    assert not grows(ticks)
    states = {
        pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in inside(sandbox)
    }
    assert set(states.values()) <= {"T", "Z"}
    with pytest.raises(EnvironmentFailure, match="is paused: resume it first"):
        sh("echo")
    with sandbox.stopped() as running:
        assert running.background >= 1
    assert not grows(ticks)
    sandbox.resume()
    sandbox.resume()
    assert grows(ticks)
    assert sh("echo on").output == "on\n"


def inside(sandbox) -> list[int]:
    """The processes of a sandbox with namespaces; those that are not a watcher's, without."""
    if sandbox.init_pid is not None:
        return [sandbox.init_pid, *descendants(sandbox.init_pid)]
    return [pid for pid in started_here() if b"read -r -u" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_paused_sandbox_can_be_closed(sh, sandbox, loop):
    sh("sleep 1000 & setsid sleep 1000 &")
    open_files = open_file_count()
    sandbox.pause()
    loop.run(sandbox.close())
    assert not started_here()
    assert open_file_count() <= open_files


def test_threads_that_end_hide_no_child_of_their_process():
    """Threads come and go while the children of their process are listed, again and again."""
    child = subprocess.Popen(["sleep", "1000"])
    listed = threading.Event()

    def come_and_go():
        while not listed.is_set():
            threading.Thread(target=time.sleep, args=(0.0005,)).start()

    spawning = [threading.Thread(target=come_and_go) for _ in range(2)]
    for thread in spawning:
        thread.start()
    try:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            assert child.pid in descendants(os.getpid())
    finally:
        listed.set()
        for thread in spawning:
            thread.join()
        child.kill()
        child.wait()
