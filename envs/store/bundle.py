"""One snapshot as one file that any store on any host takes.

    magic, length of the head, the head (JSON), the manifest, blocks as in a pack, checksum of all before it

The checksum is looked at before anything else, the digest of the state before anything is recorded.
"""

import json
import os
import struct
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from midstream.envs.errors import SnapshotDamaged, SnapshotError
from midstream.envs.protocol import Snapshot
from midstream.envs.store import manifests
from midstream.envs.store.chunks import CHUNK_BYTES
from midstream.envs.store.contents import Contents, Incoming, write_failed
from midstream.envs.store.manifests import Manifest
from midstream.envs.store.packs import BlockWriter, is_content, read_blocks
from midstream.envs.store.records import EMPTY, HASH_BYTES, Entry, Tree, parent, text

MAGIC = b"midstream snapshot 1\n"
_LENGTHS = struct.Struct("<QQ")
_MAX_HEAD_BYTES = 1 << 28


def write_bundle(
    snapshot: Snapshot, tree: Tree, state: dict[str, str], contents: Contents, file: Path
) -> None:
    """Writes the file, whole or not at all, synced. Raises SnapshotError, SnapshotDamaged, SnapshotMissing."""
    temporary = file.with_name(f".{file.name}.{os.urandom(6).hex()}")
    try:
        with temporary.open("xb") as out:
            _write(snapshot, tree, state, contents, out)
            out.flush()
            os.fsync(out.fileno())
        with temporary.open("r+b") as out:
            checksum = _checksum(out, out.seek(0, os.SEEK_END))
            out.seek(0, os.SEEK_END)
            out.write(checksum)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    except OSError as error:
        raise write_failed(file, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def read_bundle(file: Path, incoming: Incoming) -> tuple[Snapshot, Tree, dict[str, str]]:
    """What the file holds, its blobs on their way into a pack.

    Raises SnapshotDamaged for a file that is not as it was written, SnapshotError for one that cannot be read or
    is no snapshot.
    """
    try:
        with file.open("rb") as source:
            return _read(file, source, incoming)
    except OSError as error:
        raise SnapshotError(f"cannot read the snapshot {file}: {error.strerror}") from error


def _write(snapshot: Snapshot, tree: Tree, state: dict[str, str], contents: Contents, out: BinaryIO) -> None:
    head = json.dumps(snapshot.to_json()).encode("ascii")
    manifest = Manifest(snapshot.parent, True, tree.sum, tree.content_bytes, state, tree.entries)
    packed = manifests.compress(manifests.encode(manifest))
    out.write(MAGIC + _LENGTHS.pack(len(head), len(packed)) + head + packed)
    writer = BlockWriter(out)
    for blob_hash in _blobs(tree, contents):
        writer.add(blob_hash, contents.blob(blob_hash))
    writer.flush()


def _blobs(tree: Tree, contents: Contents) -> Iterator[bytes]:
    seen: set[bytes] = set()
    files = [
        (path, entry) for path, entry in sorted(tree.entries.items()) if entry.kind == "f" and entry.size
    ]
    contents.locate({entry.content for _, entry in files})
    for _, entry in files:
        chunks = contents.chunk_hashes(entry.content) if entry.size > CHUNK_BYTES else []
        for blob_hash in (entry.content, *chunks):
            if blob_hash not in seen:
                seen.add(blob_hash)
                yield blob_hash


def _checksum(source: BinaryIO, end: int) -> bytes:
    source.seek(0)
    checksum, left = blake2b(digest_size=HASH_BYTES, person=b"bundle"), end
    while left > 0:
        part = source.read(min(left, 1 << 20))
        if not part:
            break
        checksum.update(part)
        left -= len(part)
    return checksum.digest()


def _read(file: Path, source: BinaryIO, incoming: Incoming) -> tuple[Snapshot, Tree, dict[str, str]]:
    end = os.fstat(source.fileno()).st_size - HASH_BYTES
    if source.read(len(MAGIC)) != MAGIC:
        raise SnapshotError(f"{file} is no exported snapshot, or one of another version")
    if end < len(MAGIC) + _LENGTHS.size or _checksum(source, end) != source.read(HASH_BYTES):
        raise SnapshotDamaged(
            f"{file} is damaged or cut off: it does not match its checksum; export it again"
        )
    source.seek(len(MAGIC))
    head_bytes, manifest_bytes = _LENGTHS.unpack(source.read(_LENGTHS.size))
    if head_bytes > _MAX_HEAD_BYTES or head_bytes + manifest_bytes > end:
        raise SnapshotDamaged(f"{file} is damaged: its head does not fit into it")
    try:
        head: dict[str, Any] = json.loads(source.read(head_bytes))
        snapshot = Snapshot.from_json(head)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SnapshotDamaged(f"{file} is damaged: its head makes no sense ({error})") from error
    try:
        manifest = manifests.decode(manifests.decompress(source.read(manifest_bytes)))
        tree = _checked_tree(manifest, snapshot)
    except SnapshotDamaged as fault:
        raise SnapshotDamaged(f"{file} is damaged: {fault}") from fault
    found = _keep_blobs(file, source, end, incoming)
    _check_files(file, tree, found)
    return snapshot, tree, manifest.state


def _checked_tree(manifest: Manifest, snapshot: Snapshot) -> Tree:
    entries = {path: entry for path, entry in manifest.updates.items() if entry is not None}
    for path, entry in entries.items():
        _check_place(path, entry, entries)
    tree = EMPTY.updated(entries)
    if tree.digest != snapshot.digest or tree.content_bytes != manifest.bytes:
        raise SnapshotDamaged("its records do not have the digest that it names")
    return tree


def _check_place(path: bytes, entry: Entry, entries: dict[bytes, Entry]) -> None:
    """A record must name a node inside the tree, below a directory of the tree."""
    if path == b"":
        if entry.kind != "d":
            raise SnapshotDamaged("its root is no directory")
        return
    above = entries.get(parent(path))
    name = path[path.rfind(b"/") + 1 :]
    if above is None or above.kind != "d" or name in (b"", b".", b"..") or path.startswith(b"/"):
        raise SnapshotDamaged(f"{text(path)!r} does not name a node inside of it")
    if entry.link and (first := entries.get(entry.link)) != entry:
        raise SnapshotDamaged(f"{text(path)!r} is no hard link of {text(entry.link)!r}: {first}")


def _keep_blobs(file: Path, source: BinaryIO, end: int, incoming: Incoming) -> set[bytes]:
    found = set()
    for blobs, content in read_blocks(source, str(file), end):
        for blob_hash, offset, size in blobs:
            blob = content[offset : offset + size]
            if not is_content(blob_hash, blob):
                raise SnapshotDamaged(f"{file} is damaged: it holds other bytes for {blob_hash.hex()}")
            incoming.keep(blob_hash, blob)
            found.add(blob_hash)
    return found


def _check_files(file: Path, tree: Tree, found: set[bytes]) -> None:
    for path, entry in tree.entries.items():
        if entry.kind == "f" and entry.size and entry.content not in found:
            raise SnapshotDamaged(f"{file} is damaged: it lacks the content of {text(path)!r}")
