"""The shared file: changes that exclude each other between processes, and survive a kill in the middle."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.pool.ledger import COPY_BYTES, Ledger

# Counts up, with a content of many pages, and says each count that was kept.
COUNTER = """
import sys
from pathlib import Path
from midstream.envs.pool.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
while True:
    with ledger.changing() as content:
        content["count"] = content.get("count", 0) + 1
        content["padding"] = "x" * (content["count"] * 37 % 200_000)
    print(content["count"], flush=True)
"""
KILLS = 40 if os.environ.get("MIDSTREAM_SOAK") else 6


def count(path: Path) -> int:
    with Ledger(path).changing() as content:
        assert len(content.get("padding", "")) == content.get("count", 0) * 37 % 200_000
        return int(content.get("count", 0))


def test_a_kill_at_any_moment_leaves_the_last_change_or_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    chance = random.Random(0)
    for _ in range(KILLS):
        with subprocess.Popen([sys.executable, "-c", COUNTER, path], stdout=subprocess.PIPE) as counter:
            assert counter.stdout is not None
            counter.stdout.readline()
            time.sleep(chance.random() * 0.05)
            counter.send_signal(signal.SIGKILL)
            said = [int(line) for line in counter.stdout.read().splitlines() if line]
        kept = count(path)
        if said:
            # A change is kept before it is said.
            assert kept in (said[-1], said[-1] + 1)


def test_two_processes_lose_no_change_of_each_other(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    code = COUNTER.replace("while True:", "for _ in range(300):").replace("print", "str")
    code = code.replace(", flush=True", "")
    both = [subprocess.Popen([sys.executable, "-c", code, path]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert count(path) == 600


def test_a_torn_copy_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    for value in range(1, 4):
        with ledger.changing() as content:
            content["value"] = value
    # The third change lies in the second copy.
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, b"#", COPY_BYTES + 20)
    os.close(fd)
    with ledger.changing() as content:
        assert content == {"value": 2}


def test_a_change_that_raises_is_not_kept(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    with pytest.raises(KeyError), ledger.changing() as content:
        content["half"] = True
        raise KeyError
    with ledger.changing() as content:
        assert content == {}


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(json.dumps({}))
    with pytest.raises(EnvironmentFailure, match=r"shared_path='.*file/below'.*Not a directory"):
        Ledger(tmp_path / "file" / "below" / "ledger")
