"""Snapshots hold a tree exactly, share its contents, and are complete or absent."""

# ruff: noqa: PTH101, PTH102, PTH115, PTH118, PTH123, PTH211
# Names that are bytes need functions that take bytes.

import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from midstream.envs.errors import SnapshotError, SnapshotMissing
from midstream.envs.protocol import Change, Snapshot
from midstream.envs.store.restore import remove_tree, write_tree
from midstream.envs.store.scan import RACY_NS, Entry, StatCache, TreeLimits, scan
from midstream.envs.store.store import Baseline, SnapshotStore

# No NUL and no slash; anything else, newlines and bytes that are not UTF-8 too.
NAMES = st.binary(min_size=1, max_size=6).map(lambda name: name.replace(b"\0", b"n").replace(b"/", b"s"))
NAMES = NAMES.filter(lambda name: name not in (b".", b".."))
TIMES = st.integers(0, 2**61)
FILES = st.tuples(st.just("file"), st.binary(max_size=40), st.sampled_from([0o644, 0o4755, 0o600]), TIMES)
LINKS = st.tuples(st.just("link"), st.sampled_from([b"/etc/passwd", b"..", b"nowhere", b"\xff\n"]))
NODES = st.recursive(
    st.one_of(FILES, LINKS, st.just(("fifo",))),
    lambda nodes: st.tuples(
        st.just("dir"),
        st.dictionaries(NAMES, nodes, max_size=4),
        st.sampled_from([0o755, 0o1777, 0o500]),
        TIMES,
    ),
    max_leaves=12,
)
TREES = st.dictionaries(NAMES, NODES, max_size=5)


@pytest.fixture
def store(tmp_path):
    return SnapshotStore(tmp_path / "store")


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    (root / "sub" / "empty").mkdir(parents=True)
    (root / "a").write_text("one\n")
    (root / "sub" / "b").write_text("two\n")
    return root


def build(root: bytes, nodes) -> None:
    for name, (kind, *what) in nodes.items():
        path = os.path.join(root, name)
        if kind == "file":
            content, mode, mtime_ns = what
            with open(path, "wb") as file:
                file.write(content)
            os.chmod(path, mode)
            os.utime(path, ns=(mtime_ns, mtime_ns))
        elif kind == "link":
            os.symlink(what[0], path)
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            children, mode, mtime_ns = what
            os.mkdir(path)
            build(path, children)
            os.chmod(path, mode)
            os.utime(path, ns=(mtime_ns, mtime_ns))


def listing(root: Path) -> dict[bytes, tuple]:
    """What the operating system says is there, read in another way than the store reads it."""
    found = {}
    for directory, directories, files in os.walk(os.fsencode(root)):
        for name in [*directories, *files, b"."]:
            path = os.path.join(directory, name)
            info = os.lstat(path)
            content = None
            if stat.S_ISREG(info.st_mode):
                content = Path(os.fsdecode(path)).read_bytes()
            elif stat.S_ISLNK(info.st_mode):
                content = os.readlink(path)
            found[os.path.relpath(path, os.fsencode(root))] = (info.st_mode, info.st_mtime_ns, content)
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(first=TREES, second=TREES)
def test_any_tree_comes_back_as_it_was(first, second):
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        store, baseline, snapshots, listings = SnapshotStore(base / "store"), Baseline(), [], []
        root = base / "tree"
        for nodes in (first, second, first):
            remove_tree(root)
            root.mkdir()
            build(os.fsencode(root), nodes)
            snapshots.append(store.put(root, snapshots[-1] if snapshots else None, baseline=baseline))
            listings.append(listing(root))
        for number, snapshot in enumerate(snapshots):
            into = base / f"restored{number}"
            assert store.restore(snapshot, into) == snapshot.digest
            assert listing(into) == listings[number]
            remove_tree(into)
        remove_tree(root)
        assert snapshots[0].digest == snapshots[2].digest
        assert all(change.kind == "created" for change in snapshots[0].changes)


def test_changes_name_what_differs_from_the_parent(store, tree):
    first = store.put(tree)
    (tree / "a").write_text("changed\n")
    (tree / "sub" / "b").unlink()
    (tree / "new").symlink_to("a")
    second = store.put(tree, first)
    assert second.parent == first.id
    assert second.changes == (
        Change("a", "modified", 8),
        Change("new", "created", 0),
        Change("sub/b", "deleted", 0),
    )
    assert second.bytes == 8
    assert Snapshot.from_json(second.to_json()) == second


def test_an_edit_within_the_clock_tick_of_a_snapshot_is_seen(store, tree):
    # Same size, same mtime: only reading the file again tells.
    baseline, snapshot = Baseline(), None
    for number in range(50):
        (tree / "a").write_text(f"{number:04}")
        os.utime(tree / "a", ns=(0, 0))
        snapshot = store.put(tree, snapshot, baseline=baseline)
        (tree.parent / "copy").mkdir()
        store.restore(snapshot, tree.parent / "copy")
        assert (tree.parent / "copy" / "a").read_text() == f"{number:04}"
        remove_tree(tree.parent / "copy")


def test_an_unchanged_tree_is_recognised_without_reading_a_file(store, tree):
    time.sleep(2 * RACY_NS / 1e9)
    baseline = Baseline()
    snapshot = store.put(tree, baseline=baseline)

    def unread(fd: int, size: int) -> str:
        raise AssertionError("a file was read")

    assert store.put(tree, snapshot, baseline=baseline) is snapshot
    scan(tree, baseline, unread)


def test_state_beside_the_tree_is_part_of_the_snapshot_but_not_of_the_digest(store, tree):
    first = store.put(tree, state={"cwd": "."})
    second = store.put(tree, first, state={"cwd": "sub"})
    assert second.id != first.id
    assert second.digest == first.digest
    assert store.state(second) == {"cwd": "sub"}


def test_devices_are_refused_and_sockets_come_back_as_nodes(store, tree):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tree / "sock"))
    snapshot = store.put(tree)
    assert store.restore(snapshot, tree.parent / "copy") == snapshot.digest
    assert (tree.parent / "copy" / "sock").is_socket()
    try:
        os.mknod(tree / "null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")
    with pytest.raises(SnapshotError, match="'null' is a device"):
        store.put(tree)


def test_links_are_recorded_and_never_followed(store, tree, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (tree / "out").symlink_to(outside)
    snapshot = store.put(tree)
    assert "out/secret" not in {change.path for change in snapshot.changes}
    store.restore(snapshot, tmp_path / "copy")
    assert (tmp_path / "copy" / "out").readlink() == outside


@pytest.mark.parametrize("path", ["../escape", "link/escape", "/escape", "sub/../../escape", "a/b/c"])
def test_no_record_writes_outside_of_the_target(tmp_path, path):
    target = tmp_path / "target"
    target.mkdir()
    root = Entry(".", "d", 0o755, 0, 0, "")
    link = Entry("link", "l", 0o777, 0, 0, str(tmp_path))
    with pytest.raises((SnapshotError, OSError)):
        write_tree([root, link, Entry(path, "f", 0o644, 0, 0, "x")], target, lambda content, fd: None)
    assert not list(tmp_path.rglob("escape"))


def test_limits_stop_a_scan(tree):
    with pytest.raises(SnapshotError, match="more than 3 entries"):
        scan(tree, StatCache(), limits=TreeLimits(entries=3))
    with (tree / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(SnapshotError, match="more than 4294967296 bytes of files, reached at 'sparse'"):
        scan(tree, StatCache())
    deep = tree / "/".join(["d"] * 300)
    deep.mkdir(parents=True)
    with pytest.raises(SnapshotError, match="deeper than the limit of 256"):
        scan(tree, StatCache(), limits=TreeLimits(bytes=1 << 50))


def test_a_file_that_never_holds_still_is_an_error_and_not_a_torn_snapshot(tree):
    def rewritten(fd: int, size: int) -> str:
        (tree / "a").write_text(str(time.time_ns()))
        return ""

    with pytest.raises(SnapshotError, match="kept changing"):
        scan(tree, StatCache(), rewritten)


def test_modes_that_keep_the_owner_out_are_read_and_kept(tmp_path):
    # As an unprivileged user, since root is kept out of nothing.
    script = """
import os, sys
from pathlib import Path
from midstream.envs.store.store import SnapshotStore
from midstream.envs.store.restore import remove_tree
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
base = Path(sys.argv[1]); tree = base / "tree"; (tree / "shut").mkdir(parents=True)
(tree / "shut" / "f").write_text("x"); (tree / "g").write_text("y")
os.chmod(tree / "shut" / "f", 0); os.chmod(tree / "shut", 0); os.chmod(tree / "g", 0o200)
store = SnapshotStore(base / "store")
first = store.put(tree)
assert store.restore(first, base / "copy") == first.digest
assert [(base / "copy" / name).stat().st_mode & 0o777 for name in ("shut", "g")] == [0, 0o200]
assert (tree / "shut").stat().st_mode & 0o777 == 0
remove_tree(base / "copy")
assert not (base / "copy").exists()
"""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        subprocess.run([sys.executable, "-c", script, name], check=True, timeout=30)


def test_what_is_missing_or_damaged_is_named(store, tree, tmp_path):
    snapshot = store.put(tree)
    with pytest.raises(SnapshotMissing, match="no snapshot feed in the store"):
        store.restore(Snapshot("feed", "x"), tmp_path / "copy")
    manifest = store.path / "manifests" / snapshot.id
    intact = manifest.read_bytes()
    manifest.write_bytes(intact.replace(b'"a"', b'"A"'))
    with pytest.raises(SnapshotError, match="is damaged"):
        store.restore(snapshot, tmp_path / "copy")
    manifest.write_bytes(intact)
    contents = [path for path in (store.path / "objects").rglob("*") if path.is_file()]
    contents[0].write_bytes(b"flip")
    assert store.restore(snapshot, tmp_path / "copy") != snapshot.digest
    contents[0].unlink()
    with pytest.raises(SnapshotMissing, match=r"the content .* is missing"):
        store.restore(snapshot, tmp_path / "copy2")
    assert not (tmp_path / "copy2").exists()


def test_a_directory_in_use_is_no_target_and_is_left_alone(store, tree):
    snapshot = store.put(tree)
    with pytest.raises(SnapshotError, match="is not empty"):
        store.restore(snapshot, tree)
    assert (tree / "a").read_text() == "one\n"


def test_pruning_keeps_what_is_used_and_what_is_put_again_later(store, tree, tmp_path):
    baseline = Baseline()
    first = store.put(tree, baseline=baseline)
    (tree / "a").write_text("three\n")
    second = store.put(tree, first, baseline=baseline)
    (store.path / "tmp" / "leftover").write_text("of a crash")
    assert store.prune([second.id]) > 0
    assert first not in store
    assert store.restore(second, tmp_path / "copy") == second.digest
    assert not list((store.path / "tmp").iterdir())
    # The environment still lives and remembers what it put; all of that may be gone by now.
    store.prune([])
    third = store.put(tree, second, baseline=baseline)
    assert store.restore(third, tmp_path / "copy3") == third.digest == second.digest


def test_a_pruner_beside_concurrent_writers_takes_nothing_that_is_kept(tmp_path):
    faults = []
    pinned = {}
    all_pinned = threading.Barrier(4)
    writers_left = threading.Semaphore(0)

    def write(number: int) -> None:
        try:
            store, baseline = SnapshotStore(tmp_path / "store"), Baseline()
            tree = tmp_path / f"tree{number}"
            tree.mkdir()
            (tree / "f0").write_text("shared content 0")
            snapshot = pinned[number] = store.put(tree, baseline=baseline)
            all_pinned.wait(20)
            for turn in range(20):
                (tree / f"f{turn % 3}").write_text(f"shared content {turn}")
                snapshot = store.put(tree, snapshot, baseline=baseline)
            writers_left.release()
            pruned.wait(20)
            # Everything but the pinned snapshot has gone from under the baseline.
            again = store.put(tree, snapshot, baseline=baseline)
            for kept in (pinned[number], again):
                assert store.restore(kept, tmp_path / f"{number}-{kept.id}") == kept.digest
        except BaseException as error:  # noqa: BLE001 (told to the test's own thread)
            faults.append(error)
            all_pinned.abort()

    pruned = threading.Event()
    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    all_pinned.wait(20)
    store, keep = SnapshotStore(tmp_path / "store"), [snapshot.id for snapshot in pinned.values()]
    while writers_left._value < 3 and not faults:
        store.prune(keep)
    store.prune(keep)
    assert {path.name for path in (store.path / "manifests").iterdir()} == set(keep)
    pruned.set()
    for thread in threads:
        thread.join()
    assert not faults


def test_a_full_disk_is_named_and_leaves_nothing_half_written(tmp_path):
    from midstream.envs.sandboxes.isolation import IsolationUnavailable, choose_isolation

    try:
        bubblewrap = choose_isolation("bubblewrap")
    except IsolationUnavailable as unavailable:
        pytest.skip(str(unavailable))
    script = """
import os
from pathlib import Path
from midstream.envs.errors import SnapshotError
from midstream.envs.store.store import SnapshotStore
tree = Path("/tmp/tree"); tree.mkdir(); (tree / "small").write_text("s")
store = SnapshotStore("/full/store"); whole = store.put(tree)
for name, size in (("medium", 900_000), ("large", 9_000_000)):
    (tree / name).write_bytes(os.urandom(size))
    try:
        store.put(tree, whole); raise SystemExit("no error for " + name)
    except SnapshotError as error:
        assert "cannot write /full/store/" in str(error) and "No space left" in str(error), error
    (tree / name).unlink()
    assert [path.name for path in Path("/full/store/manifests").iterdir()] == [whole.id]
    assert not list(Path("/full/store/tmp").iterdir())
try:
    SnapshotStore("/tmp/other").restore(whole, "/full/copy"); raise SystemExit("restored from nowhere")
except SnapshotError: pass
(tree / "medium").write_bytes(os.urandom(900_000))
other = SnapshotStore("/tmp/other"); big = other.put(tree)
try:
    other.restore(big, "/full/copy"); raise SystemExit("restored into a full disk")
except SnapshotError as error:
    assert "/full/copy" in str(error), error
assert not Path("/full/copy").exists()
"""
    program = bubblewrap.argv(tmp_path, [], -1)[0]
    mounts = [
        "--bind",
        "/",
        "/",
        "--dev",
        "/dev",
        "--tmpfs",
        "/tmp",
        "--size",
        "600000",
        "--tmpfs",
        "/full",
        "--remount-ro",
        "/",
    ]
    # The tests' own import path may lie under /tmp.
    mounts += [part for path in sys.path if path.startswith("/tmp") for part in ("--ro-bind", path, path)]
    subprocess.run([program, *mounts, sys.executable, "-c", script], check=True, timeout=60)


def test_any_depth_is_removed(tmp_path):
    # 1,500 directories: deeper than Python recurses.
    top = tmp_path / "top"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=fd)
        child = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = child
    os.close(fd)
    remove_tree(top)
    assert not top.exists()
