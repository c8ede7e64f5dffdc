"""What a roll-back makes of groups, by whose they were at the checkpoint."""

from pathlib import Path

import pytest

from midstream.buffers.journal.errors import JournalError
from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.records import Group, Member, Summary


def group(key: str, payload: bytes = b"first") -> Group:
    return Group(key, (Member(payload, Summary(snapshots=(f"{key}-{payload.decode()}",))),))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a journal whose job was at step 5 when it saved, and went on to step 6."""
    with Journal(tmp_path, clock=lambda: 7.0) as journal:
        journal.taken(group(key) for key in ("buffered", "flying", "in 4", "in 5", "in 6", "stale"))
        journal.handed(["in 4"], 4)
        journal.handed(["in 5"], 5)
        journal.handed(["in 6"], 6)
        journal.buffered([Group("buffered")])
        journal.checkpoint(4)
        journal.updated("flying", {0: group("flying", b"second").members[0]})
        journal.trained(4)
        journal.checkpoint(5)
        journal.updated("flying", {0: group("flying", b"third").members[0]})
        journal.dropped(["stale"], "stale")
        journal.taken([Group("buffered"), group("later")])
        journal.handed(["buffered"], 6)
        journal.trained(6)
        journal.checkpoint(6)
    return tmp_path


def test_who_was_in_flight_waits_and_who_was_trained_does_not(directory: Path) -> None:
    with Journal(directory) as journal:
        restored = journal.roll_back(5)
        # By when they were taken or buffered.
        assert [waiting.key for waiting in restored.waiting] == ["flying", "in 6", "stale", "buffered"]
        assert restored.damaged == ()
        assert [member.payload for member in journal.load("flying")] == [b"second"]
        status = journal.status()
        assert (status.trained.groups, status.dropped, status.checkpoints) == (2, {}, (4, 5))


def test_an_older_checkpoint_can_be_chosen_after_a_newer_one(directory: Path) -> None:
    with Journal(directory) as journal:
        journal.roll_back(5)
    with Journal(directory) as journal:
        restored = journal.roll_back(4)
        assert [waiting.key for waiting in restored.waiting] == [
            "flying",
            "in 5",
            "in 6",
            "stale",
            "buffered",
        ]
        assert [member.payload for member in journal.load("flying")] == [b"first"]
        assert journal.snapshots_in_use() == {
            f"{key}-first" for key in ("flying", "in 4", "in 5", "in 6", "stale", "buffered")
        }


def test_a_roll_back_can_be_repeated(directory: Path) -> None:
    for _ in range(2):
        with Journal(directory) as journal:
            first = journal.roll_back(5)
            assert journal.roll_back(5) == first


@pytest.mark.parametrize("rollout_id", [None, -1])
def test_without_a_checkpoint_the_journal_begins_empty(directory: Path, rollout_id: int | None) -> None:
    with Journal(directory) as journal:
        assert journal.roll_back(rollout_id).waiting == ()
        assert journal.snapshots_in_use() == frozenset()
        assert journal.status().checkpoints == ()
        journal.taken([group("flying")])


def test_a_checkpoint_that_is_not_there_is_named_with_those_that_are(directory: Path) -> None:
    with Journal(directory) as journal:
        with pytest.raises(JournalError, match="no checkpoint 3, only 4, 5, 6: load one of these"):
            journal.roll_back(3)
        # Nothing has changed.
        assert journal.status().checkpoints == (4, 5, 6)
        journal.checkpoint(7)
        with pytest.raises(JournalError, match="no checkpoint 4, only 5, 6, 7"):
            journal.roll_back(4)


def test_equal_records_are_not_written_again(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.taken([group("g")])
        assert journal.buffered([group("g")]) == frozenset()
        assert journal.taken([group("g", b"second")]) == {"g-first"}
        assert journal.dropped(["g"], "stale") == {"g-second"}
