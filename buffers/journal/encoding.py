"""A rollout as the bytes that the journal keeps, compact and exact.

    head: magic, format, bytes of the next part
    a JSON object, packed: the record without its long columns, and for each of these its width and its bytes
    the columns of numbers (`columns`), one after another

Each column is as narrow as its numbers allow: token ids take three bytes each, log-probs that an engine computed in
single precision four, and every bit of them is kept. What follows from the spans is left out: the loss mask, and the
log-probs of tokens that are not the model's, which are 0.0.
"""

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import zstandard
from pydantic_core import PydanticSerializationError, to_json

from midstream.buffers.journal.columns import floats, floats_of, integers, integers_of
from midstream.buffers.journal.errors import JournalDamaged, JournalError
from midstream.buffers.journal.records import Member, Summary
from midstream.buffers.parts import RecordError, Span, made_by_the_model
from midstream.buffers.rollout import COLUMNS, PartialRollout

FORMAT = 2
_MAGIC = b"midR"
_HEAD = struct.Struct("<4sHI")
_LEVEL = 1
# Bytes for a number, the first that fits.
_TOKEN_WIDTHS, _MASK_WIDTHS, _LOG_PROB_WIDTHS = (3, 8), (1, 8), (4, 8)
# The name of the log-probs where those of the model's tokens are all that is stored.
_OF_THE_MODEL = "model_log_probs"

# Bytes of each number, and the numbers in as many parts as they come.
Parts = tuple[int, Sequence[bytes | memoryview]]


def member_of(rollout: PartialRollout) -> Member:
    """The rollout for the journal. Raises what `encode` does."""
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
    """The bytes of a rollout.

    Raises:
        JournalError: its columns hold what is no number.
        RecordError: its spans overlap or leave its tokens.
    """
    columns = _columns_of(rollout)
    layout = {name: (width, sum(map(len, parts))) for name, (width, parts) in columns.items()}
    described = _as_json({"record": rollout.to_json(without=COLUMNS), "columns": layout})
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(described)
    head = _HEAD.pack(_MAGIC, FORMAT, len(packed))
    return b"".join([head, packed, *(part for _, parts in columns.values() for part in parts)])


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
    at, columns = _HEAD.size + length, {}
    try:
        described = json.loads(zstandard.ZstdDecompressor().decompress(payload[_HEAD.size : at]))
        for name, (width, size) in described["columns"].items():
            columns[name] = (width, payload[at : at + size])
            at += size
        if at != len(payload):
            raise ValueError(f"{len(payload) - at} bytes too many")
        record = described["record"] | _lists_of(columns, described["record"]["spans"])
    except RecordError:
        raise
    except (zstandard.ZstdError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise JournalDamaged(f"a rollout's record cannot be unpacked ({error}): drop its group") from error
    return PartialRollout.from_json(record)


def _as_json(value: dict[str, Any]) -> bytes:
    try:
        return to_json(value, inf_nan_mode="constants")
    except PydanticSerializationError:  # a lone surrogate, as in the name of a file that is not UTF-8
        return json.dumps(value).encode("ascii")


def _columns_of(rollout: PartialRollout) -> dict[str, Parts]:
    columns: dict[str, Parts] = {}
    for name in ("prompt_tokens", "tokens"):
        width, column = _narrowest(integers, name, getattr(rollout, name), _TOKEN_WIDTHS)
        columns[name] = width, [column]
    width, mask = _narrowest(integers, "loss_mask", rollout.loss_mask, _MASK_WIDTHS)
    if mask != made_by_the_model(rollout.spans, len(rollout.tokens)):
        columns["loss_mask"] = width, [mask]
    width, log_probs = _narrowest(floats, "log_probs", rollout.log_probs, _LOG_PROB_WIDTHS)
    of_the_model, others = _parted(memoryview(log_probs), width, rollout.spans)
    if len(rollout.log_probs) == len(rollout.tokens) and others == bytes(len(others)):
        columns[_OF_THE_MODEL] = width, of_the_model
    else:
        columns["log_probs"] = width, [log_probs]
    return columns


def _lists_of(columns: dict[str, tuple[int, bytes]], spans: list[list[int]]) -> dict[str, list[Any]]:
    """The inverse of `_columns_of`."""
    lists: dict[str, list[Any]] = {
        name: integers_of(column, width)
        for name, (width, column) in columns.items()
        if name in ("prompt_tokens", "tokens", "loss_mask")
    }
    length, parsed = len(lists["tokens"]), [Span(*span) for span in spans]
    made = made_by_the_model(parsed, length)
    if "loss_mask" not in lists:
        lists["loss_mask"] = list(made)
    if _OF_THE_MODEL in columns:
        width, of_the_model = columns[_OF_THE_MODEL]
        log_probs = _spread(of_the_model, width, parsed, length)
    else:
        width, log_probs = columns["log_probs"]
    return lists | {"log_probs": floats_of(log_probs, width)}


def _narrowest(
    packed: Callable[[list[Any], int], bytes | None], name: str, values: list[Any], widths: Sequence[int]
) -> tuple[int, bytes]:
    try:
        for width in widths:
            if (column := packed(values, width)) is not None:
                return width, column
    except (TypeError, OverflowError) as error:
        raise JournalError(
            f"{name} of a rollout cannot be written down ({error}): they must be numbers"
        ) from error
    raise AssertionError(f"no number takes more than {widths[-1]} bytes")


def _parted(column: memoryview, width: int, spans: Sequence[Span]) -> tuple[list[memoryview], bytes]:
    """What lies within the spans, and what between them."""
    within, between, at = [], [], 0
    for span in spans:
        between.append(column[at * width : span.start * width])
        within.append(column[span.start * width : span.end * width])
        at = span.end
    return within, b"".join([*between, column[at * width :]])


def _spread(within: bytes, width: int, spans: Sequence[Span], length: int) -> bytes:
    """A column of so many numbers from those within the spans; the others are 0."""
    column, at = bytearray(length * width), 0
    for span in spans:
        size = (span.end - span.start) * width
        column[span.start * width : span.end * width] = within[at : at + size]
        at += size
    return bytes(column)
