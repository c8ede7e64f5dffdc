"""Collection takes what nobody wants and nothing else, also beside others that write.

`MIDSTREAM_SOAK=200 python -m pytest tests/envs/store/test_collect.py` lets them write for so many turns.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from midstream.envs.errors import SnapshotMissing
from midstream.envs.protocol import Snapshot
from midstream.envs.store import collect, plan
from midstream.envs.store.packs import Pack
from midstream.envs.store.removal import remove_tree
from midstream.envs.store.store import Baseline, SnapshotStore

TURNS = int(os.environ.get("MIDSTREAM_SOAK", "25"))


def test_pins_and_names_keep_and_the_rest_goes(store, tree, tmp_path):
    baseline, snapshots = Baseline(), []
    for _ in range(5):
        (tree / "a").write_bytes(os.urandom(3000))
        snapshots.append(store.put(tree, snapshots[-1] if snapshots else None, baseline=baseline))
    store.pin([snapshots[1]], "one")
    store.pin([snapshots[1].id, snapshots[3]], "two")
    assert store.pins() == {"one": {snapshots[1].id}, "two": {snapshots[1].id, snapshots[3].id}}
    collected = store.collect([snapshots[4]])
    assert (collected.snapshots, collected.blobs) == (2, 2)
    assert collected.bytes > 6000
    assert [snapshot in store for snapshot in snapshots] == [False, True, False, True, True]
    for snapshot in (snapshots[1], snapshots[3], snapshots[4]):
        assert store.restore(snapshot, tmp_path / snapshot.id) == snapshot.digest
    with pytest.raises(SnapshotMissing):
        store.restore(snapshots[0], tmp_path / "copy")
    with pytest.raises(SnapshotMissing):
        store.pin([snapshots[0]], "three")
    store.unpin([snapshots[1]], "two")
    assert store.collect().snapshots == 1
    assert [snapshot in store for snapshot in snapshots] == [False, True, False, True, False]
    store.unpin(snapshots, "one")
    store.delete([snapshots[3]], "two")
    assert store.pins() == {}
    store.collect()
    assert store.statistics().to_json() | {"bytes": 0} == {
        "snapshots": 0,
        "pinned": 0,
        "blobs": 0,
        "packs": 0,
        "bytes": 0,
    }
    assert not list((store.path / "packs").iterdir())


def test_branches_keep_each_other_alive_only_as_far_as_they_share(store, tree, tmp_path):
    root = store.put(tree, baseline=(baseline := Baseline()))
    branches = []
    for _ in range(3):
        store.restore_in_place(root, tree, baseline=baseline)
        (tree / "own").write_bytes(os.urandom(2000))
        middle = store.put(tree, root, baseline=baseline)
        (tree / "own").write_bytes(os.urandom(2000))
        branches.append((middle, store.put(tree, middle, baseline=baseline)))
    kept = [branches[0][1], branches[1][0]]
    assert store.collect(kept).blobs == 4
    assert not store.verify()
    for snapshot in kept:
        assert SnapshotStore(store.path).restore(snapshot, tmp_path / snapshot.id) == snapshot.digest


def test_a_baseline_whose_contents_were_collected_reads_them_again(store, tree, tmp_path):
    large = os.urandom(3 << 20)
    (tree / "large").write_bytes(large)
    baseline = Baseline()
    first = store.put(tree, baseline=baseline)
    time.sleep(0.05)
    second = store.put(tree, first, baseline=baseline, state={"cwd": "sub"})
    store.collect()
    third = store.put(tree, second, baseline=baseline)
    assert store.restore(third, tmp_path / "copy") == third.digest == first.digest
    assert not store.verify()
    # Also where only some are gone: the large file is kept by another snapshot.
    remove_tree(tmp_path / "copy" / "sub")
    (tmp_path / "copy" / "a").unlink()
    other = store.put(tmp_path / "copy", pin="me")
    store.collect()
    fourth = store.put(tree, third, baseline=baseline)
    assert not store.verify()
    remove_tree(tmp_path / "copy")
    assert store.restore(fourth, tmp_path / "copy") == first.digest
    assert other in store


def test_packs_of_which_little_is_needed_are_written_anew(store, tree, tmp_path):
    baseline = Baseline()
    for number in range(50):
        (tree / f"f{number}").write_bytes(os.urandom(20_000))
    first = store.put(tree, baseline=baseline)
    for number in range(45):
        (tree / f"f{number}").unlink()
    second = store.put(tree, first, baseline=baseline)
    before = store.statistics().bytes
    collected = store.collect([second])
    assert collected.bytes > 900_000
    assert before - store.statistics().bytes > 800_000
    assert store.restore(second, tmp_path / "copy") == second.digest
    # The baseline's contents are elsewhere now, and still there.
    (tree / "f49").write_bytes(b"new")
    third = store.put(tree, second, baseline=baseline)
    assert not store.verify()
    assert [change.path for change in third.changes] == ["f49"]


def test_a_pack_that_is_being_written_is_left_alone_and_one_from_a_crash_is_not(store, tree):
    store.put(tree, pin="me")
    writing = Pack(store.path)
    writing.add(b"h" * 32, b"content")
    finished = Pack(store.path)
    finished.add(b"h" * 32, b"content")
    finished.finish(sync=False)
    (store.path / "tmp" / "left.pack").write_bytes(b"x" * 10)
    (store.path / "packs" / "left.pack").write_bytes(b"x" * 10)
    assert store.collect().leftovers == 2
    assert finished.path.exists()
    assert len(list((store.path / "tmp").iterdir())) == 1
    for pack in (writing, finished):
        # As a crash would: closed without being removed.
        pack._file.close()
    assert store.collect().leftovers == 2
    assert len(list((store.path / "packs").iterdir())) == 1


WRITER = """
import random, sys
from pathlib import Path
from midstream.envs.store.store import Baseline, SnapshotStore
base, seed, turns = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
store, baseline, rng = SnapshotStore(base / "store"), Baseline(), random.Random(seed)
tree = base / f"tree{seed}"
tree.mkdir()
(tree / "large").write_bytes(random.Random(0).randbytes(1_500_000))
snapshot = None
for turn in range(turns):
    for number in range(5):
        # Both writers and all turns share contents, so that blobs die and come back all the time.
        (tree / f"f{rng.randrange(8)}").write_text(f"shared content {rng.randrange(12)}" * 50)
    if turn % 5 == 4:
        (tree / "large").unlink() if (tree / "large").exists() else (tree / "large").write_bytes(
            random.Random(0).randbytes(1_500_000))
    pin = f"writer{seed}" if turn % 4 == 0 else None
    snapshot = store.put(tree, snapshot, baseline=baseline, pin=pin)
    if pin:
        assert store.restore(snapshot, base / f"copy{seed}-{turn}") == snapshot.digest
    if turn % 4 == 1:
        store.restore_in_place(snapshot, tree, baseline=baseline) if snapshot in store else None
"""


def test_a_collector_beside_writers_in_other_processes_never_takes_what_is_pinned(tmp_path):
    store = SnapshotStore(tmp_path / "store")
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(seed), str(TURNS)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    collections = 0
    try:
        while any(writer.poll() is None for writer in writers):
            store.collect()
            collections += 1
    finally:
        for writer in writers:
            writer.kill()
        told = [writer.communicate()[1] for writer in writers]
    # A writer that restores a snapshot without a pin may find it gone, and says so.
    for writer, error in zip(writers, told, strict=True):
        assert writer.returncode == 0 or "SnapshotMissing" in error, error
    assert collections > 1
    assert not store.verify()
    store.collect()
    pinned = store.pins()
    assert set(pinned) == {"writer1", "writer2"}
    for snapshot_id in {snapshot_id for ids in pinned.values() for snapshot_id in ids}:
        store.restore(Snapshot(snapshot_id, ""), tmp_path / "check")
        remove_tree(Path(tmp_path / "check"))


def test_a_sweep_frees_what_was_deleted_and_nothing_else(store, tmp_path):
    tree = tmp_path / "swept"
    tree.mkdir()
    (tree / "kept").write_bytes(os.urandom(5000))
    kept = store.put(tree)
    (tree / "dropped").write_bytes(os.urandom(50_000))
    dropped = store.put(tree, kept)

    store.delete([dropped])
    swept = store.sweep()

    assert swept.bytes > 50_000
    assert dropped not in store
    assert store.restore(kept, tmp_path / "again") == kept.digest
    assert store.sweep().bytes == 0


def test_what_another_owner_has_pinned_is_not_deleted(store, tree):
    snapshot = store.put(tree)
    store.pin([snapshot], "mine")
    store.pin([snapshot], "theirs")

    store.delete([snapshot], "mine")
    assert snapshot in store
    store.delete([snapshot], "theirs")
    assert snapshot not in store


def in_another_thread(work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("moment", ["make_plan", "spare_newer"])
@pytest.mark.parametrize("what", ["old chunks in a new file", "an old file", "a deleted parent", "a pin"])
def test_what_is_written_after_the_plan_keeps_what_it_needs(store, tmp_path, monkeypatch, what, moment):
    """The plan takes all contents for dead; then a snapshot comes that needs some of them again."""
    trees = {name: tmp_path / name for name in ("old", "chunks", "copy", "pinned", "other")}
    for path in trees.values():
        path.mkdir()
    (trees["old"] / "large").write_bytes(large := os.urandom(3 << 20))
    (trees["old"] / "small").write_bytes(small := os.urandom(3000))
    (trees["chunks"] / "large").write_bytes(large[: 2 << 20] + os.urandom(1 << 20))
    (trees["copy"] / "small").write_bytes(small)
    for name in ("pinned", "other"):
        (trees[name] / "x").write_bytes(os.urandom(3000))
    old = store.put(trees["old"], baseline=(baseline := Baseline()))
    pinned, other = store.put(trees["pinned"]), store.put(trees["other"])
    store.delete([old])
    (trees["old"] / "new").write_text("new")
    added = []

    def write() -> None:
        if what == "old chunks in a new file":
            added.append(store.put(trees["chunks"]))
        elif what == "an old file":
            added.append(store.put(trees["copy"]))
        elif what == "a deleted parent":
            added.append(store.put(trees["old"], old, baseline=baseline))
        else:
            store.pin([pinned], "late")
            added.append(pinned)

    made = getattr(plan, moment)

    def then_write(*arguments):
        result = made(*arguments)
        if not added:
            in_another_thread(write)
        return result

    monkeypatch.setattr(collect, moment, then_write)
    store.collect()
    monkeypatch.undo()
    assert other not in store and old not in store
    (snapshot,) = added
    assert store.verify() == []
    assert store.restore(snapshot, tmp_path / "restored") == snapshot.digest
