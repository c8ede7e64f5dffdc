"""A rollout as the bytes that the journal keeps, compact and exact.

    head: magic, format, bytes of the next part
    a JSON object, packed: the record without its long columns, and how these are laid out
    the columns of numbers, one after another

A column is taken apart into planes: all first bytes of its numbers, all second bytes, and so on. A plane of one
byte repeated is kept as that byte. So token ids need three bytes, not four, and log-probs that an engine computed in
single precision five, not eight, with every bit of them kept. The loss mask is left out where it follows from the
spans.
"""

import dataclasses
import json
import struct
from collections.abc import Sequence
from typing import Any

import zstandard

from midstream.buffers.journal.errors import JournalDamaged, JournalError
from midstream.buffers.journal.records import Member, Summary
from midstream.buffers.rollout import PartialRollout, Span

FORMAT = 1
_MAGIC = b"midR"
_HEAD = struct.Struct("<4sHI")
_LEVEL = 1
# Kinds of numbers, as `struct` has them: 32 and 64 bits, and floating point.
_INT, _LONG, _FLOAT = "i", "q", "d"
_COLUMNS = {"prompt_tokens": _INT, "tokens": _INT, "loss_mask": _INT, "log_probs": _FLOAT}
_DERIVED = "loss_mask"

Layout = list[Any]


def member_of(rollout: PartialRollout) -> Member:
    """The rollout for the journal. Raises JournalError where its columns hold what is no number."""
    versions = [span.version for span in rollout.spans]
    summary = Summary(
        tokens=len(rollout.tokens),
        turns=len(rollout.turns),
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
        snapshots=tuple(rollout.snapshots),
        status=rollout.status.value,
    )
    return Member(encode(rollout), summary)


def encode(rollout: PartialRollout) -> bytes:
    """The bytes of a rollout. Raises JournalError where its columns hold what is no number."""
    columns: dict[str, list[Any]] = {name: getattr(rollout, name) for name in _COLUMNS}
    # Without the columns, of which `to_json` makes copies.
    short = dataclasses.replace(rollout, prompt_tokens=[], tokens=[], log_probs=[], loss_mask=[])
    record = {name: value for name, value in short.to_json().items() if name not in _COLUMNS}
    if columns[_DERIVED] == _mask_of(rollout.spans, len(rollout.tokens)):
        del columns[_DERIVED]
    layouts: dict[str, Layout] = {}
    stored: list[bytes] = []
    for name, values in columns.items():
        layouts[name], planes = _taken_apart(name, values)
        stored += planes
    described = json.dumps({"record": record, "columns": layouts}, separators=(",", ":"))
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(described.encode("ascii"))
    return b"".join([_HEAD.pack(_MAGIC, FORMAT, len(packed)), packed, *stored])


def decode(payload: bytes) -> PartialRollout:
    """The rollout of these bytes.

    Raises:
        JournalError: they are of another version of midstream; JournalDamaged where they are no rollout's.
        RecordError: the rollout's parts contradict each other.
    """
    if len(payload) < _HEAD.size or not payload.startswith(_MAGIC):
        raise JournalDamaged(f"{len(payload)} bytes are no rollout's record: drop its group")
    _, found, length = _HEAD.unpack_from(payload)
    if found != FORMAT:
        raise JournalError(
            f"a rollout's record has format {found}, this version of midstream reads {FORMAT}: go on with the version"
            " that wrote it, or set another run_dir"
        )
    try:
        described = json.loads(
            zstandard.ZstdDecompressor().decompress(payload[_HEAD.size : _HEAD.size + length])
        )
        record, at = described["record"], _HEAD.size + length
        for name, layout in described["columns"].items():
            record[name], at = _put_together(layout, payload, at)
    except (zstandard.ZstdError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise JournalDamaged(f"a rollout's record cannot be unpacked ({error}): drop its group") from error
    if at != len(payload):
        raise JournalDamaged(f"a rollout's record has {len(payload) - at} bytes too many: drop its group")
    if _DERIVED not in record:
        spans = [Span(*span) for span in record["spans"]]
        record[_DERIVED] = _mask_of(spans, len(record["tokens"]))
    return PartialRollout.from_json(record)


def _mask_of(spans: Sequence[Span], length: int) -> list[int]:
    """The loss mask in which every token of the model counts."""
    mask = [0] * length
    for span in spans:
        mask[span.start : span.end] = [1] * (span.end - span.start)
    return mask


def _taken_apart(name: str, values: list[Any]) -> tuple[Layout, list[bytes]]:
    """How a column is laid out, and its planes: kind, length, and for each plane its byte or None if it is kept."""
    kind = _COLUMNS[name]
    try:
        try:
            column = struct.pack(f"<{len(values)}{kind}", *values)
        except struct.error:
            kind = _LONG
            column = struct.pack(f"<{len(values)}{kind}", *values)
    except struct.error as error:
        raise JournalError(
            f"{name} of a rollout cannot be written down ({error}): they must be numbers"
        ) from error
    width = struct.calcsize(f"<{kind}")
    planes = [column[index::width] for index in range(width)]
    repeated = [plane[0] if plane and plane == plane[:1] * len(plane) else None for plane in planes]
    kept = [plane for plane, byte in zip(planes, repeated, strict=True) if byte is None]
    return [kind, len(values), repeated], kept


def _put_together(layout: Layout, payload: bytes, at: int) -> tuple[list[Any], int]:
    """The values of a column whose planes begin at `at`, and where they end."""
    kind, length, repeated = layout
    column = bytearray(length * len(repeated))
    for index, byte in enumerate(repeated):
        if byte is None:
            column[index :: len(repeated)] = payload[at : at + length]
            at += length
        else:
            column[index :: len(repeated)] = bytes([byte]) * length
    return list(struct.unpack(f"<{length}{kind}", column)), at
