"""What the status says of a journal, and that its file does not grow with the history."""

from pathlib import Path

from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.records import Group, Member, Owned, Summary
from midstream.buffers.journal.status import status_of


def test_the_status_of_a_running_job_is_seen_from_outside(tmp_path: Path) -> None:
    now_s = [100.0]
    with Journal(tmp_path, clock=lambda: now_s[0]) as journal:
        for number, tokens in enumerate((10, 30, 80)):
            summary = Summary(tokens, number, number, number + 1, (f"s{number}", "shared"), "aborted")
            journal.taken([Group(f"g{number}", (Member(b"x" * tokens, summary),))])
            now_s[0] += 10
            journal.buffered([Group(f"g{number}")])
        journal.taken([Group("flying", (Member(b""), Member(b"")))])
        journal.taken([Group("old", (Member(b"abc", Summary(7, 1)),))])
        journal.handed(["old"], 0)
        journal.checkpoint(0)
        journal.trained(0)
        journal.dropped(["g2"], "stale")
        status = status_of(tmp_path, clock=lambda: 200.0)
        assert journal.status().buffered == status.buffered
    assert status.buffered == Owned(groups=2, rollouts=2, tokens=40, turns=1, payload_bytes=40)
    assert status.taken == Owned(groups=1, rollouts=2)
    assert status.handed == Owned()
    assert status.trained == Owned(groups=1, rollouts=1, tokens=7, turns=1, payload_bytes=3)
    assert status.dropped == {"stale": Owned(groups=1, rollouts=1, tokens=80, turns=2, payload_bytes=80)}
    assert [(group.key, group.state.value) for group in status.groups] == [
        ("g0", "buffered"),
        ("g1", "buffered"),
        ("flying", "taken"),
    ]
    first = status.groups[0]
    assert (first.begun_s, first.since_s, first.tokens, first.turns) == (100.0, 110.0, 10, 0)
    assert first.members == (Summary(10, 0, 0, 1, ("s0", "shared"), "aborted"),)
    assert first.versions == (0, 1) and status.groups[2].versions is None
    # The checkpoint still refers to what was dropped after it.
    assert status.newest_version == 3
    assert status.snapshots_in_use == {"s0", "s1", "s2", "shared"}
    assert not status.is_damaged
    assert status.checkpoints == (0,)
    assert status.file_bytes >= 120


def test_the_file_does_not_grow_with_the_history(tmp_path: Path) -> None:
    sizes = []
    for tens in range(4):
        with Journal(tmp_path) as journal:
            for step in range(10 * tens, 10 * tens + 10):
                keys = [f"{step}-{number}" for number in range(8)]
                journal.taken(Group(key, (Member(key.encode() * 10_000),)) for key in keys)
                for key in keys:
                    journal.updated(key, {0: Member(key.encode() * 11_000)})
                journal.handed(keys, step)
                journal.trained(step)
                journal.checkpoint(step)
        sizes.append((tmp_path / "journal.sqlite").stat().st_size)
    assert sizes[3] <= 1.05 * sizes[1]


def test_the_file_shrinks_when_the_buffer_does(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.buffered(Group(str(number), (Member(bytes([number]) * 100_000),)) for number in range(100))
        journal.dropped(map(str, range(100)), "stale")
        for step in range(8):
            journal.checkpoint(step)
    assert (tmp_path / "journal.sqlite").stat().st_size < 1_000_000
