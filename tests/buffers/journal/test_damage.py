"""Flipped bytes cost the entries that they are in, which are named, and nothing else."""

import logging
import random
from pathlib import Path

import pytest

from midstream.buffers.journal.database import PAGE_BYTES
from midstream.buffers.journal.errors import JournalDamaged, JournalError
from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.records import Group, Member, Summary
from midstream.buffers.journal.status import status_of

GROUPS, PAYLOAD_BYTES = 60, 30_000
KEYS = [f"g{number}" for number in range(GROUPS)]


def members_of(key: str) -> tuple[Member, ...]:
    draws = random.Random(key)
    return tuple(
        Member(draws.randbytes(PAYLOAD_BYTES), Summary(tokens=n, snapshots=(f"{key}-{n}",))) for n in range(2)
    )


@pytest.fixture
def journal_file(tmp_path: Path) -> Path:
    """The file of a closed journal with a checkpoint, at which groups wait, are in flight and in training."""
    with Journal(tmp_path) as journal:
        journal.checkpoint(0)
        journal.taken(Group(key, members_of(key)) for key in KEYS)
        journal.buffered(Group(key) for key in KEYS[: GROUPS // 2])
        journal.handed(KEYS[-5:], 2)
        journal.checkpoint(1)
        journal.updated(KEYS[0], {0: Member(b"later")})
        journal.dropped(KEYS[1:2], "stale")
    return tmp_path / "journal.sqlite"


def flip(path: Path, *places: int) -> None:
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 0xFF
    path.write_bytes(content)


def test_a_damaged_record_costs_its_group(journal_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(journal_file, journal_file.read_bytes().index(members_of("g7")[1].payload[1000:1100]))
    with Journal(journal_file.parent) as journal:
        with pytest.raises(JournalDamaged, match=r"rollout 1 of group 'g7' is damaged: drop the group"):
            journal.load("g7")
        with caplog.at_level(logging.WARNING):
            restored = journal.roll_back(1)
        assert restored.damaged == ("g7",)
        assert "damage cost 1 groups (g7)" in caplog.text
        assert {waiting.key for waiting in restored.waiting} == set(KEYS) - {"g7"}
        assert all(journal.load(key) == members_of(key) for key in KEYS if key != "g7")
        assert journal.status().dropped["damaged"].groups == 1
        for step in (2, 3, 4):
            journal.checkpoint(step)
        assert not {"g7-0", "g7-1"} & journal.snapshots_in_use()


@pytest.mark.parametrize("seed", range(40))
def test_wherever_bytes_flip_no_group_is_lost_silently(journal_file: Path, seed: int) -> None:
    draws = random.Random(seed)
    size = journal_file.stat().st_size
    # The first page, without which SQLite reads nothing, has its head at the beginning and the tables at the end.
    places = {
        0: [draws.randrange(100)],
        1: [draws.randrange(PAGE_BYTES - 2500, PAGE_BYTES)],
        2: [draws.randrange(PAGE_BYTES, 30 * PAGE_BYTES)],
        3: [draws.randrange(PAGE_BYTES, size) for _ in range(3)],
    }
    flip(journal_file, *places[seed % 4])
    with Journal(journal_file.parent) as journal:
        restored = journal.roll_back(1)
        found = {waiting.key for waiting in restored.waiting}
        assert found | set(restored.damaged) >= set(KEYS)
        assert not found & set(restored.damaged)
        assert all(journal.load(key) == members_of(key) for key in found)
        # What is left is sound, and can be used.
        journal.taken([Group("new", members_of("new"))])
        journal.dropped(found, "stale")
        journal.checkpoint(2)
        assert [waiting.key for waiting in journal.roll_back(2).waiting] == ["new"]


def test_a_file_that_is_no_database_is_said(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(random.Random(0).randbytes(100_000))
    with pytest.raises(JournalError, match="is damaged"):
        status_of(tmp_path)
    with Journal(tmp_path) as journal, pytest.raises(JournalError, match="no checkpoint 1, only none"):
        journal.roll_back(1)


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.99])
def test_what_a_file_has_that_was_cut_off_is_saved(journal_file: Path, kept: float) -> None:
    content = journal_file.read_bytes()
    journal_file.write_bytes(content[: int(kept * len(content))])
    with Journal(journal_file.parent) as journal:
        try:
            restored = journal.roll_back(1)
        except JournalError as error:
            assert kept < 0.1 and "no checkpoint 1, only none" in str(error)
        else:
            found = {waiting.key for waiting in restored.waiting}
            assert found | set(restored.damaged) == set(KEYS)
            assert all(journal.load(key) == members_of(key) for key in found)


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_log_costs_nothing_that_a_checkpoint_has(tmp_path: Path, seed: int) -> None:
    journal = Journal(tmp_path / "running")
    journal.taken(Group(key, members_of(key)) for key in KEYS[:10])
    journal.checkpoint(1)
    journal.taken(Group(key, members_of(key)) for key in KEYS[10:20])
    journal.buffered([Group(key) for key in KEYS[:20]])
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in ("journal.sqlite", "journal.sqlite-wal"):
        (killed / name).write_bytes((tmp_path / "running" / name).read_bytes())
    journal.close()
    log = killed / "journal.sqlite-wal"
    flip(log, random.Random(seed).randrange(log.stat().st_size))
    with Journal(killed) as journal:
        restored = journal.roll_back(1)
        assert [waiting.key for waiting in restored.waiting] == KEYS[:10]
        assert all(journal.load(key) == members_of(key) for key in KEYS[:10])
