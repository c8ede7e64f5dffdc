"""Tasks files: one task a line, and the file is there whole or not at all."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from midstream.conf.files import replace_file

TaskLine = dict[str, Any]
"""A task in the shape of a coding agent's data: `prompt`, `label`, `metadata`."""


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    """Write the tasks as JSONL to `path`, whose folder is made where it is missing, and return it.

    Raises OSError where the disk refuses, with nothing left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return path
