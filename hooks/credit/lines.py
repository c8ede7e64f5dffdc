"""Files of a run directory that hold a JSON object a line, compressed; each is there whole or not at all."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zstandard

from midstream.conf.files import replace_file

FOLDER = "rollouts"
_LEVEL = 3
_encode = json.JSONEncoder(allow_nan=False).encode


class KeptError(ValueError):
    """What a step kept cannot be read; the message names the file and what to do."""


def write_lines(path: Path, values: Iterable[dict[str, Any]]) -> None:
    """Write JSON-able values in place of the file that may be there. Raises OSError, and leaves that one."""
    lines = "".join(_encode(value) + "\n" for value in values)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(
        path,
        zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(lines.encode("ascii")),
    )


def read_lines(path: Path) -> list[Any]:
    """What `write_lines` wrote. Raises KeptError."""
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise KeptError(
            f"cannot read {path} ({error.strerror}): look as the user of the job, or mend access"
        ) from error
    try:
        unpacking = zstandard.ZstdDecompressor().decompressobj()
        lines = unpacking.decompress(packed).splitlines()
        if not unpacking.eof:
            raise ValueError("its end is missing")
        return [json.loads(line) for line in lines]
    except (zstandard.ZstdError, ValueError, RecursionError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> KeptError:
    """What to say of a file that does not hold what it should."""
    return KeptError(
        f"{path} is damaged, or of another version of midstream ({error}): remove it to read the others in peace"
    )
