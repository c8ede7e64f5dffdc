"""A scan finds what changed, all of it and nothing else, whatever the tree is like."""

# ruff: noqa: PTH101, PTH104, PTH116

import errno
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from midstream.envs.errors import SnapshotError, WorkspaceLimit
from midstream.envs.store import listing as listings
from midstream.envs.store.chunks import read_content
from midstream.envs.store.records import EMPTY
from midstream.envs.store.scan import RACY_NS, TreeLimits, hash_only, scan
from midstream.envs.store.statcache import StatCache
from midstream.envs.store.store import Baseline, SnapshotStore
from tests.envs.store.trees import NAMES, TREES, build, edit

LATER_NS = 1 << 62
# How many files the crowded directory has; MIDSTREAM_SOAK=1 makes it the million.
CROWD = 1_000_000 if "MIDSTREAM_SOAK" in os.environ else 20_000


def every_directory(root: Path) -> list[bytes]:
    found = [os.path.relpath(directory, os.fsencode(root)) for directory, _, _ in os.walk(os.fsencode(root))]
    return [b"" if path == b"." else path for path in found]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(first=TREES, edits=TREES, asked=st.sets(NAMES))
def test_the_native_listing_says_what_the_one_in_python_says(first, edits, asked):
    native = pytest.importorskip("midstream.envs.store._native", reason="built without a compiler")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name, "tree")
        root.mkdir()
        build(root, first)
        fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
        # Files that nobody can have changed since, and one that somebody may.
        mapped = os.stat(root)
        distrusted = struct.pack("=QQ", mapped.st_dev, mapped.st_ino)

        def compared(known, settled_ns, names=None):
            jobs = [(path, before, names) for path, before in known.items()]
            found = native.compare(fd, jobs, settled_ns, 1000, distrusted, 2)
            in_python = listings.compare_in_python(fd, jobs, settled_ns, 1000, distrusted, 1)
            # For a link in the place of a directory there are two errnos, which mean the same to a scan.
            same = {errno.ELOOP: errno.ENOTDIR}
            assert [
                result if result.__class__ is tuple else same.get(result, result) for result in found
            ] == [result if result.__class__ is tuple else same.get(result, result) for result in in_python]
            return dict(zip(known, found, strict=True))

        known: dict[bytes, bytes | None] = dict.fromkeys(every_directory(root))
        for settled_ns in (LATER_NS, LATER_NS, 1 << 60, 0, LATER_NS):
            found = compared(known, settled_ns)
            known = {path: found[path][0] or before for path, before in known.items()}
            if settled_ns == LATER_NS:
                edit(root, edits)
                # Of some names alone, of which few are there; those that are gone are told by their errno.
                compared(
                    known, settled_ns, b"".join(sorted(name + b"\0" for name in {*asked, *list(edits)[:2]}))
                )
                compared(known, settled_ns, b"")
                found = compared(known, settled_ns)
                known = {path: before for path, before in known.items() if found[path].__class__ is tuple}
        os.close(fd)


def test_a_listing_of_all_its_names_is_that_of_the_directory(tree):
    fd = os.open(tree, os.O_PATH)
    for compare in {listings.compare, listings.compare_in_python}:
        ((before, *_),) = compare(fd, [(b"", None, None)], LATER_NS, 100, b"", 1)
        (tree / "a").write_text("other")
        (tree / "new").write_text("new")
        (tree / "sub").rename(tree / "moved")
        ((whole, *_),) = compare(fd, [(b"", before, None)], LATER_NS, 100, b"", 1)
        ((part, changed, gone, *_),) = compare(
            fd, [(b"", before, b"a\0moved\0new\0sub\0")], LATER_NS, 100, b"", 1
        )
        assert part == whole
        assert [record[0] for record in changed] == [b"a", b"moved", b"new"]
        assert gone == [b"sub"]
        (tree / "moved").rename(tree / "sub")
        (tree / "new").unlink()
    os.close(fd)


@pytest.mark.parametrize("times_s", [-5_000_000_000, 0, 9_100_000_000, 15_000_000_000])
def test_times_far_from_now_are_kept(store, tree, tmp_path, times_s):
    try:
        os.utime(tree / "a", (times_s, times_s))
    except OSError:
        pytest.skip("this file system has no such times")
    kept = os.stat(tree / "a").st_mtime_ns
    snapshot = store.put(tree)
    assert store.restore(snapshot, tmp_path / "copy") == snapshot.digest
    assert os.stat(tmp_path / "copy" / "a").st_mtime_ns == kept


def test_both_listings_stop_at_the_limit_and_name_what_cannot_be_read(tree):
    fd = os.open(tree, os.O_PATH)
    jobs = [(path, None, None) for path in (b"", b"nowhere", b"a", b"sub/../sub")]
    for compare in {listings.compare, listings.compare_in_python}:
        assert compare(fd, [(b"", None, None)], 0, 1, b"", 1) == [7]
        assert [type(result) for result in compare(fd, jobs, 0, 10, b"", 1)] == [tuple, int, int, int]
    os.close(fd)


def test_paths_are_opened_below_the_root_and_through_no_link(tree, tmp_path):
    (tmp_path / "secret").write_text("s")
    (tree / "out").symlink_to(tmp_path)
    (tree / "sub" / "up").symlink_to("..")
    fd = os.open(tree, os.O_PATH)
    for open_beneath in {listings.open_beneath, listings.open_beneath_in_python}:
        for path in (
            b"out/secret",
            b"../secret",
            b"sub/../a",
            b"sub/up/a",
            b"/etc/passwd",
            b"out",
            b"sub/../../secret",
        ):
            with pytest.raises(OSError):
                os.close(open_beneath(fd, path, os.O_RDONLY))
        os.close(open_beneath(fd, b"sub/b", os.O_RDONLY))
    os.close(fd)


def test_an_edit_within_the_clock_tick_of_a_snapshot_is_seen(store, tree, tmp_path):
    # Same size, same mtime: only reading the file again tells.
    baseline, snapshot = Baseline(), None
    for number in range(50):
        (tree / "a").write_text(f"{number:04}")
        os.utime(tree / "a", ns=(0, 0))
        snapshot = store.put(tree, snapshot, baseline=baseline)
        store.restore_in_place(snapshot, tmp_path / "copy", baseline=Baseline()) if number else store.restore(
            snapshot, tmp_path / "copy"
        )
        assert (tmp_path / "copy" / "a").read_text() == f"{number:04}"


def test_an_unchanged_tree_is_recognised_without_reading_a_file(store, tree):
    time.sleep(2 * RACY_NS / 1e9)
    baseline = Baseline()
    snapshot = store.put(tree, baseline=baseline)

    def unread(fd: int, size: int, allowance: int):
        raise AssertionError("a file was read")

    assert store.put(tree, snapshot, baseline=baseline) is snapshot
    assert scan(tree, baseline, unread).updates == {}


def test_a_file_that_is_mapped_is_read_whatever_its_stat_says(store, tree):
    time.sleep(2 * RACY_NS / 1e9)
    baseline = Baseline()
    snapshot = store.put(tree, baseline=baseline)
    info = os.stat(tree / "a")
    read = []

    def counted(fd: int, size: int, allowance: int):
        read.append(os.fstat(fd).st_ino)
        return read_content(fd, size, None, allowance)

    assert scan(tree, baseline, counted, mapped=frozenset([(info.st_dev, info.st_ino)])).updates == {}
    assert read == [info.st_ino]
    # And the next time, since it was not to be trusted this time.
    assert (
        store.put(tree, snapshot, baseline=baseline, mapped=frozenset([(info.st_dev, info.st_ino)]))
        is snapshot
    )
    read.clear()
    scan(tree, baseline, counted)
    assert read == [info.st_ino]


def test_limits_stop_a_scan_and_name_the_place(tree):
    with pytest.raises(WorkspaceLimit, match=r"more than 3 entries, reached in '(sub|\.)'"):
        scan(tree, StatCache(), limits=TreeLimits(entries=3))
    (tree / "sub" / "large").write_bytes(bytes(range(256)) * 4096)
    with pytest.raises(WorkspaceLimit, match=r"more than 1000000 bytes of files, reached in 'sub'"):
        scan(tree, StatCache(), limits=TreeLimits(bytes=1_000_000))
    (tree / "/".join(["d"] * 9)).mkdir(parents=True)
    with pytest.raises(WorkspaceLimit, match=r"'d/d/d/d/d' lies deeper than the limit of 5 directories"):
        scan(tree, StatCache(), limits=TreeLimits(depth=5))


def test_a_crowd_of_files_ends_the_scan_before_it_is_read(store, tree):
    snapshot = store.put(tree)
    crowd = tree / "crowd"
    crowd.mkdir()
    fd = os.open(crowd, os.O_PATH)
    for number in range(CROWD):
        os.mknod(str(number), 0o644, dir_fd=fd)
    os.close(fd)
    small = SnapshotStore(store.path, TreeLimits(entries=10_000))
    baseline = Baseline()
    with pytest.raises(WorkspaceLimit, match=r"more than 10000 entries, reached in 'crowd'"):
        small.put(tree, snapshot, baseline=baseline)
    # Going back is possible from such a state, too.
    assert small.restore_in_place(snapshot, tree, baseline=baseline) == snapshot.digest
    assert not crowd.exists()


def test_sparse_files_cost_what_they_hold(store, tree, tmp_path):
    with (tree / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with (tree / "island").open("wb") as file:
        file.seek(1 << 39)
        file.write(b"here")
        file.truncate(1 << 40)
    snapshot = store.put(tree)
    assert snapshot.bytes == (2 << 40) + 8
    assert store.restore(snapshot, tmp_path / "copy") == snapshot.digest
    for name in ("sparse", "island"):
        info = os.stat(tmp_path / "copy" / name)
        assert info.st_size == 1 << 40
        assert info.st_blocks * 512 <= 1 << 20
    with (tmp_path / "copy" / "island").open("rb") as file:
        file.seek(1 << 39)
        assert file.read(6) == b"here\0\0"


def test_islands_in_a_sparse_file_count_as_the_chunks_that_have_to_be_read(tree):
    with (tree / "islands").open("wb") as file:
        for number in range(64):
            file.seek(number << 24)
            file.write(b"x")
        file.truncate(64 << 24)
    with pytest.raises(WorkspaceLimit, match=r"'islands' holds more bytes than the limit leaves, 1048576"):
        scan(tree, StatCache(), limits=TreeLimits(bytes=1 << 20))


def test_the_same_bytes_are_the_same_content_with_and_without_holes(store, tmp_path):
    digests = []
    for name in ("holes", "zeros"):
        root = tmp_path / name
        root.mkdir()
        with (root / "f").open("wb") as file:
            file.write(b"start")
            if name == "holes":
                file.truncate(5 << 20)
            else:
                file.write(bytes((5 << 20) - 5))
        digests.append(store.put(root).digest)
    assert digests[0] == digests[1]


def deep(root: Path, levels: int, name: bytes) -> None:
    fd = os.open(root, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    file = os.open("bottom", os.O_WRONLY | os.O_CREAT, dir_fd=fd)
    os.write(file, b"deep")
    os.close(file)
    os.close(fd)


def test_a_path_longer_than_the_system_takes_is_recorded_and_comes_back(store, tree, tmp_path):
    deep(tree, 300, b"n" * 60)
    snapshot = store.put(tree)
    # As many open files as any process has, and no more.
    script = (
        "import sys, resource; from midstream.envs.store.store import *; from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); base = Path(sys.argv[1])\n"
        "store = SnapshotStore(base / 'store'); first = store.put(base / 'tree')\n"
        "assert store.restore(first, base / 'copy') == first.digest == sys.argv[2]\n"
        "assert store.restore_in_place(first, base / 'copy', baseline=Baseline()) == first.digest\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path), snapshot.digest], check=True, timeout=60)


def test_devices_are_refused_and_sockets_come_back_as_nodes(store, tree, tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tree / "sock"))
    os.mkfifo(tree / "fifo")
    snapshot = store.put(tree)
    assert store.restore(snapshot, tmp_path / "copy") == snapshot.digest
    assert (tmp_path / "copy" / "sock").is_socket()
    assert (tmp_path / "copy" / "fifo").is_fifo()
    try:
        os.mknod(tree / "null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        # The mark of an overlay is a device as well, and anybody can make it.
        os.mknod(tree / "null", stat.S_IFCHR, os.makedev(0, 0))
    with pytest.raises(WorkspaceLimit, match="'null' is a device, which cannot be recorded: remove it"):
        store.put(tree)


def test_links_are_recorded_and_never_followed(store, tree, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (tree / "out").symlink_to(outside)
    (tree / "hard").hardlink_to(outside / "secret")
    snapshot = store.put(tree)
    assert {change.path for change in snapshot.changes} == {"a", "hard", "out", "sub", "sub/b", "sub/empty"}
    store.restore(snapshot, tmp_path / "copy")
    assert (tmp_path / "copy" / "out").readlink() == outside
    # Going back to other modes and times must not change the file outside through its other name.
    before = os.stat(outside / "secret")
    os.chmod(tmp_path / "copy" / "hard", 0o600)
    other = store.put(tmp_path / "copy", snapshot)
    assert store.restore_in_place(other, tree, baseline=Baseline()) == other.digest
    after = os.stat(outside / "secret")
    assert (after.st_mode, after.st_mtime_ns, after.st_nlink) == (before.st_mode, before.st_mtime_ns, 1)


def test_a_directory_swapped_for_a_link_during_the_scan_is_never_followed(store, tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "tree"
    for directory, content in ((outside, "secret"), (root / "d", "own")):
        directory.mkdir(parents=True)
        (directory / "f").write_text(content)
    (root / "link").symlink_to(outside)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            os.rename(root / "d", root / "t")
            os.rename(root / "link", root / "d")
            os.rename(root / "d", root / "link")
            os.rename(root / "t", root / "d")

    swapper = threading.Thread(target=swap)
    swapper.start()
    secret = hash_of_file(outside / "f")
    try:
        for _ in range(200):
            try:
                found = scan(root, StatCache()).updates
            except SnapshotError as error:
                assert "kept changing" in str(error)
                continue
            assert all(entry.content != secret for entry in found.values())
    finally:
        stop.set()
        swapper.join()


def hash_of_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hash_only(file.fileno(), path.stat().st_size, 1 << 20)[0]


def test_a_file_that_never_holds_still_is_an_error_and_not_a_torn_snapshot(tree):
    def rewritten(fd: int, size: int, allowance: int):
        (tree / "a").write_text(str(time.time_ns()))
        return b"", 0

    with pytest.raises(SnapshotError, match=r"'a' kept changing in 4 scans; stop the processes"):
        scan(tree, StatCache(), rewritten)


def test_what_replaces_what(store, tree, tmp_path):
    """Every kind of node in place of every other, with one cache all along."""
    baseline, snapshot = Baseline(), None
    place = tree / "x"
    makes = {
        "file": lambda: place.write_text("x"),
        "directory": lambda: (
            place.mkdir(),
            (place / "below").mkdir(),
            (place / "below" / "f").write_text("y"),
        ),
        "link": lambda: place.symlink_to("a"),
        "fifo": lambda: os.mkfifo(place),
    }
    for one in makes:
        for other in makes:
            for kind in (one, other):
                subprocess.run(["rm", "-rf", str(place)], check=True)
                makes[kind]()
                snapshot = store.put(tree, snapshot, baseline=baseline)
                assert store.put(tree).digest == snapshot.digest
    assert EMPTY.updated(baseline.tree.entries).digest == snapshot.digest


UNPRIVILEGED = """
import os, sys
from pathlib import Path
from midstream.envs.store.store import Baseline, SnapshotStore
from midstream.envs.store.removal import remove_tree
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
base = Path(sys.argv[1]); tree = base / "tree"; (tree / "shut" / "inner").mkdir(parents=True)
(tree / "shut" / "f").write_text("x"); (tree / "g").write_text("y"); (tree / "shut" / "inner" / "h").write_text("z")
(tree / "listed").mkdir(); (tree / "listed" / "i").write_text("i")
def close():
    for name, mode in (("shut/inner", 0), ("shut/f", 0), ("shut", 0), ("g", 0o200), ("listed", 0o400), (".", 0)):
        os.chmod(tree / name, mode)
def modes(root):
    found = {".": root.stat().st_mode & 0o7777}; root.chmod(0o700)
    for name in ("shut", "g", "listed"):
        found[name] = (root / name).stat().st_mode & 0o7777
    root.chmod(found["."])
    return found
close()
store = SnapshotStore(base / "store"); baseline = Baseline()
first = store.put(tree, baseline=baseline)
assert modes(tree) == {".": 0, "shut": 0, "g": 0o200, "listed": 0o400}, modes(tree)
assert store.put(tree, first, baseline=baseline) is first
assert store.restore(first, base / "copy") == first.digest
assert modes(base / "copy") == modes(tree)
for name in (".", "shut", "shut/inner"):
    os.chmod(tree / name, 0o700)
(tree / "shut" / "inner" / "h").write_text("changed"); (tree / "shut" / "f").unlink(); (tree / "listed").chmod(0)
os.chmod(tree / "shut" / "inner", 0); os.chmod(tree / "shut", 0); os.chmod(tree, 0o300)
second = store.put(tree, first, baseline=baseline)
assert [c.path for c in second.changes] == ["listed", "shut/f", "shut/inner/h"], second.changes
assert store.restore_in_place(first, tree, baseline=baseline) == first.digest
assert modes(base / "copy") == modes(tree)
assert store.restore_in_place(second, base / "copy", baseline=Baseline()) == second.digest
assert store.restore(first, base / "copy2") == first.digest
for name in ("copy", "copy2", "tree"):
    remove_tree(base / name)
    assert not (base / name).exists()
"""


def test_modes_that_keep_the_owner_out_are_read_and_kept():
    # As an unprivileged user, since root is kept out of nothing.
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        subprocess.run([sys.executable, "-c", UNPRIVILEGED, name], check=True, timeout=30)
