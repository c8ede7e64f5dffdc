"""What comes between the start of a shell and its first command, and after a mount over its directory."""

import ctypes
import fcntl
import logging
import os
import threading

import pytest

from midstream.envs.errors import EnvironmentFailure
from tests.envs.started import open_file_count, started_here, wait_until_gone

TIMEOUT_S = 20.0
NS_GET_USERNS = 0xB701
MS_BIND = 4096


def test_attach_is_called_on_a_thread_for_each_shell_before_its_first_command(new_sandbox, loop):
    calls = []

    def attach(init_pid):
        alive = init_pid is None or os.path.exists(f"/proc/{init_pid}")  # noqa: PTH110 (no path of ours)
        calls.append((init_pid, alive, threading.current_thread() is threading.main_thread()))
        (sandbox.directory / ".bashrc").write_text(f"export SHELL_NUMBER={len(calls)}")

    sandbox = new_sandbox(attach=attach)
    assert loop.run(sandbox.exec("echo $SHELL_NUMBER", TIMEOUT_S)).output == "1\n"
    assert calls == [(sandbox.init_pid, True, False)]
    loop.run(sandbox.exec("exit", TIMEOUT_S))
    assert loop.run(sandbox.exec("echo again", TIMEOUT_S)).output == "again\n"
    assert len(calls) == 2
    assert calls[1] == (sandbox.init_pid, True, False)


@pytest.mark.parametrize("error", [EnvironmentFailure("no mount"), OSError(28, "no space"), KeyError("any")])
def test_what_attach_raises_fails_the_start_and_leaves_nothing(new_sandbox, loop, error):
    failing = True

    def attach(_):
        if failing:
            raise error

    sandbox = new_sandbox(attach=attach)
    open_files = open_file_count()
    with pytest.raises(type(error)) as raised:
        loop.run(sandbox.exec("echo", TIMEOUT_S))
    assert raised.value is error
    assert not wait_until_gone(started_here())
    assert open_file_count() <= open_files + 4  # the lifeline and the loop's own
    failing = False
    assert loop.run(sandbox.exec("echo on", TIMEOUT_S)).output == "on\n"


def test_a_start_is_waited_for_where_it_is_asked_for(sandbox, loop):
    assert not sandbox.alive
    loop.run(sandbox.start())
    assert sandbox.alive
    shells = started_here()
    loop.run(sandbox.exec("echo", TIMEOUT_S))
    assert started_here() == shells
    loop.run(sandbox.end())
    assert not sandbox.alive
    assert not started_here()


def mount_over(target: str, source: str, init_pid: int) -> None:
    """Mounts one directory over the other in the sandbox, as whoever owns its namespaces."""
    libc = ctypes.CDLL(None, use_errno=True)
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            mounts = os.open(f"/proc/{init_pid}/ns/mnt", os.O_RDONLY)
            owner = fcntl.ioctl(mounts, NS_GET_USERNS)
            if libc.setns(owner, 0) == 0 and libc.setns(mounts, 0) == 0:
                failed = libc.mount(source.encode(), target.encode(), None, MS_BIND, None)
        finally:
            os._exit(1 if failed else 0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_shell_enters_its_directory_again_after_a_mount_over_it(bubblewrap_sandbox, loop):
    sandbox = bubblewrap_sandbox

    def sh(command):
        return loop.run(sandbox.exec(command, TIMEOUT_S)).output

    sh("mkdir -p a/sub b/sub; echo below > a/sub/f; echo above > b/sub/f; cd b; cd ../a/sub; export CDPATH=/")
    mount_over("/workspace/a", "/workspace/b", sandbox.init_pid)
    assert sh("cat f") == "below\n"
    loop.run(sandbox.reenter())
    assert (
        sh("cat f; echo $PWD $OLDPWD $CDPATH ${__old-unset}")
        == "above\n/workspace/a/sub /workspace/b / unset\n"
    )


@pytest.mark.parametrize(
    "before",
    ["set -eu; unset OLDPWD", "cd() { echo mine; }; set -P", "set -x", "x=1; false"],
)
def test_entering_again_shows_in_nothing_that_the_next_command_sees(new_sandbox, loop, before):
    look = "echo $? ${OLDPWD-none} $- ${#CDPATH}; declare -p BASHOPTS; type -t cd; compgen -v"
    outputs = []
    for again in (False, True):
        sandbox = new_sandbox()
        loop.run(sandbox.exec(f"cd /; cd /usr; {before}", TIMEOUT_S))
        if again:
            loop.run(sandbox.reenter())
        outputs.append(loop.run(sandbox.exec(look, TIMEOUT_S)).output)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("command", ["exit", "mkdir d; cd d; rmdir ../d"])
def test_entering_again_is_fine_without_a_shell_or_a_directory(sandbox, loop, command):
    loop.run(sandbox.exec(command, TIMEOUT_S))
    loop.run(sandbox.reenter())
    assert loop.run(sandbox.exec("echo on", TIMEOUT_S)).output == "on\n"


def test_a_directory_whose_name_is_not_utf8_outlives_the_shell_and_the_sandbox(new_sandbox, loop):
    first, second = new_sandbox(), new_sandbox()
    loop.run(first.exec("mkdir $'\\xff d'; cd $'\\xff d'; export A=$'\\xfe'", TIMEOUT_S))
    assert first.state()["cwd"] == "\udcff d"
    (second.directory / "\udcff d").mkdir()
    second.set_state(first.state())
    for sandbox in (first, second):
        loop.run(sandbox.exec("exit", TIMEOUT_S))
        output = loop.run(sandbox.exec('printf %s:%s "${PWD##*/}" "$A" | od -An -tx1', TIMEOUT_S)).output
        assert output.split() == ["ff", "20", "64", "3a", "fe"]


def test_a_directory_that_cannot_be_entered_again_is_logged(new_sandbox, loop, caplog):
    sandbox = new_sandbox()
    sandbox.set_state({"cwd": "gone", "exports": 'declare -x KEPT="kept"\n'})
    with caplog.at_level(logging.WARNING):
        assert loop.run(sandbox.exec("echo $KEPT", TIMEOUT_S)).output == "kept\n"
    assert "and not in" in caplog.text
    assert "gone" in caplog.text


def test_an_empty_state_is_none(new_sandbox, loop):
    sandbox = new_sandbox()
    loop.run(sandbox.exec("cd /; export KEPT=kept", TIMEOUT_S))
    loop.run(sandbox.end())
    sandbox.set_state({})
    assert loop.run(sandbox.exec("echo [$KEPT] ${PWD##*/}", TIMEOUT_S)).output.startswith("[] ")
    assert sandbox.state()["cwd"] == "."
