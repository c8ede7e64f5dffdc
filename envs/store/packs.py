"""Files of compressed blocks that hold the blobs of snapshots.

    magic, then for each block: head, the blobs' hashes and sizes, their bytes as one zstd frame

Several small blobs share a block, which compresses them together. A block names what it holds and carries a
checksum, so that a pack can be checked, and what it lost named, without any index. A pack is written by one
process under a lock on the file, which ends with the process: a pack that no index knows and nobody locks is
left from a crash.
"""

import fcntl
import os
import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple

import zstandard

from midstream.envs.errors import SnapshotDamaged
from midstream.envs.store.chunks import hash_of, recipe_hash
from midstream.envs.store.records import HASH_BYTES

MAGIC = b"midstream pack 1\n"
# Large enough to compress well, small enough that one file is read back without unpacking much else.
BLOCK_BYTES = 32 * 1024
LEVEL = 3
SUFFIX = ".pack"
CHECKSUM_BYTES = 16
# bytes of the frame, bytes of its content, number of blobs, checksum of blobs' names and frame
_HEAD = struct.Struct(f"<IIH{CHECKSUM_BYTES}s")
_BLOB = struct.Struct(f"<{HASH_BYTES}sI")
_MAX_BLOBS = 4096
_CACHE_BYTES = 16 << 20
# The largest blob is the list of a large file's chunks; a forged block shall not fill the memory.
_MAX_RAW_BYTES = 64 << 20


class Block(NamedTuple):
    """Where a block lies in its pack, and what it holds: hash, offset in the block, and size of each blob."""

    offset: int
    length: int
    raw: int
    blobs: tuple[tuple[bytes, int, int], ...]


class Location(NamedTuple):
    """Where a blob is: the block, by pack and offset, and the part of its content."""

    pack: str
    offset: int
    length: int
    start: int
    size: int


@dataclass
class _Filling:
    blobs: list[tuple[bytes, bytes]]
    raw: int = 0


class BlockWriter:
    """Appends blobs to an open file as blocks. `blocks` are those that are written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)
        self._filling = _Filling([])
        self.blocks: list[Block] = []

    def add(self, blob_hash: bytes, blob: bytes) -> None:
        if self._filling.raw + len(blob) > BLOCK_BYTES or len(self._filling.blobs) == _MAX_BLOBS:
            self.flush()
        self._filling.blobs.append((blob_hash, blob))
        self._filling.raw += len(blob)

    def flush(self) -> None:
        """Writes what is left as a block of its own. Raises OSError."""
        blobs, raw = self._filling.blobs, self._filling.raw
        if not blobs:
            return
        frame = self._compressor.compress(b"".join([blob for _, blob in blobs]))
        named = b"".join([_BLOB.pack(blob_hash, len(blob)) for blob_hash, blob in blobs])
        head = _HEAD.pack(len(frame), raw, len(blobs), _checksum(named, frame))
        offset = self._file.tell()
        self._file.write(head + named + frame)
        placed, at = [], 0
        for blob_hash, blob in blobs:
            placed.append((blob_hash, at, len(blob)))
            at += len(blob)
        self.blocks.append(Block(offset, len(head) + len(named) + len(frame), raw, tuple(placed)))
        self._filling = _Filling([])


class Pack:
    """One new pack: filled, closed under its final name, and kept locked until its snapshot is in the index."""

    def __init__(self, store: Path) -> None:
        """Creates the file. Raises OSError."""
        self.name = os.urandom(12).hex()
        self.path = store / "packs" / (self.name + SUFFIX)
        self._temporary = store / "tmp" / (self.name + SUFFIX)
        self._file = _locked_new_file(self._temporary)
        self._file.write(MAGIC)
        self._writer = BlockWriter(self._file)
        self.bytes = 0
        self.synced = False

    @property
    def blocks(self) -> list[Block]:
        return self._writer.blocks

    def add(self, blob_hash: bytes, blob: bytes) -> None:
        self._writer.add(blob_hash, blob)

    def finish(self, *, sync: bool) -> None:
        """Writes what is left and gives the pack its name, still locked. Raises OSError."""
        self._writer.flush()
        self.bytes = self._file.tell()
        self._file.flush()
        if sync:
            os.fsync(self._file.fileno())
        self._temporary.replace(self.path)
        if sync:
            sync_directory(self.path.parent)
            self.synced = True

    def close(self, *, keep: bool) -> None:
        """Lets go of the file, and removes it unless a snapshot in the index uses it."""
        if not keep:
            self._temporary.unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
        try:
            self._file.close()
        except OSError:
            # The disk is full: what could not be written belonged to a file that is gone.
            if keep:
                raise


def _locked_new_file(path: Path) -> BinaryIO:
    while True:
        file = path.open("xb")
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        # A collector took the unlocked file for one that a crash had left.
        file.close()


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class BlockReader:
    """Reads blobs from packs, checks each, and keeps the blocks that were read last. For one thread."""

    def __init__(self, store: Path) -> None:
        self._packs = store / "packs"
        self._cache: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._cached_bytes = 0

    def read(self, blob_hash: bytes, location: Location) -> bytes:
        """The blob. Raises FileNotFoundError where its pack is gone, SnapshotDamaged where it is another one."""
        content = self._block(location)
        blob = content[location.start : location.start + location.size]
        if not is_content(blob_hash, blob):
            raise SnapshotDamaged(f"the pack {location.pack} holds other bytes for {blob_hash.hex()}")
        return blob

    def _block(self, location: Location) -> bytes:
        key = location.pack, location.offset
        if (content := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            return content
        path = self._packs / (location.pack + SUFFIX)
        with path.open("rb") as file:
            file.seek(location.offset)
            stored = file.read(location.length)
        # Each blob is checked against its hash, so the checksum of the block can be left to `check_pack`.
        content = unpack_block(stored, f"{path} at {location.offset}", check=False)[1]
        self._cache[key] = content
        self._cached_bytes += len(content)
        while self._cached_bytes > _CACHE_BYTES:
            self._cached_bytes -= len(self._cache.popitem(last=False)[1])
        return content


def is_content(blob_hash: bytes, blob: bytes) -> bool:
    """Whether the blob is what this hash names: bytes of files, or a list of chunks."""
    return hash_of(blob) == blob_hash or recipe_hash(blob) == blob_hash


def unpack_block(
    stored: bytes, where: str, *, check: bool = True
) -> tuple[tuple[tuple[bytes, int, int], ...], bytes]:
    """The blobs of a stored block (hash, offset, size) and their bytes. Raises SnapshotDamaged."""
    if len(stored) < _HEAD.size:
        raise SnapshotDamaged(f"{where}: a block is cut off")
    length, raw, count, checksum = _HEAD.unpack_from(stored)
    names_end = _HEAD.size + count * _BLOB.size
    if len(stored) != names_end + length:
        raise SnapshotDamaged(f"{where}: a block is cut off or its head is damaged")
    named, frame = stored[_HEAD.size : names_end], stored[names_end:]
    if check and _checksum(named, frame) != checksum:
        raise SnapshotDamaged(f"{where}: a block does not match its checksum")
    try:
        if raw > _MAX_RAW_BYTES or zstandard.frame_content_size(frame) != raw:
            raise SnapshotDamaged(f"{where}: a block has another size than its head says")
        content = zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise SnapshotDamaged(f"{where}: a block cannot be unpacked ({error})") from error
    blobs, at = [], 0
    for blob_hash, size in _BLOB.iter_unpack(named):
        blobs.append((blob_hash, at, size))
        at += size
    if at != len(content) or at != raw:
        raise SnapshotDamaged(f"{where}: a block has another size than its head says")
    return tuple(blobs), content


def read_blocks(
    file: BinaryIO, where: str, end: int
) -> Iterator[tuple[tuple[tuple[bytes, int, int], ...], bytes]]:
    """The blocks from here to the offset `end`, one by one. Raises SnapshotDamaged."""
    while file.tell() < end:
        offset = file.tell()
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise SnapshotDamaged(f"{where} at {offset}: a block is cut off")
        length, _, count, _ = _HEAD.unpack(head)
        rest = file.read(min(count * _BLOB.size + length, end - offset))
        yield unpack_block(head + rest, f"{where} at {offset}")


def check_pack(path: Path, size: int) -> None:
    """Reads a whole pack. Raises FileNotFoundError, or SnapshotDamaged for the first block that is not sound."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != size or file.read(len(MAGIC)) != MAGIC:
            raise SnapshotDamaged(f"{path} is cut off or no pack: {found} bytes instead of {size}")
        for _ in read_blocks(file, str(path), size):
            pass


def _checksum(named: bytes, frame: bytes) -> bytes:
    checksum = blake2b(named, digest_size=CHECKSUM_BYTES)
    checksum.update(frame)
    return checksum.digest()
