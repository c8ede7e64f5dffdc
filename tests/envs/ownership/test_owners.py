"""Labels of processes, and whether those live."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from midstream.envs.ownership.owners import Owner, is_alive, is_of_earlier_boot, this_process

LABEL = (
    "from midstream.envs.ownership.owners import this_process; print(this_process('a job').label, flush=True)"
)


def test_a_label_says_all_of_its_owner_in_a_word_for_any_file_name() -> None:
    owner = this_process("what/ever you: like\n" + "x" * 300)
    assert Owner.parse(owner.label) == owner
    assert not set(owner.label) & set("/\\:;,'\" \n*?[]+") and len(owner.label) < 128
    assert Owner.parse(this_process().label) == this_process()


@pytest.mark.parametrize(
    "label", ["", "1.2.3", "a.2.3.ff.host", "1.2.3.ff.host.job.more", "1.2.3.ff.ho/st", "1-2-3"]
)
def test_what_is_no_label_is_none(label: str) -> None:
    assert Owner.parse(label) is None


def test_a_process_is_alive_until_it_is_killed_even_if_nobody_has_noticed() -> None:
    code = LABEL + "; import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        owner = Owner.parse(child.stdout.readline().strip())
        assert owner is not None and owner.pid == child.pid and owner.job == "a_job"
        assert is_alive(owner) is True
        child.send_signal(signal.SIGSTOP)
        assert is_alive(owner) is True
        child.kill()
        # Gone, but still in the list of processes until its parent asks.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_alive(owner) is False
    assert is_alive(owner) is False


def test_a_forked_child_is_another_owner() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, this_process().label.encode())
        os._exit(0)
    label = os.read(reading, 4096).decode()
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    owner = Owner.parse(label)
    assert owner is not None and owner.pid == child


def test_a_number_that_was_given_away_again_is_not_the_owner() -> None:
    assert is_alive(replace(this_process(), start=this_process().start - 1)) is False


def test_what_cannot_be_seen_from_here_is_not_said() -> None:
    ours = this_process()
    assert is_alive(replace(ours, host="elsewhere")) is None
    assert is_alive(replace(ours, namespace=ours.namespace + 1)) is None
    rebooted = replace(ours, boot="0" * 8)
    assert is_alive(rebooted) is None and is_of_earlier_boot(rebooted)
    assert not is_of_earlier_boot(replace(rebooted, host="elsewhere"))
