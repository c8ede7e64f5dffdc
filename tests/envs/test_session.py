"""A sandbox's shell keeps its state, takes whatever a command does, and leaves nothing behind."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.sandboxes.output import BoundedOutput
from tests.envs.started import NAP, is_gone, napping, open_file_count, started_here, wait_until_gone

TIMEOUT_S = 20.0
SHORT_S = 0.3


@pytest.fixture
def sh(loop, sandbox):
    """Runs one command in the sandbox."""

    def run(command: str, timeout_s: float = TIMEOUT_S):
        return loop.run(sandbox.exec(command, timeout_s))

    return run


def test_state_lasts_from_command_to_command(sh):
    sh("mkdir -p sub; cd sub; x=1; export Y='two words'; f() { echo \"f:$x:$Y\"; }; declare -A m=([k]=v)")
    result = sh("f; pwd | sed 's:.*/::'; echo ${m[k]}; echo to-stderr >&2; false")
    assert result.output == "f:1:two words\nsub\nv\nto-stderr\n"
    assert (result.exit_code, result.timed_out, result.truncated, result.shell_replaced) == (
        1,
        False,
        False,
        False,
    )


@pytest.mark.parametrize(
    ("command", "exit_code", "output"),
    [
        ("echo 'open", 2, "bash: eval: line 1: unexpected EOF while looking for matching `''\n"),
        ("if true", 2, "syntax error: unexpected end of file"),
        ("done", 2, "syntax error near unexpected token `done'"),
        ("cat <<EOF\nbody", 0, "body\n"),
        ("echo a; break; echo b", 0, "a\n"),
        ("echo a; break 9; echo b", 0, "a\n"),
        ("continue 2", 0, ""),
        ("for i in 1; do continue 9; done", 0, ""),
        ("return 3", 2, "can only `return' from a function"),
        ("echo a; exit 7", 7, "a\n"),
        ("set -e; false; echo never", 1, ""),
        ("exec sh -c 'echo replaced; exit 5'", 5, "replaced\n"),
        ("exec >/dev/null 2>&1 </dev/zero", 0, ""),
        ("exec 1>&- 2>&- 7>&- 8>&- 9>&-", 0, ""),
        ('cat; read x; echo "[$x]"', 0, "[]\n"),
        ("printf 'a\\0b\\xff\\n'", 0, "a\0b\ufffd\n"),
        ("echo nul\0byte", 0, "nulbyte\n"),
        ("echo 'ü \ud800'", 0, "ü ?\n"),
        ("set -n", 0, ""),
        ("", 0, ""),
    ],
)
def test_no_command_unbalances_the_shell(sh, command, exit_code, output):
    sh("cd /; export KEPT=kept")
    result = sh(command, timeout_s=SHORT_S if command == "set -n" else TIMEOUT_S)
    if command == "set -n":  # Tells bash to execute nothing any more: only the timeout ends that.
        assert result.timed_out
    else:
        assert result.exit_code == exit_code
        assert output in result.output if output else result.output == ""
    after = sh("echo $PWD $KEPT; echo err >&2")
    assert after.output == "/ kept\nerr\n"


@pytest.mark.parametrize(
    "command",
    [
        "sleep 1000",
        "while :; do :; done",
        "sleep 1000 & sleep 1000 & wait",
        "trap '' TERM INT HUP QUIT; while :; do sleep 1000; done",
        "read() { :; }; printf() { :; }; builtin() { :; }",
        "exec sleep 1000",
        "exec 1>&- 2>&-; sleep 1000",
        "setsid sleep 1000; sleep 1000",
    ],
)
def test_a_command_without_end_is_killed_and_the_shell_goes_on_where_it_was(sh, command):
    sh("mkdir d; cd d; export KEPT=kept")
    result = sh(f"echo begun; {command}", SHORT_S)
    assert (result.timed_out, result.shell_replaced, result.output) == (True, True, "begun\n")
    assert result.exit_code == 124
    assert result.seconds < SHORT_S + 5
    assert not wait_until_gone(started_here())
    assert sh("echo ${PWD##*/} $KEPT").output == "d kept\n"


def test_output_is_bounded_and_a_flood_does_not_stall(new_sandbox, loop):
    sandbox = new_sandbox(max_output_bytes=1000)
    result = loop.run(sandbox.exec("echo first; yes | head -c 50000000; echo last; exit 3", TIMEOUT_S))
    assert result.exit_code == 3
    assert result.truncated
    assert result.output.startswith("first\n")
    assert result.output.endswith("y\nlast\n")
    assert "\n[... 49999011 bytes left out ...]\n" in result.output
    assert len(result.output) < 1100


@pytest.mark.parametrize("sizes", [[0], [10], [5, 5], [11], [3, 4, 5, 6, 7], [1000], [9, 1, 1]])
def test_bounded_output_keeps_both_ends(sizes):
    stream = bytes(i % 251 for i in range(sum(sizes)))
    output, start = BoundedOutput(10), 0
    for size in sizes:
        output.add(stream[start : start + size])
        start += size
    left_out = len(stream) - 10
    gap = b"\n[... %d bytes left out ...]\n" % left_out if left_out > 0 else b""
    kept = stream if left_out <= 0 else stream[:5] + gap + stream[-5:]
    assert output.truncated == (left_out > 0)
    assert output.text() == kept.decode("utf-8", "replace")


def test_a_flood_from_the_background_neither_blocks_nor_busies_the_loop(sh, loop):
    assert sh("yes & echo on").exit_code == 0
    loop.run(asyncio.sleep(0.1))
    cpu_s = time.process_time()
    loop.run(asyncio.sleep(0.5))
    assert time.process_time() - cpu_s < 0.2
    assert sh("kill %1").exit_code == 0
    assert sh("echo quiet").output.endswith("quiet\n")


def test_a_long_command_is_not_cut(sh):
    text = "x" * 300_000
    assert sh(f"cat > f <<'EOF'\n{text}\nEOF\nwc -c < f").output.strip() == "300001"


def test_the_end_of_a_command_cannot_be_forged_by_its_output(sh):
    result = sh("printf '%s 0\\0/\\0\\0' 0123456789abcdef; sleep 0.1; echo real; false")
    assert result.output.endswith("real\n")
    assert result.exit_code == 1


def test_what_a_trap_prints_between_commands_is_no_part_of_their_end(sh):
    sh("trap 'echo trapped' DEBUG; trap 'echo failed' ERR; export KEPT=kept")
    result = sh("echo on; false")
    assert (result.exit_code, result.shell_replaced) == (1, False)
    assert "on\n" in result.output
    sh("exit")
    assert sh("echo $KEPT").output == "kept\n"


def test_children_do_not_inherit_the_way_to_the_host(sh):
    assert sh("ls /proc/self/fd").output.split() == ["0", "1", "2", "3"]


def test_the_startup_file_is_sourced_by_every_new_shell_but_not_by_a_fresh_one(sh, sandbox, loop):
    (sandbox.directory / ".bashrc").write_text("greet() { echo hello; }\nexport FROM_RC=yes\n")
    assert sh("greet").output == "hello\n"
    sh("exit")
    assert sh("greet").output == "hello\n"
    fresh = loop.run(sandbox.exec_fresh("greet; echo [$FROM_RC] ${PWD##*/}; exit 4", TIMEOUT_S))
    assert fresh.exit_code == 4
    assert "greet: command not found" in fresh.output
    assert "[]" in fresh.output


@pytest.mark.parametrize(
    ("startup_file", "what"),
    [("exit", "ended the shell"), ("while :; do :; done", "did not end within 0.3 s")],
)
def test_a_startup_file_that_the_agent_broke_is_told_once_and_not_read_again(
    new_sandbox, loop, startup_file, what
):
    sandbox = new_sandbox(setup_timeout_s=SHORT_S)
    loop.run(sandbox.exec(f"echo '{startup_file}' > .bashrc; export KEPT=kept", TIMEOUT_S))
    assert loop.run(sandbox.exec("exit 0", TIMEOUT_S)).shell_replaced
    told = loop.run(sandbox.exec("echo alive $KEPT", TIMEOUT_S))
    assert told.output == f"[.bashrc {what} and is not read any more]\nalive kept\n"
    assert told.shell_replaced
    loop.run(sandbox.exec("exit 0", TIMEOUT_S))
    later = loop.run(sandbox.exec("echo alive", TIMEOUT_S))
    assert (later.output, later.shell_replaced) == ("alive\n", False)


def test_a_startup_file_that_came_broken_is_a_failure_and_no_observation(sandbox, loop):
    (sandbox.directory / ".bashrc").write_text("exit 3")
    with pytest.raises(EnvironmentFailure, match=r"startup file \.bashrc in .* ended the shell"):
        loop.run(sandbox.start())
    assert not wait_until_gone(started_here())


def test_working_directory_and_exports_go_to_another_sandbox(new_sandbox, loop):
    first, second = new_sandbox(), new_sandbox()
    for sandbox in (first, second):
        (sandbox.directory / "sub dir").mkdir()
    loop.run(first.exec("cd 'sub dir'; export A=$'line\\nother' B=\"it's\"; unset TERM", TIMEOUT_S))
    second.set_state(first.state())
    result = loop.run(second.exec('echo "$A|$B|${PWD##*/}|${HOME##*/}"', TIMEOUT_S))
    home = loop.run(second.exec("cd; echo ${PWD##*/}", TIMEOUT_S)).output
    assert result.output == f"line\nother|it's|sub dir|{home}"


def test_a_cancelled_command_leaves_no_process_and_a_sandbox_that_can_be_closed(sandbox, loop):
    async def cancelled() -> list[int]:
        await sandbox.exec("echo ready", TIMEOUT_S)
        command = asyncio.create_task(sandbox.exec("sleep 1000 & sleep 1000", TIMEOUT_S))
        await asyncio.sleep(SHORT_S)
        pids = started_here()
        command.cancel()
        with pytest.raises(asyncio.CancelledError):
            await command
        return pids

    pids = loop.run(cancelled())
    assert len(pids) >= 3
    assert not wait_until_gone(pids)
    assert loop.run(sandbox.exec("echo again", TIMEOUT_S)).output == "again\n"
    loop.run(sandbox.close())
    assert not started_here()


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.003, 0.006, 0.01, 0.02])
def test_cancelled_at_any_moment_of_its_start_it_leaves_nothing(new_sandbox, loop, delay_s):
    async def cancelled() -> None:
        sandboxes = [new_sandbox() for _ in range(4)]
        commands = [asyncio.create_task(sandbox.exec("echo", TIMEOUT_S)) for sandbox in sandboxes]
        await asyncio.sleep(delay_s)
        for command in commands:
            command.cancel()
        await asyncio.gather(*commands, return_exceptions=True)
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))

    open_files = open_file_count()
    loop.run(cancelled())
    assert not wait_until_gone(started_here())
    assert open_file_count() <= open_files + 4  # the lifeline and the loop's own


def test_close_ends_all_that_commands_left_running(sh, sandbox, loop):
    sh(f"{NAP} & setsid {NAP} & (trap '' TERM HUP; {NAP}) & disown -a; setsid -f {NAP}; sleep 0.2")
    naps = napping()
    assert len(naps) == 4
    loop.run(sandbox.close())
    assert [pid for pid in naps if not is_gone(pid)] == []
    loop.run(sandbox.close())
    with pytest.raises(EnvironmentFailure, match="is closed"):
        sh("echo")


def test_a_close_during_a_command_ends_both(sandbox, loop):
    async def closed() -> None:
        command = asyncio.create_task(sandbox.exec("sleep 1000", TIMEOUT_S))
        await asyncio.sleep(SHORT_S)
        await sandbox.close()
        with pytest.raises(EnvironmentFailure, match="is closed"):
            await command

    loop.run(closed())
    assert not wait_until_gone(started_here())


needs_namespaces = pytest.mark.parametrize("isolation", ["bubblewrap"], indirect=True)


@needs_namespaces
def test_a_sandbox_that_was_killed_between_commands_is_a_failure_of_the_machine(sh, sandbox, loop):
    sh("echo")
    os.kill(sandbox.init_pid, signal.SIGKILL)
    while sandbox.alive:
        loop.run(asyncio.sleep(0.05))
    with pytest.raises(EnvironmentFailure, match="was killed between two commands"):
        sh("echo")
    assert sh("echo again").output == "again\n"


@needs_namespaces
@pytest.mark.parametrize("method", ["exec", "exec_fresh"])
@pytest.mark.parametrize("victim", ["init", "bubblewrap"])
def test_a_sandbox_that_was_killed_in_a_command_is_a_failure_of_the_machine(sandbox, loop, method, victim):
    async def killed() -> None:
        command = asyncio.create_task(getattr(sandbox, method)("echo > begun; sleep 1000", TIMEOUT_S))
        while not (sandbox.directory / "begun").exists():
            await asyncio.sleep(0.01)
        pid = sandbox.init_pid
        os.kill(pid if victim == "init" else parent_of(pid), signal.SIGKILL)
        with pytest.raises(EnvironmentFailure, match="killed it"):
            await command

    loop.run(killed())
    assert not wait_until_gone(started_here())


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@needs_namespaces
@pytest.mark.parametrize("method", ["exec", "exec_fresh"])
@pytest.mark.parametrize(
    "command",
    [
        "exit 137",
        "ulimit -t 1; while :; do :; done",
        "exec python3 -c 'import ctypes, os; ctypes.CDLL(None).prctl(22, 1); os.getppid()'",
    ],
)
def test_a_command_cannot_pass_its_end_off_as_a_failure_of_the_machine(sandbox, loop, method, command):
    result = loop.run(getattr(sandbox, method)(command, TIMEOUT_S))
    assert (result.exit_code, result.shell_replaced, result.timed_out) == (137, True, False)


@needs_namespaces
def test_a_command_cannot_kill_what_keeps_it(sh):
    assert not sh("kill -KILL 0; true").shell_replaced
    assert sh("echo on").output.endswith("on\n")


@pytest.mark.parametrize("end", ["trap 'exit 3' USR1; (sleep 0.2; kill -USR1 $$) &", "readonly TMOUT=1"])
def test_a_shell_that_a_command_ended_later_is_replaced_and_the_agent_is_told(sh, sandbox, loop, end):
    sh(f"export KEPT=kept; {end}")
    while sandbox.alive:
        loop.run(asyncio.sleep(0.05))
    first = sh("echo $KEPT")
    assert (first.output, first.shell_replaced) == ("kept\n", True)
    assert not sh("echo").shell_replaced


@pytest.mark.parametrize("limit", ["TMOUT=1", "export TMOUT=1"])
def test_a_time_limit_on_reading_does_not_end_the_shell(sh, loop, limit):
    sh(limit)
    loop.run(asyncio.sleep(1.5))
    result = sh("echo $TMOUT")
    assert (result.output, result.shell_replaced) == ("1\n", False)


def test_64_sandboxes_at_once_do_not_mix(new_sandbox, loop):
    sandboxes = [new_sandbox() for _ in range(64)]

    async def talk(number: int) -> None:
        await sandboxes[number].exec(f"n={number}", TIMEOUT_S)
        for turn in range(10):
            result = await sandboxes[number].exec(f"echo $n.{turn}", TIMEOUT_S)
            assert result.output == f"{number}.{turn}\n"

    async def all_talk() -> float:
        async def measure_lag() -> float:
            worst = 0.0
            while True:
                asked = time.perf_counter()
                try:
                    await asyncio.sleep(0.005)
                except asyncio.CancelledError:
                    return worst
                worst = max(worst, time.perf_counter() - asked - 0.005)

        lag = asyncio.create_task(measure_lag())
        await asyncio.gather(*map(talk, range(64)))
        lag.cancel()
        return await lag

    # The loop goes on serving others while sandboxes start and answer.
    assert loop.run(all_talk()) < 0.5
