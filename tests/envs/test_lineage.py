"""Who wrote what, by hand-computed cases."""

import pytest

from midstream.envs.lineage import LineageError, Write, chain, shares, surviving_writes
from midstream.envs.protocol import Change, Snapshot

START = Snapshot(
    "s0", "d0", None, (Change("a", "created", 10, "", "a0"), Change("b", "created", 5, "", "b0"))
)


def turn(number: int, version: int, *changes: Change) -> Snapshot:
    return Snapshot(f"s{number}", f"d{number}", f"s{number - 1}", changes, version=version, turn=number)


def test_the_last_writer_of_each_path_that_differs_from_the_start():
    snapshots = [
        START,
        turn(1, 3, Change("a", "modified", 30, "a0", "a1"), Change("c", "created", 10, "", "c1")),
        turn(2, 3, Change("b", "deleted", 0, "b0", "")),
        turn(3, 5, Change("c", "modified", 60, "c1", "c2")),
    ]

    writes = surviving_writes(snapshots)

    assert writes == [
        Write("a", "modified", 30, version=3, turn=1),
        Write("b", "deleted", 0, version=3, turn=2),
        Write("c", "created", 60, version=5, turn=3),
    ]
    assert shares(writes) == {3: 31 / 91, 5: 60 / 91}


def test_what_was_changed_back_has_no_writer():
    snapshots = [
        START,
        turn(1, 1, Change("a", "modified", 30, "a0", "a1"), Change("new", "created", 7, "", "n1")),
        turn(2, 2, Change("a", "modified", 10, "a1", "a0"), Change("new", "deleted", 0, "n1", "")),
    ]

    assert surviving_writes(snapshots) == []
    assert shares([]) == {}


def test_a_file_that_was_deleted_and_made_anew_is_modified_by_who_made_it():
    snapshots = [
        START,
        turn(1, 1, Change("a", "deleted", 0, "a0", "")),
        turn(2, 4, Change("a", "created", 3, "", "a2")),
    ]

    assert surviving_writes(snapshots) == [Write("a", "modified", 3, version=4, turn=2)]


def test_the_chain_goes_by_parents_and_leaves_other_branches_out():
    one, two = turn(1, 1), turn(2, 1)
    fork = Snapshot("fork", "df", "s1", version=9, turn=2)
    recorded = {snapshot.id: snapshot for snapshot in (fork, two, START, one)}

    assert [snapshot.id for snapshot in chain(recorded, "s2")] == ["s0", "s1", "s2"]
    assert [snapshot.id for snapshot in chain(recorded, "fork")] == ["s0", "s1", "fork"]


def test_a_broken_chain_is_named():
    with pytest.raises(LineageError, match="s1 is not recorded"):
        chain({"s0": START, "s2": turn(2, 1)}, "s2")
    with pytest.raises(LineageError, match="its own ancestors"):
        chain({"x": Snapshot("x", "d", "y", turn=1), "y": Snapshot("y", "d", "x", turn=0)}, "x")
