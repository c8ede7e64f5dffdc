"""Reads tasks from JSONL: one object a line with `prompt`, `label` and `metadata`.

For a workspace `metadata` has, all optional but `eval_cmd`: `files` (relative path to text), `pre_commands` (a list of
shell commands), `eval_cmd` (a shell command that exits 0 on success) and `workdir` (relative to the sandbox's
root). Other keys of `metadata` are kept as they are.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from midstream.envs.protocol import Task

# Raises TasksError where a task's metadata is not what an environment needs.
Check = Callable[[dict[str, Any]], None]

RESERVED = "midstream"
_TYPE_NAMES = {dict: "an object", list: "a list", str: "a string", type(None): "null"}


class TasksError(Exception):
    """A tasks file that cannot be used; the message says where and how to mend it."""


def load_tasks(path: Path | str, check: Check | None = None) -> list[Task]:
    """All tasks of a JSONL file, in order; blank lines are skipped.

    `check` raises TasksError where an environment could not do with a task's metadata. Raises TasksError: a missing
    or empty file, or `FILE:LINE: …` for the first line that is no task.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise TasksError(f"{path}: not a regular file; pass a JSONL file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TasksError(f"{path}: cannot read the tasks file: {error.strerror}; check the path") from error
    tasks = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            tasks.append(parse_task(line, check))
        except TasksError as error:
            raise TasksError(f"{path}:{number}: {error}") from error
    if not tasks:
        raise TasksError(f"{path}: the tasks file holds no task; write one JSON object a line")
    return tasks


def parse_task(line: str | bytes, check: Check | None = None) -> Task:
    """The task that one line of JSON holds. Raises TasksError, without a place, where it holds none."""
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        raise TasksError(f"not UTF-8 at byte {error.start + 1}; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise TasksError(f"broken JSON at column {error.colno}: {error.msg}; one object a line") from error
    except (RecursionError, ValueError) as error:
        raise TasksError(f"JSON that cannot be read ({error}); nest less, and use shorter numbers") from error
    if not isinstance(value, dict):
        raise TasksError(f"expected an object with prompt, label and metadata, found {_named(value)}")
    prompt = _member(value, "prompt", str)
    if not prompt.strip():
        raise TasksError("the prompt is blank; say what is to be done")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise TasksError(
            f"half of a surrogate pair ({error.object[error.start]!a}); use whole characters"
        ) from error
    label = _member(value, "label", str, type(None), default=None)
    metadata = _member(value, "metadata", dict)
    _check_reserved(metadata)
    if check is not None:
        check(metadata)
    return Task(prompt, label, metadata)


def check_metadata(metadata: dict[str, Any]) -> None:
    """Raises TasksError where a workspace could not be set up or scored from this."""
    _check_reserved(metadata)
    files = _member(metadata, "metadata.files", dict, default={})
    for name, text in files.items():
        if not isinstance(text, str):
            raise TasksError(f"metadata.files[{name!r}] must be a string, found {_named(text)}")
        _check_inside(f"metadata.files[{name!r}]", name)
        parts = _parts(name)
        if not parts:
            raise TasksError(f"metadata.files has the name {name!r}; give each file a relative path")
        for above in itertools.accumulate(parts[:-1], "{}/{}".format):
            if above in files:
                raise TasksError(f"metadata.files has {above!r} both as a file and as the folder of {name!r}")
    for index, command in enumerate(_member(metadata, "metadata.pre_commands", list, default=[])):
        if not isinstance(command, str):
            raise TasksError(f"metadata.pre_commands[{index}] must be a string, found {_named(command)}")
    _member(metadata, "metadata.eval_cmd", str)
    _check_inside("metadata.workdir", _member(metadata, "metadata.workdir", str, default="."))


def _check_reserved(metadata: dict[str, Any]) -> None:
    if RESERVED in metadata:
        raise TasksError(f"metadata.{RESERVED} is where rollouts keep their record; use another key")


def _check_inside(what: str, name: str) -> None:
    if not name or "\0" in name or name.startswith("/") or ".." in _parts(name):
        raise TasksError(f"{what}: the path {name!r} leaves the sandbox; use a relative path without '..'")


def _parts(name: str) -> list[str]:
    # Not by pathlib: every rollout comes by here with all of its files.
    return [part for part in name.split("/") if part not in ("", ".")]


_REQUIRED: Any = object()


def _member(parent: dict[str, Any], name: str, *kinds: type, default: Any = _REQUIRED) -> Any:
    value = parent.get(name.rpartition(".")[2], default)
    if value is _REQUIRED:
        raise TasksError(f"the key {name!r} is missing; add it")
    if not isinstance(value, kinds):
        wanted = " or ".join(_TYPE_NAMES[kind] for kind in kinds)
        raise TasksError(f"{name} must be {wanted}, found {_named(value)}")
    return value


def _named(value: Any) -> str:
    return _TYPE_NAMES.get(type(value)) or f"{type(value).__name__} {value!r}"
