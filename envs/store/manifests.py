"""The stored form of a snapshot's records: a whole tree, or what changed since the parent.

Columns rather than rows, so that they compress well and are read without a step per field: paths in order,
kinds, modes, times, sizes, contents; what few entries have (attributes, hard links) by position.
"""

import array
import json
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import zstandard

from midstream.envs.errors import SnapshotDamaged
from midstream.envs.store.records import HASH_BYTES, SUM_BYTES, Attributes, Entry, Updates

FORMAT = 2
LEVEL = 3
# Nothing that a store writes grows larger; a forged file shall not fill the memory.
MAX_MANIFEST_BYTES = 1 << 30
_LENGTH = struct.Struct("<Q")
_NS = 1_000_000_000


@dataclass(frozen=True)
class Manifest:
    """A snapshot as it is stored. `updates` is relative to the entries of `parent`, to none where `full`.

    `sum` and `bytes` are those of the whole state.
    """

    parent: str | None
    full: bool
    sum: int
    bytes: int
    state: dict[str, str]
    updates: Updates


def encode(manifest: Manifest) -> bytes:
    """The canonical bytes: equal manifests have equal ones."""
    header = {
        "format": FORMAT,
        "parent": manifest.parent,
        "full": manifest.full,
        "bytes": manifest.bytes,
        "state": manifest.state,
    }
    present = sorted((path, entry) for path, entry in manifest.updates.items() if entry is not None)
    gone = sorted(path for path, entry in manifest.updates.items() if entry is None)
    entries = [entry for _, entry in present]
    sections = [
        json.dumps(header, sort_keys=True, separators=(",", ":")).encode("ascii"),
        manifest.sum.to_bytes(SUM_BYTES, "little"),
        b"\0".join(gone) if gone else b"",
        _LENGTH.pack(len(gone)),
        b"\0".join([path for path, _ in present]),
        "".join([entry.kind for entry in entries]).encode("ascii"),
        _column("H", [entry.mode for entry in entries]),
        _column("q", [entry.mtime_ns // _NS for entry in entries]),
        _column("I", [entry.mtime_ns % _NS for entry in entries]),
        _column("Q", [entry.size for entry in entries]),
        b"".join([entry.content for entry in entries if entry.kind == "f"]),
        b"\0".join([entry.content for entry in entries if entry.kind == "l"]),
        _encode_rare(entries),
    ]
    return b"".join([_LENGTH.pack(len(section)) + section for section in sections])


def compress(encoded: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(encoded)


def decompress(stored: bytes) -> bytes:
    """Raises SnapshotDamaged."""
    try:
        if zstandard.frame_content_size(stored) > MAX_MANIFEST_BYTES:
            raise SnapshotDamaged(f"its records would take more than {MAX_MANIFEST_BYTES} bytes")
        return zstandard.ZstdDecompressor().decompress(stored)
    except zstandard.ZstdError as error:
        raise SnapshotDamaged(f"its records cannot be unpacked ({error})") from error


def decode(encoded: bytes) -> Manifest:
    """What `encode` was given. Raises SnapshotDamaged where the bytes are none of its results."""
    try:
        return _decode(encoded)
    except (ValueError, TypeError, KeyError, IndexError, struct.error) as error:
        raise SnapshotDamaged(f"its records make no sense ({error})") from error


def checksum(encoded: bytes) -> bytes:
    return blake2b(encoded, digest_size=HASH_BYTES).digest()


def snapshot_id(encoded: bytes, salt: bytes) -> str:
    """The name of a snapshot: the hash of its records, of those that differ from its parent's if it has one.

    With a salt of its own, two that hold the same have different names.
    """
    return blake2b(encoded, digest_size=20, person=b"snapshot", salt=salt).hexdigest()


def _decode(encoded: bytes) -> Manifest:
    sections = _sections(encoded)
    header: dict[str, Any] = json.loads(sections[0])
    if header["format"] != FORMAT:
        raise SnapshotDamaged(f"its records have format {header['format']}, this version reads {FORMAT}")
    (gone_count,) = _LENGTH.unpack(sections[3])
    updates: dict[bytes, Entry | None] = dict(_entries(sections[4:]))
    # One path that is empty and no path at all look the same without the count.
    gone = sections[2].split(b"\0") if gone_count else []
    if len(gone) != gone_count:
        raise ValueError("its deleted paths are cut off")
    updates.update(dict.fromkeys(gone))
    total = int.from_bytes(sections[1], "little")
    return Manifest(header["parent"], header["full"], total, header["bytes"], dict(header["state"]), updates)


def _sections(encoded: bytes) -> list[bytes]:
    sections, at = [], 0
    while at < len(encoded):
        (length,) = _LENGTH.unpack_from(encoded, at)
        at += _LENGTH.size
        if length > len(encoded) - at:
            raise ValueError("cut off")
        sections.append(encoded[at : at + length])
        at += length
    return sections


def _entries(sections: list[bytes]) -> Iterable[tuple[bytes, Entry]]:
    kinds = sections[1].decode("ascii")
    paths = sections[0].split(b"\0") if kinds else []
    modes = _numbers("H", sections[2])
    seconds, rests = _numbers("q", sections[3]), _numbers("I", sections[4])
    sizes = _numbers("Q", sections[5])
    if not len(paths) == len(kinds) == len(modes) == len(seconds) == len(rests) == len(sizes):
        raise ValueError("its columns differ in length")
    hashes = [sections[6][at : at + HASH_BYTES] for at in range(0, len(sections[6]), HASH_BYTES)]
    targets = sections[7].split(b"\0") if "l" in kinds else []
    if len(hashes) != kinds.count("f") or len(targets) != kinds.count("l"):
        raise ValueError("its contents are not as many as its files and links")
    contents = {"f": iter(hashes), "l": iter(targets)}
    none = iter(lambda: b"", None)
    times = [second * _NS + rest for second, rest in zip(seconds, rests, strict=True)]
    entries = [
        Entry(kind, mode, mtime_ns, size, next(contents.get(kind, none)))
        for kind, mode, mtime_ns, size in zip(kinds, modes, times, sizes, strict=True)
    ]
    for position, (attributes, link) in _decode_rare(sections[8]).items():
        entries[position] = entries[position]._replace(attributes=attributes, link=link)
    return zip(paths, entries, strict=True)


def _encode_rare(entries: list[Entry]) -> bytes:
    parts = []
    for position, entry in enumerate(entries):
        if entry.attributes or entry.link:
            fields = [entry.link, *(part for pair in entry.attributes for part in pair)]
            parts += [_LENGTH.pack(position), _LENGTH.pack(len(fields))]
            parts += [_LENGTH.pack(len(field)) + field for field in fields]
    return b"".join(parts)


def _decode_rare(section: bytes) -> Mapping[int, tuple[Attributes, bytes]]:
    found, at = {}, 0
    while at < len(section):
        position, count = struct.unpack_from("<QQ", section, at)
        at += 2 * _LENGTH.size
        fields = []
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(section, at)
            at += _LENGTH.size
            fields.append(section[at : at + length])
            at += length
        found[position] = tuple(zip(fields[1::2], fields[2::2], strict=True)), fields[0]
    return found


def _column(code: str, values: list[int]) -> bytes:
    column = array.array(code, values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _numbers(code: str, section: bytes) -> "array.array[int]":
    column = array.array(code)
    column.frombytes(section)
    if sys.byteorder == "big":
        column.byteswap()
    return column
