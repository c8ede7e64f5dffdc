"""Any tree comes back as it was, by every way that the store has.

The random trees are few by default; `MIDSTREAM_TREES=10000 python -m pytest tests/envs/store/test_fidelity.py`
tries as many as it says.
"""

import tempfile
from pathlib import Path

from hypothesis import given

from midstream.envs.store.removal import remove_tree
from midstream.envs.store.store import Baseline, SnapshotStore
from tests.envs.store.trees import TREES, build, checked, edit, listing, rebuild


@checked
@given(first=TREES, second=TREES)
def test_any_tree_comes_back_as_it_was(batch, first, second):
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        store, baseline, snapshots, listings = SnapshotStore(base / "store"), Baseline(), [], []
        root = base / "tree"
        for nodes in (first, second, first):
            rebuild(root, nodes)
            snapshots.append(store.put(root, snapshots[-1] if snapshots else None, baseline=baseline))
            listings.append(listing(root))
        assert snapshots[0].digest == snapshots[2].digest
        assert all(change.kind == "created" for change in snapshots[0].changes)
        for number, snapshot in enumerate(snapshots):
            into = base / f"restored{number}"
            # Another object for the same store has nothing in memory.
            assert SnapshotStore(base / "store").restore(snapshot, into) == snapshot.digest
            assert listing(into) == listings[number]
            remove_tree(into)
        assert not store.verify()
        remove_tree(root)


@checked
@given(first=TREES, edits=TREES, second=TREES)
def test_a_directory_goes_from_any_state_to_any_other_in_place(batch, first, edits, second):
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        store, baseline, root = SnapshotStore(base / "store"), Baseline(), base / "tree"
        root.mkdir()
        build(root, first)
        before, before_listing = store.put(root, baseline=baseline), listing(root)
        edit(root, edits)
        after, after_listing = store.put(root, before, baseline=baseline), listing(root)
        for snapshot, expected in (
            (before, before_listing),
            (after, after_listing),
            (before, before_listing),
        ):
            assert store.restore_in_place(snapshot, root, baseline=baseline) == snapshot.digest
            assert listing(root) == expected
            edit(root, second)
        # And with nothing remembered of the directory.
        assert store.restore_in_place(after, root, baseline=Baseline()) == after.digest
        assert listing(root) == after_listing
        assert store.put(root, after, baseline=Baseline()) is after
        remove_tree(root)


@checked
@given(nodes=TREES)
def test_a_snapshot_goes_to_another_store_as_it_is(batch, nodes):
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        (base / "tree").mkdir()
        build(base / "tree", nodes)
        store, other = SnapshotStore(base / "store"), SnapshotStore(base / "other")
        snapshot = store.put(base / "tree", state={"cwd": "."})
        store.export_snapshot(snapshot, base / "bundle")
        assert other.import_snapshot(base / "bundle") == snapshot
        assert other.state(snapshot) == {"cwd": "."}
        assert other.restore(snapshot, base / "copy") == snapshot.digest
        assert listing(base / "copy") == listing(base / "tree")
        remove_tree(base / "tree")
        remove_tree(base / "copy")
