"""What a snapshot says of its tree, what it costs, and what git would have lost."""

# ruff: noqa: PTH101, PTH104, PTH108, PTH116, PTH211

import os
import pickle
import random
import stat
import subprocess
import sys
import time

import pytest

from midstream.envs.errors import SnapshotError, SnapshotMissing
from midstream.envs.protocol import Change, Snapshot
from midstream.envs.store.contents import Contents
from midstream.envs.store.nodes import NodeReader
from midstream.envs.store.records import EMPTY, Entry
from midstream.envs.store.removal import remove_tree
from midstream.envs.store.restore import write_tree
from midstream.envs.store.store import Baseline, SnapshotStore
from tests.envs.store.trees import listing


def test_changes_name_what_differs_from_the_parent(store, tree):
    first = store.put(tree)
    (tree / "a").write_text("changed\n")
    (tree / "sub" / "b").unlink()
    (tree / "new").symlink_to("a")
    second = store.put(tree, first)
    assert second.parent == first.id
    assert [(change.path, change.kind, change.bytes) for change in second.changes] == [
        ("a", "modified", 8),
        ("new", "created", 0),
        ("sub/b", "deleted", 0),
    ]
    assert second.bytes == 8
    assert store.diff(first, second) == second.changes
    assert store.diff(None, second)[0] == Change("a", "created", 8, "", second.changes[0].after)
    assert Snapshot.from_json(second.to_json()) == second
    assert pickle.loads(pickle.dumps(second)) == second


def test_a_path_that_comes_back_has_its_first_digest_again(store, tree):
    snapshots = [store.put(tree)]
    for content in ("two\n", "three\n", "one\n"):
        (tree / "a").write_text(content)
        snapshots.append(store.put(tree, snapshots[-1]))
    of_a = [change for snapshot in snapshots[1:] for change in snapshot.changes]
    assert [change.path for change in of_a] == ["a", "a", "a"]
    assert of_a[0].before == of_a[2].after != of_a[1].before
    assert [left.after for left in of_a[:-1]] == [right.before for right in of_a[1:]]
    assert snapshots[0].digest == snapshots[3].digest
    assert len({snapshot.id for snapshot in snapshots}) == 4


def test_equal_states_have_equal_digests_by_whatever_way(store, tmp_path):
    names = [f"{number:02}" for number in range(30)]
    digests = set()
    for seed in range(3):
        root, baseline, snapshot = tmp_path / str(seed), Baseline(), None
        root.mkdir()
        order = random.Random(seed).sample(names, len(names))
        for name in order:
            (root / name).write_text(f"of {name}")
            (root / "passing").write_text(name)
            snapshot = store.put(root, snapshot, baseline=baseline)
        (root / "passing").unlink()
        digests.add(store.put(root, snapshot, baseline=baseline).digest)
    assert len(digests) == 1


def test_the_digest_tells_states_apart_that_differ_in_one_thing(store, tree):
    (tree / "c").write_text("one\n")
    digests = [store.put(tree).digest]
    changes = [
        lambda: os.chmod(tree / "a", 0o4755),
        lambda: os.setxattr(tree / "a", "user.k", b"v"),
        lambda: os.setxattr(tree / "sub", "user.k", b"v"),
        lambda: os.rename(tree / "sub" / "empty", tree / "sub" / "other"),
        lambda: (os.unlink(tree / "c"), os.link(tree / "a", tree / "c")),
        lambda: os.symlink("a", tree / "link"),
        lambda: (os.unlink(tree / "link"), os.symlink("c", tree / "link")),
        lambda: os.chmod(tree, 0o700),
    ]
    for change in changes:
        change()
        digests.append(store.put(tree).digest)
    assert len(set(digests)) == len(digests)
    os.utime(tree / "a", (0, 0))
    assert store.put(tree).digest == digests[-1]


def test_a_touch_is_a_snapshot_without_changes(store, tree, tmp_path):
    first = store.put(tree)
    os.utime(tree / "a", (5, 5))
    second = store.put(tree, first)
    assert (second.changes, second.digest) == ((), first.digest)
    for snapshot, mtime_ns in ((first, None), (second, 5_000_000_000)):
        store.restore(snapshot, tmp_path / snapshot.id)
        restored_ns = os.stat(tmp_path / snapshot.id / "a").st_mtime_ns
        assert (restored_ns == mtime_ns) == (mtime_ns is not None)


def test_state_beside_the_tree_is_part_of_the_snapshot_but_not_of_the_digest(store, tree):
    baseline = Baseline()
    first = store.put(tree, state={"cwd": "."}, baseline=baseline)
    second = store.put(tree, first, state={"cwd": "sub"}, baseline=baseline)
    assert second.id != first.id
    assert second.digest == first.digest
    assert [store.state(first), store.state(second), baseline.state] == [
        {"cwd": "."},
        {"cwd": "sub"},
        {"cwd": "sub"},
    ]
    store.restore_in_place(first, tree, baseline=baseline)
    assert baseline.state == {"cwd": "."}


def test_what_git_would_lose(store, tree, tmp_path):
    for repository in (tree, tree / "nested"):
        subprocess.run(["git", "init", "-q", str(repository)], check=True)
    (tree / "nested" / "inner.txt").write_text("kept")
    subprocess.run(["git", "-C", str(tree / "nested"), "add", "."], check=True)
    (tree / ".gitattributes").write_text("* text=auto eol=lf\n")
    (tree / "crlf.txt").write_bytes(b"one\r\ntwo\r\n")
    (tree / ".gitignore").write_text("ignored\n")
    (tree / "ignored").write_text("kept")
    (tree / "sticky").mkdir(mode=0o755)
    (tree / "sticky").chmod(0o1777)
    (tree / "program").write_text("#!/bin/sh\n")
    (tree / "program").chmod(0o4711)
    (tree / "group").write_text("g")
    (tree / "group").chmod(0o2640)
    (tree / "hard").hardlink_to(tree / "crlf.txt")
    os.setxattr(tree / "a", "user.comment", b"\0\xff")
    before = listing(tree)
    snapshot = store.put(tree)
    assert store.restore(snapshot, tmp_path / "copy") == snapshot.digest
    assert listing(tmp_path / "copy") == before
    copy = tmp_path / "copy"
    assert stat.S_IMODE(os.stat(copy / "program").st_mode) == 0o4711
    assert os.stat(copy / "hard").st_ino == os.stat(copy / "crlf.txt").st_ino
    assert list((copy / "sub" / "empty").iterdir()) == []
    found = subprocess.run(
        ["git", "-C", str(copy / "nested"), "status", "--porcelain"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout == "A  inner.txt\n"


def test_hard_links_are_followed_through_edits(store, tree, tmp_path):
    baseline, snapshot = Baseline(), None
    steps = [
        lambda: os.link(tree / "a", tree / "b"),
        lambda: os.link(tree / "a", tree / "sub" / "c"),
        lambda: (tree / "b").write_text("through one name\n"),
        lambda: os.unlink(tree / "a"),
        lambda: (os.unlink(tree / "b"), (tree / "b").write_text("through one name\n")),
        lambda: os.link(tree / "b", tree / "a"),
        lambda: (os.unlink(tree / "a"), os.symlink("nowhere", tree / "a")),
        lambda: (os.unlink(tree / "a"), os.link(tree / "b", tree / "a")),
        lambda: (os.unlink(tree / "a"), (tree / "a").mkdir()),
        lambda: os.link(tree / "sub" / "b", tree / "a" / "b"),
    ]
    states = []
    for step in steps:
        step()
        snapshot = store.put(tree, snapshot, baseline=baseline)
        assert store.put(tree).digest == snapshot.digest
        states.append((snapshot, listing(tree)))
    # Twice the same names of the same file.
    assert len({snapshot.digest for snapshot, _ in states}) == len(steps) - 1
    for snapshot, expected in states[::-1] + states:
        assert store.restore_in_place(snapshot, tree, baseline=baseline) == snapshot.digest
        assert listing(tree) == expected


def test_a_turn_costs_what_it_changes(store, tmp_path):
    root = tmp_path / "tree"
    for number in range(20):
        (root / f"d{number}").mkdir(parents=True)
        for other in range(50):
            (root / f"d{number}" / f"{other}").write_text(f"{number} {other} " * 20)
    baseline = Baseline()
    snapshot = store.put(root, baseline=baseline)
    time.sleep(0.05)
    snapshot = store.put(root, snapshot, baseline=baseline)
    noise = random.Random(0).randbytes
    before = packs(store)
    for number in range(4):
        (root / f"d{number}" / "7").write_bytes(noise(10_000))
        snapshot = store.put(root, snapshot, baseline=baseline)
    grown = [size for name, size in packs(store).items() if name not in before]
    assert len(grown) == 4
    assert sum(grown) < 1.05 * 40_000
    # What is there already is not written again.
    (root / "same").write_bytes((root / "d1" / "7").read_bytes())
    store.put(root, snapshot, baseline=baseline)
    assert len(packs(store)) == len(before) + 4


def packs(store: SnapshotStore) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (store.path / "packs").iterdir()}


def test_a_long_chain_of_small_changes_is_read_back(store, tree, tmp_path):
    baseline, snapshots = Baseline(), []
    for number in range(300):
        (tree / f"f{number % 7}").write_text(str(number))
        snapshots.append(store.put(tree, snapshots[-1] if snapshots else None, baseline=baseline))
    other = SnapshotStore(store.path)
    for number in (0, 137, 299):
        other.restore(snapshots[number], tmp_path / str(number))
        assert (tmp_path / str(number) / f"f{number % 7}").read_text() == str(number)


def test_a_baseline_serves_any_parent(store, tree):
    baseline = Baseline()
    first = store.put(tree, baseline=baseline)
    (tree / "a").write_text("second\n")
    second = store.put(tree, first, baseline=baseline)
    (tree / "a").write_text("one\n")
    os.utime(tree / "a", ns=(0, 0))
    third = store.put(tree, first, baseline=baseline)
    assert third.changes == ()
    fourth = store.put(tree, second, baseline=Baseline())
    assert [change.path for change in fourth.changes] == ["a"]
    assert store.put(tree, fourth, baseline=baseline) is fourth
    assert store.put(tree, None, baseline=baseline).digest == first.digest


@pytest.mark.parametrize(
    "path", [b"../escape", b"link/escape", b"/escape", b"sub/../../escape", b"a/b/c", b"."]
)
def test_no_record_writes_outside_of_the_target(store, tmp_path, path):
    target = tmp_path / "target"
    target.mkdir()
    entries = {
        b"": Entry("d", 0o755, 0),
        b"link": Entry("l", 0o777, 0, 0, os.fsencode(tmp_path)),
        path: Entry("f", 0o644, 0),
    }
    with pytest.raises((SnapshotError, OSError)):
        write_tree(entries, target, Contents(store.path, store._index))
    assert not list(tmp_path.rglob("escape"))


def test_what_is_missing_is_named(store, tree, tmp_path):
    snapshot = store.put(tree)
    absent = Snapshot("feed", "x")
    assert snapshot in store
    assert absent not in store
    for use in (
        lambda: store.restore(absent, tmp_path / "copy"),
        lambda: store.state(absent),
        lambda: store.diff(snapshot, absent),
        lambda: store.put(tree, absent),
        lambda: store.pin([absent], "me"),
        lambda: store.export_snapshot(absent, tmp_path / "bundle"),
    ):
        with pytest.raises(SnapshotMissing, match="no snapshot feed in the store"):
            use()
    assert not (tmp_path / "copy").exists()


def test_a_directory_in_use_is_no_target_and_is_left_alone(store, tree):
    snapshot = store.put(tree)
    with pytest.raises(SnapshotError, match="is not empty"):
        store.restore(snapshot, tree)
    assert (tree / "a").read_text() == "one\n"


def test_what_root_restores_can_be_given_to_another_user(store, tree, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    (tree / "program").write_text("p")
    (tree / "program").chmod(0o4711)
    (tree / "link").symlink_to("/etc/passwd")
    os.mkfifo(tree / "fifo")
    first = store.put(tree)
    (tree / "new").mkdir()
    (tree / "new" / "f").write_text("f")
    second = store.put(tree, first)
    baseline = Baseline()
    assert store.restore(first, tmp_path / "copy", owner=(1234, 1235), baseline=baseline) == first.digest
    digest = store.restore_in_place(second, tmp_path / "copy", owner=(1234, 1235), baseline=baseline)
    assert digest == second.digest
    store.write_delta(first, second, tmp_path / "layer", owner=(1234, 1235))
    for root in (tmp_path / "copy", tmp_path / "layer"):
        for path in (root, *root.rglob("*")):
            assert (path.lstat().st_uid, path.lstat().st_gid) == (1234, 1235)
    assert os.stat("/etc/passwd").st_uid == 0
    assert stat.S_IMODE(os.stat(tmp_path / "copy" / "program").st_mode) == 0o4711


def test_any_depth_is_removed(tmp_path):
    # Deeper than Python recurses, with a path far longer than the system takes.
    top = tmp_path / "top"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 20, dir_fd=fd)
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        child = os.open("d" * 20, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = child
    os.close(fd)
    remove_tree(top)
    assert not top.exists()
    remove_tree(top)


def test_a_forked_child_uses_the_store_of_its_parent(store, tree, tmp_path):
    script = (
        "import os, sys; from midstream.envs.store.store import SnapshotStore\n"
        "store = SnapshotStore(sys.argv[1]); first = store.put(sys.argv[2]); pid = os.fork()\n"
        "open(sys.argv[2] + ('/child' if pid == 0 else '/parent'), 'w').write('x')\n"
        "second = store.put(sys.argv[2], first)\n"
        "if pid == 0: os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0; assert not store.verify(); assert second in store\n"
    )
    subprocess.run([sys.executable, "-c", script, str(store.path), str(tree)], check=True, timeout=30)


def test_the_digest_of_nothing_is_not_that_of_something():
    assert EMPTY.updated({b"": Entry("d", 0o755, 0)}).digest != EMPTY.digest


def test_a_rollback_does_not_read_what_it_writes_anyway(store, tree, monkeypatch):
    baseline = Baseline()
    first = store.put(tree, baseline=baseline)
    (tree / "a").write_text("another\n")
    (tree / "sub" / "b").write_text("this, too\n")
    second = store.put(tree, first, baseline=baseline)
    (tree / "sub" / "b").write_text("and not recorded\n")
    read: list[bytes] = []
    whole = NodeReader._read

    def counted(reader, fd, path, *rest):
        read.append(path)
        return whole(reader, fd, path, *rest)

    monkeypatch.setattr(NodeReader, "_read", counted)
    assert store.restore_in_place(first, tree, baseline=baseline) == first.digest
    # Once, to see that they are what was written.
    assert (read.count(b"a"), read.count(b"sub/b")) == (1, 1)
    assert store.restore_in_place(second, tree, baseline=baseline) == second.digest
    assert (tree / "sub" / "b").read_text() == "this, too\n"
