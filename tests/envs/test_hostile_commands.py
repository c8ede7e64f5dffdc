"""Whatever a command tries, it ends within its time, the host is as it was, and nothing is left of the sandbox."""

import os
import re
import resource
import shutil
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from midstream.envs.sandboxes.isolation import ProcessLimits, choose_isolation
from midstream.envs.sandboxes.session import ShellSession
from tests.envs.started import NAP, napping, started_here, wait_until_gone

TIMEOUT_S = 30.0
SHORT_S = 0.5
MIB = 1 << 20
LIMITS = ProcessLimits(
    processes=64,
    process_memory_bytes=256 * MIB,
    memory_bytes=192 * MIB,
    file_bytes=MIB,
    open_files=128,
    tmp_bytes=4 * MIB,
)

# Without isolation nothing keeps a command from that.
only_bubblewrap = pytest.mark.parametrize("isolation", ["bubblewrap"], indirect=True)


@pytest.fixture
def confined(isolation, tmp_path, loop):
    """A sandbox with small limits; afterwards it takes commands still, and nothing of it is left."""
    directory = tmp_path / "confined"
    directory.mkdir()
    if isolation.owner is not None:
        os.chown(directory, *isolation.owner)
    sandbox = ShellSession(directory, choose_isolation(isolation.name, LIMITS))
    yield sandbox
    try:
        assert loop.run(sandbox.exec("echo calm", TIMEOUT_S)).output.endswith("calm\n")
    finally:
        loop.run(sandbox.close())
    assert not wait_until_gone(started_here())


@pytest.fixture
def sh(confined, loop):
    def run(command: str, timeout_s: float = TIMEOUT_S):
        return loop.run(confined.exec(command, timeout_s))

    return run


def group_limits(sandbox: ShellSession) -> bool:
    return any(limit.startswith("all memory") for limit in sandbox.isolation.limits_in_words())


@only_bubblewrap
def test_a_fork_bomb_stays_within_its_sandbox(sh):
    assert sh(":(){ :|:& };: ; sleep 1000", SHORT_S).timed_out


@only_bubblewrap
@pytest.mark.parametrize(
    "start", ["os.fork() or time.sleep(1000)", "threading.Thread(target=time.sleep, args=(1000,)).start()"]
)
def test_processes_and_threads_are_counted(sh, start):
    counting = "import os, threading, time\nthreading.stack_size(1 << 16)\n"
    counting += f"for n in range(200):\n    print(n, flush=True)\n    {start}\n"
    result = sh(f"timeout -s KILL 3 python3 -c '{counting}'")
    assert result.exit_code != 0
    assert (
        LIMITS.processes // 2 < int(re.findall(r"^\d+$", result.output, re.MULTILINE)[-1]) < LIMITS.processes
    )


@pytest.mark.parametrize(
    "command",
    [
        "trap '' TERM INT HUP QUIT; while :; do sleep 1000; done",
        "exec sleep 1000",
        "exec </dev/null >/dev/null 2>&1; exec sleep 1000",
        'for fd in {0..255}; do eval "exec $fd>&-"; done; sleep 1000',
        "while :; do :; done",
        "sleep 1000 & kill -STOP $!; wait",
        "kill -STOP $$; sleep 1000",
        "sh -c 'kill -STOP $PPID; sleep 1000'; sleep 1000",
        "enable -n builtin printf read; builtin() { :; }; sleep 1000",
        "(setsid -f setsid sleep 1000); nohup sleep 1000 & disown; sleep 1000",
    ],
)
def test_what_never_ends_is_ended(sh, command):
    began = time.monotonic()
    result = sh(command, SHORT_S)
    assert result.timed_out or result.shell_replaced
    assert time.monotonic() - began < SHORT_S + 10


@pytest.mark.parametrize(
    "command", ["kill -KILL 1", "kill -KILL $$", "kill -TERM $$; kill -INT $$", "kill -KILL -- -1"]
)
def test_killing_the_shell_or_the_first_process_costs_the_sandbox_no_more_than_its_shell(
    sh, isolation, command
):
    if isolation.name == "none" and command.endswith((" 1", "-1")):
        pytest.skip("that would be this machine's")
    result = sh(f"sleep 1000 & {command}; true", SHORT_S)
    assert result.seconds < SHORT_S + 10


@only_bubblewrap
def test_stopping_all_there_is_stops_nothing_of_ours(sh):
    sh("sleep 1000 & sh -c 'kill -STOP -1'")
    assert sh("echo on").output == "on\n"


@only_bubblewrap
def test_ten_gigabytes_of_output_are_read_in_bounded_memory(sh):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = sh("yes 0123456789abcdef0123456789abcdef | head -c 10G; echo; echo end", 120.0)
    assert result.truncated
    assert result.exit_code == 0
    assert result.output.startswith("0123456789abcdef")
    assert result.output.endswith("end\n")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB


@pytest.mark.parametrize(
    "escape",
    [
        "setsid nap & disown",
        "setsid -f nap",
        "setsid -f sh -c 'setsid -f nap'",
        "(setsid sh -c 'nap & nap &' &)",
        "env -i setsid -f nap",
        "setsid -f env -i setsid -f env -i nap",
    ],
)
def test_a_process_that_leaves_its_group_and_session_ends_with_the_sandbox(sh, confined, loop, escape):
    if "env -i" in escape and not confined.isolation.has_namespaces and not group_limits(confined):
        pytest.skip("only a control group holds such a process without namespaces, and none can be made here")
    sh(f"{escape.replace('nap', NAP)}; sleep 0.3")
    naps = napping()
    assert naps
    loop.run(confined.end())
    assert not wait_until_gone(naps)


def test_a_process_is_refused_more_memory_than_its_limit(sh):
    result = sh("python3 -c 'x = bytearray(400 << 20)'")
    assert result.exit_code == 1
    assert "MemoryError" in result.output


def test_a_shell_that_swallows_memory_is_replaced(sh):
    result = sh("x=$(yes)", 60.0)
    assert result.exit_code != 0
    assert sh("echo on").output == "on\n"


def test_all_processes_together_stay_within_the_memory_of_the_sandbox(sh, confined):
    if not group_limits(confined):
        pytest.skip("no control group can be made here")
    hog = "python3 -c 'import time; x = bytearray(b\"x\") * (100 << 20); time.sleep(1000)'"
    result = sh(f"for i in 1 2 3; do {hog} & done; wait -n; echo $?")
    assert "137" in result.output or result.shell_replaced


@only_bubblewrap
@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_folders_in_memory_are_bounded(sh, folder):
    # In parts, since a file may not be as large as the folder.
    result = sh(
        f"for i in {{1..20}}; do head -c 1000000 /dev/zero > {folder}/$i || break; done; du -sb {folder}"
    )
    assert "No space left" in result.output
    assert int(result.output.split()[-2]) <= LIMITS.tmp_bytes + 4096


def test_a_file_ends_at_its_limit(sh, confined):
    result = sh("head -c 100000000 /dev/zero > big; echo $?; (yes > big2); echo $?")
    assert "0" not in result.output.split()
    assert (confined.directory / "big").stat().st_size <= MIB
    assert (confined.directory / "big2").stat().st_size <= MIB


def test_open_files_end_at_their_limit(sh):
    opening = "import os\nfds = []\nwhile True:\n    fds.append(os.open('/dev/null', 0))\n"
    result = sh(f'python3 -c "{opening}"')
    assert "Too many open files" in result.output
    assert "descriptor" in sh('for i in {10..200}; do eval "exec $i</dev/null" || break; done').output


@pytest.mark.parametrize("limit", ["-n", "-f", "-d", "-u", "-c"])
def test_limits_cannot_be_raised(sh, isolation, limit):
    if isolation.name == "none" and (os.geteuid() == 0 or limit == "-u"):
        pytest.skip("without isolation, root may raise its limits")
    before = sh(f"ulimit {limit}").output
    assert before.strip() != "unlimited"
    raised = sh(f"ulimit {limit} unlimited; ulimit {limit} 1000000000; ulimit -H {limit} unlimited")
    assert raised.exit_code != 0
    assert sh(f"ulimit {limit}").output == before


@only_bubblewrap
@pytest.mark.parametrize(
    "command",
    [
        "mount -t tmpfs none /mnt",
        "mount -o remount,rw /",
        "mount -o remount,rw,bind /usr",
        "mount --bind /tmp /usr",
        "umount /workspace",
        "umount -l /proc",
        "unshare -r true",
        "unshare -Urm mount -t tmpfs none /tmp",
        "unshare -n true",
        "unshare -p true",
        "nsenter -t 1 -U true",
        "chroot / true",
        "mknod sda b 8 0",
        "python3 -c 'import os; os.setuid(0)'",
        "python3 -c 'import os; os.mkdir(\"/usr/new\")'",
        "hostname other",
        "date -s 2000-01-01",
        "dmesg -C",
        "swapoff -a && false",
        "python3 -c 'import ctypes; l = ctypes.CDLL(None, use_errno=True); exit(l.ptrace(16, 2, 0, 0) < 0)'",
        "su -c true",
        "modprobe loop",
    ],
)
def test_privileges_are_not_to_be_had(sh, command):
    assert sh(f"{command} </dev/null", 5.0).exit_code != 0


@only_bubblewrap
@pytest.mark.parametrize(
    "path",
    [
        "/root",
        "/home",
        "/srv",
        "/etc/shadow",
        "/var",
        "/run",
        "/sys",
        "/proc/1/root/etc/shadow",
        "/proc/kcore",
    ],
)
def test_files_of_the_host_are_not_to_be_read(sh, path):
    assert sh(f"ls {path} && cat {path}").exit_code != 0


@only_bubblewrap
def test_no_descriptor_and_no_link_of_the_process_leads_out(sh, confined):
    secret = confined.directory.parent / "secret"
    secret.write_text("told")
    secret.chmod(0o644)
    assert sh(f"cat {secret}").exit_code != 0
    for way in ("..", "/proc/self/cwd/..", "/proc/1/cwd/..", "/proc/1/root"):
        assert "told" not in sh(f"cat {way}/secret {way}{secret}").output
    found = sh("for p in /proc/[0-9]*; do ls -l $p/fd $p/cwd $p/root; done 2>&1 | grep -o -- '-> .*'").output
    targets = {line.removeprefix("-> ") for line in found.splitlines()}
    assert not [
        one
        for one in targets
        if one.startswith("/") and not one.startswith(("/workspace", "/dev", "/proc")) and one != "/"
    ]


@only_bubblewrap
@pytest.mark.parametrize(
    "path",
    [
        "/proc/sys/kernel/hostname",
        "/proc/sys/kernel/panic",
        "/proc/sysrq-trigger",
        "/proc/sys/vm/drop_caches",
    ],
)
def test_settings_of_the_kernel_cannot_be_written(sh, path):
    before = Path(path).read_text() if path.startswith("/proc/sys/kernel") else ""
    assert sh(f"echo 1 > {path}").exit_code != 0
    assert sh(f"chmod 666 {path}").exit_code != 0
    if before:
        assert Path(path).read_text() == before


@only_bubblewrap
@pytest.mark.parametrize("node", ["null", "zero", "urandom", "tty", "full"])
def test_device_nodes_of_the_host_cannot_be_changed(sh, node):
    before = Path("/dev", node).stat()
    for command in ("chmod 000", "chmod 4777", "chown 1000", "rm -f", "touch -d 2001-01-01"):
        assert sh(f"{command} /dev/{node}").exit_code != 0
    after = Path("/dev", node).stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert stat.S_ISCHR(after.st_mode)


@only_bubblewrap
def test_no_network_is_in_reach(sh):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0midstream-test-{os.getpid()}")
        abstract.listen()
        port = server.getsockname()[1]
        assert "refused" in sh(f"exec 3<>/dev/tcp/127.0.0.1/{port}").output
        connect = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0midstream-test-{os.getpid()}')"
        assert "refused" in sh(f'python3 -c "{connect}"').output
        assert sh("exec 3<>/dev/tcp/1.1.1.1/53", 5.0).exit_code != 0


def test_the_network_is_the_hosts_where_the_settings_say_so(bubblewrap, tmp_path, loop):
    if bubblewrap.owner is not None:
        os.chown(tmp_path, *bubblewrap.owner)
    sandbox = ShellSession(tmp_path, choose_isolation("bubblewrap", LIMITS, network=True))
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted = threading.Thread(target=lambda: server.accept()[0].sendall(b"hello\n"))
        accepted.start()
        port = server.getsockname()[1]
        assert loop.run(sandbox.exec(f"head -1 < /dev/tcp/127.0.0.1/{port}", TIMEOUT_S)).output == "hello\n"
        accepted.join()
    loop.run(sandbox.close())


def test_setuid_files_give_nobody_anything(bubblewrap_sandbox, loop):
    sandbox = bubblewrap_sandbox
    shutil.copy("/usr/bin/id", sandbox.directory / "id")
    (sandbox.directory / "id").chmod(0o4755)
    assert loop.run(sandbox.exec("./id -u", TIMEOUT_S)).output == "1000\n"
