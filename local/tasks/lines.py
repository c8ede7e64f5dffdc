"""Tasks files: one task a line, and the file is there whole or not at all."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TaskLine = dict[str, Any]
"""A task in the shape of a coding agent's data: `prompt`, `label`, `metadata`."""


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    """Write the tasks as JSONL to `path`, whose folder is made where it is missing, and return it.

    Raises OSError where the disk refuses, with nothing left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
