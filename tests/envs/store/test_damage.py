"""Damage is found and named, and never comes back as a file; a snapshot in a file is checked like one in a store."""

import json
import os
import random
import struct

import pytest

from midstream.envs.errors import SnapshotDamaged, SnapshotError
from midstream.envs.store import bundle, manifests
from midstream.envs.store.chunks import EMPTY_HASH
from midstream.envs.store.manifests import Manifest
from midstream.envs.store.records import EMPTY, Entry
from midstream.envs.store.removal import remove_tree
from midstream.envs.store.store import Baseline, SnapshotStore
from tests.envs.store.trees import listing


@pytest.fixture
def filled(store, tree):
    """A store with a snapshot of several blocks and one more whose only change is in a pack of its own."""
    noise = random.Random(0).randbytes
    for number in range(8):
        (tree / f"f{number}").write_bytes(noise(30_000))
    (tree / "large").write_bytes(noise(1_200_000) + bytes(3 << 20) + noise(1000))
    baseline = Baseline()
    first = store.put(tree, baseline=baseline)
    (tree / "own").write_bytes(noise(5000))
    return first, store.put(tree, first, baseline=baseline)


def pack_of(store: SnapshotStore, position: int):
    rows = store._index._connection().execute("SELECT name FROM packs ORDER BY id").fetchall()
    return store.path / "packs" / f"{rows[position][0]}.pack"


def test_a_sound_store_has_no_damage(store, filled):
    assert store.verify() == []


def test_every_bit_that_flips_in_a_pack_is_found_named_and_never_restored(store, filled, tmp_path):
    first, second = filled
    pack = pack_of(store, 1)
    sound = pack.read_bytes()
    rng = random.Random(1)
    for at in [17, 30, len(sound) - 1, *(rng.randrange(17, len(sound)) for _ in range(40))]:
        broken = bytearray(sound)
        broken[at] ^= 1 << rng.randrange(8)
        pack.write_bytes(broken)
        (damage,) = store.verify()
        assert damage.pack == pack.name
        assert damage.snapshots == (second.id,)
        assert damage.paths == ("own",)
        assert len(damage.contents) == 1
        # Either what was hit does not matter for the content, or the restore says which file.
        try:
            assert SnapshotStore(store.path).restore(second, tmp_path / "copy") == second.digest
            assert listing(tmp_path / "copy") == listing(tmp_path / "tree")
        except SnapshotDamaged as fault:
            assert "'own'" in str(fault)
        else:
            remove_tree(tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
        assert SnapshotStore(store.path).restore(first, tmp_path / "copy") == first.digest
        remove_tree(tmp_path / "copy")
    pack.write_bytes(sound)
    assert store.verify() == []


def test_packs_that_are_cut_off_or_gone_are_named_with_all_that_they_held(store, filled, tmp_path):
    first, second = filled
    pack = pack_of(store, 0)
    sound = pack.read_bytes()
    for content in (sound[: len(sound) // 2], b"", None):
        pack.unlink() if content is None else pack.write_bytes(content)
        (damage,) = store.verify()
        assert damage.pack == pack.name
        assert damage.snapshots == (first.id, second.id)
        assert "large" in damage.paths
        if not content:
            # All of the eight files, the two that came with the tree, and the large one with its three chunks.
            assert len(damage.contents) == 14
        with pytest.raises(SnapshotDamaged, match=r"cannot be restored: .*"):
            SnapshotStore(store.path).restore(first, tmp_path / "copy")
        # What cannot be read may name what is still there.
        assert store.collect([first, second]).blobs == 0
    pack.write_bytes(sound)
    assert store.verify() == []


def test_damaged_records_are_named(store, filled, tmp_path):
    first, second = filled
    connection = store._index._connection()
    (manifest,) = connection.execute("SELECT manifest FROM snapshots WHERE id = ?", (second.id,)).fetchone()
    for broken in (manifest[:-5], manifest[:50] + b"\0" + manifest[51:], b""):
        connection.execute("UPDATE snapshots SET manifest = ? WHERE id = ?", (broken, second.id))
        other = SnapshotStore(store.path)
        with pytest.raises(SnapshotDamaged, match=f"snapshot {second.id} is damaged"):
            other.restore(second, tmp_path / "copy")
        (damage,) = other.verify()
        assert damage.snapshots == (second.id,)
        assert other.restore(first, tmp_path / "copy") == first.digest
        remove_tree(tmp_path / "copy")


def test_records_with_another_digest_are_found(store, filled):
    _, second = filled
    connection = store._index._connection()
    connection.execute("UPDATE snapshots SET digest = 'other' WHERE id = ?", (second.id,))
    (damage,) = store.verify()
    assert damage.snapshots == (second.id,)


def test_a_content_that_no_pack_has_is_named(store, filled):
    first, second = filled
    connection = store._index._connection()
    connection.execute("DELETE FROM blobs WHERE size = 5000")
    (damage,) = store.verify()
    assert (damage.pack, damage.snapshots, damage.paths) == (None, (second.id,), ("own",))
    assert first in store


def test_a_bundle_holds_everything_and_any_damage_to_it_is_seen(store, filled, tmp_path):
    _, second = filled
    file = tmp_path / "bundle"
    store.export_snapshot(second, file)
    sound = file.read_bytes()
    rng = random.Random(2)
    spoilt = [sound[:-1], sound[: len(sound) // 2], sound[:25], sound + b"x"]
    for _ in range(30):
        broken = bytearray(sound)
        broken[rng.randrange(21, len(sound))] ^= 1 << rng.randrange(8)
        spoilt.append(bytes(broken))
    other = SnapshotStore(tmp_path / "other")
    for content in spoilt:
        file.write_bytes(content)
        with pytest.raises(SnapshotDamaged, match=r"bundle is damaged or cut off"):
            other.import_snapshot(file)
    for content in (b"", b"PK\3\4 something else"):
        file.write_bytes(content)
        with pytest.raises(SnapshotError, match="is no exported snapshot"):
            other.import_snapshot(file)
    with pytest.raises(SnapshotError, match="cannot read the snapshot .*nothing: No such file"):
        other.import_snapshot(tmp_path / "nothing")
    assert other.statistics().snapshots == 0
    assert not list((other.path / "packs").iterdir())
    file.write_bytes(sound)
    assert other.import_snapshot(file, pin="me") == second
    assert other.import_snapshot(file) == second
    assert other.collect().snapshots == 0
    assert other.restore(second, tmp_path / "copy") == second.digest
    assert listing(tmp_path / "copy") == listing(tmp_path / "tree")
    # Going on from it costs a delta, as in its own store.
    third = other.put(tmp_path / "copy", second)
    assert third is second


def test_a_snapshot_that_was_collected_can_be_imported_again(store, filled, tmp_path):
    first, second = filled
    store.export_snapshot(first, tmp_path / "bundle")
    store.collect([second])
    assert first not in store
    assert store.import_snapshot(tmp_path / "bundle") == first
    assert store.restore(first, tmp_path / "copy") == first.digest
    assert not store.verify()


@pytest.mark.parametrize(
    "path",
    [b"../escape", b"/escape", b"link/escape", b"sub/../escape", b"file/below", b"nowhere/below", b"a//b"],
)
def test_a_forged_bundle_with_a_path_that_leaves_the_tree_is_refused(store, tree, tmp_path, path):
    entries = {
        b"": Entry("d", 0o755, 0),
        b"link": Entry("l", 0o777, 0, 0, b".."),
        b"sub": Entry("d", 0o755, 0),
        b"file": Entry("f", 0o644, 0, 0, EMPTY_HASH),
        path: Entry("f", 0o644, 0, 0, EMPTY_HASH),
    }
    forged = EMPTY.updated(entries)
    snapshot = store.put(tree)
    head = json.dumps(snapshot.to_json() | {"id": "forged", "digest": forged.digest, "bytes": 0}).encode()
    manifest = Manifest(None, True, forged.sum, 0, {}, forged.entries)
    packed = manifests.compress(manifests.encode(manifest))
    content = bundle.MAGIC + struct.pack("<QQ", len(head), len(packed)) + head + packed
    file = tmp_path / "bundle"
    file.write_bytes(content)
    with file.open("rb") as source:
        checksum = bundle._checksum(source, len(content))
    file.write_bytes(content + checksum)
    with pytest.raises(SnapshotDamaged, match="does not name a node inside of it"):
        store.import_snapshot(file)
    assert os.listdir(store.path / "tmp") == []  # noqa: PTH208
