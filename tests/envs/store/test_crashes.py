"""Killed at any moment, cut off from power or out of disk, a store has whole snapshots and nothing else.

`MIDSTREAM_SOAK=200 python -m pytest tests/envs/store/test_crashes.py` kills as often as it says.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from midstream.envs.errors import SnapshotDamaged, SnapshotMissing
from midstream.envs.protocol import Snapshot
from midstream.envs.store import durable, index
from midstream.envs.store.removal import remove_tree
from midstream.envs.store.store import Baseline, SnapshotStore

KILLS = int(os.environ.get("MIDSTREAM_SOAK", "12"))

WRITER = """
import json, os, random, sys
from pathlib import Path
from midstream.envs.store.store import Baseline, SnapshotStore
base, seed = Path(sys.argv[1]), int(sys.argv[2])
store, baseline, snapshot, rng = SnapshotStore(base / "store"), Baseline(), None, random.Random(seed)
tree = base / "tree"
print("ready", flush=True)
for turn in range(1_000_000):
    for number in range(20):
        (tree / f"f{rng.randrange(100)}").write_bytes(rng.randbytes(rng.randrange(20_000)))
    if turn % 10 == 9:
        store.collect([snapshot])
    snapshot = store.put(tree, snapshot, baseline=baseline, pin="writer" if turn % 3 == 0 else None)
    print(json.dumps(snapshot.to_json()), flush=True)
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    return tmp_path


def test_a_writer_killed_at_any_moment_leaves_whole_snapshots_only(base):
    store, rng = SnapshotStore(base / "store"), random.Random(0)
    for seed in range(KILLS):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(base), str(seed)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.01, 0.3))
        writer.send_signal(signal.SIGKILL)
        acknowledged = [line for line in writer.stdout.read().splitlines() if line.endswith("}")]
        writer.wait()
        writer.stdout.close()
        assert not store.verify()
        for line in acknowledged[-1:]:
            last = Snapshot.from_json(json.loads(line))
            assert store.restore(last, base / "copy") == last.digest
            remove_tree(base / "copy")
    store.collect()
    known = {f"{name}.pack" for (name,) in store._index._connection().execute("SELECT name FROM packs")}
    assert {path.name for path in (store.path / "packs").iterdir()} == known
    assert not list((store.path / "tmp").iterdir())
    pinned = store.pins().get("writer", frozenset())
    for snapshot_id in list(pinned)[:20]:
        store.restore(Snapshot(snapshot_id, ""), base / "copy")
        remove_tree(base / "copy")


FULL_DISK = """
import os, sys
from pathlib import Path
from midstream.envs.errors import SnapshotError
from midstream.envs.store.store import Baseline, SnapshotStore
base = Path(sys.argv[1]); full = base / "full"; tree = base / "tree"; tree.mkdir(); (tree / "small").write_text("s")
store = SnapshotStore(full / "store"); baseline = Baseline(); whole = store.put(tree, baseline=baseline)
for name, size in (("medium", 900_000), ("large", 9_000_000)):
    (tree / name).write_bytes(os.urandom(size))
    for pin in (None, "me"):
        try:
            store.put(tree, whole, baseline=baseline, pin=pin); raise SystemExit("no error for " + name)
        except SnapshotError as error:
            assert f"cannot write {full}/store/" in str(error) and "No space left" in str(error), error
    (tree / name).unlink()
    assert store.statistics().snapshots == 1 and not store.verify()
    assert len(list((full / "store" / "packs").iterdir())) == 1
    assert not list((full / "store" / "tmp").iterdir())
(tree / "after").write_text("fits")
after = store.put(tree, whole, baseline=baseline)
assert [change.path for change in after.changes] == ["after"], after.changes
# The index, too, may be what does not fit any more.
(full / "filler").write_bytes(bytes(400_000))
for number in range(1000):
    try:
        after = store.put(tree, after, baseline=baseline, state={"text": os.urandom(5000).hex()})
    except SnapshotError as error:
        assert "No space left" in str(error) or "cannot write" in str(error), error
        break
else:
    raise SystemExit("the disk is never full")
assert after in store and not store.verify()
(full / "filler").unlink()
assert store.put(tree, after, baseline=baseline, state={}) in store
(tree / "medium").write_bytes(os.urandom(900_000))
other = SnapshotStore(base / "other"); big = other.put(tree)
(base / "x").mkdir(); small = other.put(base / "x")
copy = full / "copy"
for use in (lambda: other.restore(big, copy), lambda: other.export_snapshot(big, copy),
            lambda: other.write_delta(small, big, copy)):
    try:
        use(); raise SystemExit("fitted into a full disk")
    except SnapshotError as error:
        assert str(copy) in str(error), error
    assert not copy.exists()
"""


def test_a_full_disk_is_named_and_leaves_nothing_half_written(tmp_path):
    # A mount namespace of its own, which ends with the process.
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    (tmp_path / "full").mkdir()
    mount = f"mount -t tmpfs -o size=700k tmpfs {tmp_path}/full"
    if subprocess.run([*unshare, "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("no file system of a fixed size can be mounted here")
    command = [*unshare, "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", FULL_DISK]
    subprocess.run([*command, str(tmp_path)], check=True, timeout=60)


def test_what_a_power_cut_took_is_forgotten_and_the_rest_is_whole(store, tree, tmp_path, monkeypatch):
    """As if the machine had gone down: packs that were never synced are cut off, and it is another boot."""
    baseline = Baseline()
    first = store.put(tree, baseline=baseline, pin="me")
    (tree / "lost").write_bytes(os.urandom(5000))
    second = store.put(tree, first, baseline=baseline)
    (tree / "lost").unlink()
    third = store.put(tree, second, baseline=baseline)
    synced = {name for (name,) in store._index._connection().execute("SELECT name FROM packs WHERE synced")}
    for pack in (store.path / "packs").iterdir():
        if pack.stem not in synced:
            with pack.open("r+b") as file:
                file.truncate(100)
    for module in (index, durable):
        monkeypatch.setattr(module, "boot_id", lambda: "another")
    after = SnapshotStore(store.path)
    assert first in after
    assert second not in after
    assert third in after
    assert not after.verify()
    for snapshot in (first, third):
        assert after.restore(snapshot, tmp_path / snapshot.id) == snapshot.digest
    with pytest.raises(SnapshotMissing):
        after.restore(second, tmp_path / "copy")
    # The content that was lost is not taken for one that is there.
    (tree / "lost").write_bytes(b"again")
    fourth = after.put(tree, third, baseline=baseline)
    assert after.restore(fourth, tmp_path / "copy") == fourth.digest


@pytest.mark.parametrize(("fsync", "pin"), [("pinned", "me"), ("always", None)])
def test_an_acknowledged_snapshot_is_synced_before_it_is_seen(tmp_path, tree, monkeypatch, fsync, pin):
    synced = []
    real = os.fsync

    def counted(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115
        real(fd)

    monkeypatch.setattr(os, "fsync", counted)
    store = SnapshotStore(tmp_path / "store", fsync=fsync)
    store.put(tree, pin=pin)
    assert [Path(path).parent.name for path in synced] == ["tmp", "store"]
    assert synced[1] == str(store.path / "packs")
    (level,) = store._index._connection().execute("PRAGMA synchronous").fetchone()
    assert level == 2


def test_pinning_syncs_what_the_snapshot_needs(store, tree, monkeypatch):
    synced = []
    first = store.put(tree)
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))  # noqa: PTH115
    (tree / "a").write_text("other\n")
    second = store.put(tree, first)
    assert synced == []
    store.pin([second], "me")
    assert len([path for path in synced if path.endswith(".pack")]) == 2
    synced.clear()
    store.pin([second.id], "you")
    assert synced == []


def test_an_index_that_is_damaged_says_so(store, tree):
    store.put(tree)
    for connection in (store._index._connection(),):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.close()
    path = store.path / "index.sqlite"
    content = bytearray(path.read_bytes())
    content[100:3000] = bytes(2900)
    path.write_bytes(content)
    with pytest.raises(SnapshotDamaged, match=r"the index .*index\.sqlite is damaged .* move"):
        SnapshotStore(store.path).verify()
    path.write_bytes(b"no database at all" * 1000)
    with pytest.raises(SnapshotDamaged, match=r"the index .*index\.sqlite is damaged"):
        SnapshotStore(store.path)
