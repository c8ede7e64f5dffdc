"""Overlay layers: an upper directory is the changes of its tree, and the changes of a tree are a layer."""

# ruff: noqa: PTH208

import os
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given

from midstream.envs.errors import SnapshotError, SnapshotMissing, WorkspaceLimit
from midstream.envs.protocol import Change
from midstream.envs.store.removal import remove_tree
from midstream.envs.store.scan import TreeLimits
from midstream.envs.store.store import Baseline, SnapshotStore
from tests.envs.store.overlay import can_mount, merge_by_hand, mounted
from tests.envs.store.trees import TREES, build, checked, edit, listing


@checked
@given(first=TREES, edits=TREES)
def test_a_layer_turns_one_snapshot_into_the_other(batch, first, edits):
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        store, root = SnapshotStore(base / "store"), base / "tree"
        root.mkdir()
        build(root, first)
        before = store.put(root)
        edit(root, edits)
        after = store.put(root, before)
        for number, (source, target) in enumerate([(before, after), (after, before)]):
            store.write_delta(source, target, base / f"layer{number}")
            store.restore(source, base / f"lower{number}")
            expected = base / f"expected{number}"
            store.restore(target, expected)
            if can_mount():
                with mounted(
                    [base / f"layer{number}", base / f"lower{number}"], None, base / "merged"
                ) as merged:
                    assert listing(merged) == listing(expected)
                    assert store.put(merged).digest == target.digest
            else:
                merge_by_hand(base / f"layer{number}", base / f"lower{number}")
                assert listing(base / f"lower{number}") == listing(expected)
            # The layer is also what an upper directory would have been.
            again = store.put_layer(base / f"layer{number}", source)
            assert again.digest == target.digest
            assert store.diff(target, again) == ()


@pytest.mark.skipif(not can_mount(), reason="only root mounts an overlay here")
@checked
@given(first=TREES, edits=TREES, more=TREES)
def test_the_upper_directory_of_a_mount_is_what_the_mount_shows(batch, first, edits, more):
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        store, baseline, root = SnapshotStore(base / "store"), Baseline(), base / "tree"
        root.mkdir()
        build(root, first)
        snapshots, lowers = [store.put(root, baseline=baseline)], [root]
        for number, nodes in enumerate((edits, more)):
            upper = base / f"upper{number}"
            upper.mkdir()
            upper.chmod(0o755)
            with mounted(lowers, upper, base / "merged") as merged:
                edit(merged, nodes)
                shown, digest = listing(merged), store.put(merged).digest
            snapshot = store.put_layer(upper, snapshots[-1], baseline=baseline)
            assert snapshot.digest == digest
            store.restore(snapshot, base / "copy")
            assert listing(base / "copy") == shown
            remove_tree(base / "copy")
            snapshots.append(snapshot)
            lowers.insert(0, upper)
        for lower in lowers:
            remove_tree(lower)


def test_whiteouts_opaque_directories_and_equal_copies(store, tree, tmp_path):
    (tree / "gone").write_text("x")
    (tree / "sub" / "hidden").write_text("y")
    first = store.put(tree, state={"cwd": "."})
    upper = tmp_path / "upper"
    (upper / "sub").mkdir(parents=True)
    os.mknod(upper / "gone", stat.S_IFCHR, os.makedev(0, 0))
    os.setxattr(upper / "sub", "user.overlay.opaque", b"y")
    (upper / "sub" / "new").write_text("z")
    (upper / "a").write_text("one\n")
    for path in ("a", "sub", "."):
        info = (tree / path).stat()
        (upper / path).chmod(info.st_mode & 0o7777)
        os.utime(upper / path, ns=(info.st_mtime_ns, info.st_mtime_ns))
    second = store.put_layer(upper, first, state={"cwd": "."})
    assert [(change.path, change.kind) for change in second.changes] == [
        ("gone", "deleted"),
        ("sub/b", "deleted"),
        ("sub/empty", "deleted"),
        ("sub/hidden", "deleted"),
        ("sub/new", "created"),
    ]
    store.restore(second, tmp_path / "copy")
    assert sorted(os.listdir(tmp_path / "copy" / "sub")) == ["new"]
    assert os.listxattr(tmp_path / "copy" / "sub") == []


def test_a_layer_that_changes_nothing_is_its_parent(store, tree, tmp_path):
    first = store.put(tree, state={"cwd": "."})
    upper = tmp_path / "upper"
    upper.mkdir()
    info = tree.stat()
    upper.chmod(info.st_mode & 0o7777)
    os.utime(upper, ns=(info.st_mtime_ns, info.st_mtime_ns))
    assert store.put_layer(upper, first, state={"cwd": "."}) is first


def test_a_whiteout_may_be_a_file_with_an_attribute(store, tree, tmp_path):
    first = store.put(tree)
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "a").touch()
    os.setxattr(upper / "a", "user.overlay.whiteout", b"")
    assert store.put_layer(upper, first).changes == (Change("a", "deleted", 0, first.changes[0].after),)


@pytest.mark.parametrize("mark", ["redirect", "metacopy"])
def test_a_layer_that_points_into_another_is_refused(store, tree, tmp_path, mark):
    first = store.put(tree)
    upper = tmp_path / "upper"
    (upper / "moved").mkdir(parents=True)
    os.setxattr(upper / "moved", f"user.overlay.{mark}", b"sub")
    with pytest.raises(SnapshotError, match=f"'moved' keeps its content in another layer: mount with {mark}"):
        store.put_layer(upper, first)


def test_a_layer_on_a_collected_parent_is_an_error_and_not_a_hole(store, tree, tmp_path):
    baseline = Baseline()
    first = store.put(tree, baseline=baseline)
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "new").write_text("n")
    store.collect()
    with pytest.raises(SnapshotMissing, match="pin the parent of a layer"):
        store.put_layer(upper, first, baseline=baseline)
    assert not store.verify()


def layer_of(folder: Path, name: str, content: bytes) -> Path:
    folder.mkdir()
    (folder / name).write_bytes(content)
    return folder


def test_the_limit_on_bytes_is_one_of_the_whole_tree(tree, tmp_path):
    store = SnapshotStore(tmp_path / "limited", TreeLimits(bytes=3 << 20), fsync="never")
    snapshot = store.put(tree)
    for turn in range(2):
        upper = layer_of(tmp_path / f"upper{turn}", f"file{turn}", bytes([turn + 1]) * (5 << 18))
        snapshot = store.put_layer(upper, snapshot)
    with pytest.raises(WorkspaceLimit, match=f"more than {3 << 20} bytes"):
        store.put_layer(layer_of(tmp_path / "upper2", "file2", b"3" * (5 << 18)), snapshot)
    # A file in place of another counts alone, and the holes of a file do not.
    snapshot = store.put_layer(layer_of(tmp_path / "upper3", "file1", b"3" * (5 << 18)), snapshot)
    sparse = layer_of(tmp_path / "upper4", "sparse", b"")
    with (sparse / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    snapshot = store.put_layer(sparse, snapshot)
    store.put_layer(layer_of(tmp_path / "upper5", "small", b"small"), snapshot, baseline=Baseline())
