"""What a job leaves that is killed: nothing at once, or nothing after the next one has looked."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from midstream.envs.sandboxes.isolation.cgroups import (
    find_cgroup_root,
    list_leftover_cgroups,
    remove_leftover_cgroups,
)
from midstream.envs.sandboxes.marks import MARK, end_all, find_marked_processes, new_mark
from midstream.envs.sandboxes.processes import descendants
from tests.envs.started import NAP, is_gone, napping, wait_until_gone

JOB = """
import asyncio, os, sys
from pathlib import Path
from midstream.envs.sandboxes.session import ShellSession
from midstream.envs.sandboxes.isolation import choose_isolation

async def main():
    isolation = choose_isolation(sys.argv[1])
    sandboxes = []
    for number in range(int(sys.argv[3])):
        directory = Path(sys.argv[2], str(number)); directory.mkdir()
        if isolation.owner: os.chown(directory, *isolation.owner)
        sandboxes.append(ShellSession(directory, isolation))
    await asyncio.gather(*(sandbox.exec(sys.argv[4], 20) for sandbox in sandboxes))
    commands = [asyncio.create_task(sandbox.exec(sys.argv[5], 1000)) for sandbox in sandboxes[:4]]
    await asyncio.sleep(0.3)
    print("ready", flush=True)
    await asyncio.gather(*commands)

asyncio.run(main())
"""


@pytest.fixture
def job(isolation, tmp_path):
    """Starts a job that runs a command in so many sandboxes, and another one in the first four of them."""
    started = []

    def start(sandboxes: int, command: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", JOB, isolation.name, str(tmp_path), str(sandboxes), command, NAP]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
    remove_leftover_cgroups()


def environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("way", ["", "setsid -f "], ids=["child", "own session"])
def test_kill_9_of_the_job_leaves_no_process(job, way):
    process = job(8, f"{way}{NAP} & sleep 0.2; echo")
    assert process.stdout.readline() == "ready\n"
    naps = napping()
    assert len(naps) == 12
    pids = {*descendants(process.pid), *naps}
    process.kill()
    process.wait()
    assert wait_until_gone(list(pids)) == []


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.004, 0.006, 0.008, 0.012, 0.02])
def test_kill_9_at_any_moment_of_a_start_leaves_no_process(isolation, tmp_path, delay_s):
    script = JOB.replace(
        "asyncio.run(main())", "print('imported', flush=True); sys.stdin.read(1); asyncio.run(main())"
    )
    argv = [sys.executable, "-c", script, isolation.name, str(tmp_path), "4", NAP, NAP]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "imported\n"
        process.stdin.write("x")
        process.stdin.flush()
        deadline = time.monotonic() + 10
        while not descendants(process.pid) and time.monotonic() < deadline:
            pass
        time.sleep(delay_s)
        pids = descendants(process.pid)
        process.kill()
    assert wait_until_gone(pids) == []
    remove_leftover_cgroups()
    # A watcher carries the mark, too, until it has ended the others.
    theirs = f"{MARK}={process.pid}.".encode()
    marked = [pid for pid in find_marked_processes() if theirs in environment(pid)]
    assert wait_until_gone(marked) == []


def test_a_process_of_a_killed_job_is_found_by_its_mark_and_ended(tmp_path):
    """As one that outlived its watcher."""
    script = """
import os, subprocess, sys
from midstream.envs.sandboxes.marks import MARK, new_mark
child = subprocess.Popen(["sleep", "1000"], env={MARK: new_mark()}, start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    ours = subprocess.Popen(["sleep", "1000"], env={MARK: new_mark()})
    foreign = subprocess.Popen(["sleep", "1000"], env={MARK: "1.1.1.00000000.elsewhere+0"})
    strange = subprocess.Popen(["sleep", "1000"], env={MARK: "what is this"})
    try:
        with owner:
            child = int(owner.stdout.readline())
            assert child not in find_marked_processes()
            owner.kill()
        assert child in find_marked_processes()
        assert not {ours.pid, foreign.pid, strange.pid} & set(find_marked_processes())
        end_all(find_marked_processes)
        assert is_gone(child)
        assert child not in find_marked_processes()
        assert ours.poll() is foreign.poll() is strange.poll() is None
    finally:
        for process in (ours, foreign, strange):
            process.send_signal(signal.SIGKILL)
            process.wait()


def leftover_of(pid: int) -> list[Path]:
    """The groups that are left of this process, whatever else this machine runs."""
    return [path for path in list_leftover_cgroups() if f"+{pid}." in path.name]


def test_groups_of_a_killed_job_are_found_by_their_names_and_removed(job):
    if find_cgroup_root() is None:
        pytest.skip("no control group can be made here")
    process = job(2, "echo")
    assert process.stdout.readline() == "ready\n"
    assert leftover_of(process.pid) == []
    process.kill()
    process.wait()
    leftover = leftover_of(process.pid)
    assert len(leftover) == 2
    assert remove_leftover_cgroups() >= 2
    assert leftover_of(process.pid) == []
    assert not [path for path in leftover if path.exists()]


def test_a_group_that_is_left_is_removed_with_the_processes_in_it():
    if find_cgroup_root() is None:
        pytest.skip("no control group can be made here")
    script = """
import os, subprocess
from midstream.envs.sandboxes.isolation.cgroups import find_cgroup_root
from midstream.envs.sandboxes.isolation.limits import ProcessLimits
child = subprocess.Popen(["setsid", "-w", "sleep", "1000"], env={"PATH": "/usr/bin:/bin"}, stdout=subprocess.DEVNULL)
find_cgroup_root().new(ProcessLimits()).add(child.pid)
print(os.getpid(), child.pid, flush=True)
"""
    run = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    owner, child = map(int, run.stdout.split())
    assert len(leftover_of(owner)) == 1
    assert not is_gone(child)
    assert remove_leftover_cgroups() >= 1
    assert leftover_of(owner) == []
    assert wait_until_gone([child]) == []
