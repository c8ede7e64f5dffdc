"""A change and its file: `RUN/control/000001.json`, `000002.json`, and so on.

A file is written once, whole, and never changed; each holds all that differs from the job's own configuration, so
that the newest that is valid says everything. The files together are the record of who changed what, and when.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from midstream.conf.control.live import live_settings, merged, value_text
from midstream.conf.control.strict import ControlError, read_model
from midstream.conf.errors import ConfigError
from midstream.conf.schema import LayerConfig
from midstream.conf.schema.base import Section

FOLDER = "control"
BASE = "base.json"
"""The job's own configuration, under which its changes are checked."""
ACKNOWLEDGED = "acknowledged.json"
"""What the job has taken up."""
LAST_VERSION = 999_999
_MOST_VALUES = 1000
MOST_CHARS = 200
"""Of a key, a time and a name."""

ShortText = Annotated[str, Field(max_length=MOST_CHARS)]


class Delta(Section):
    """What one setting was, and what it becomes."""

    old: Any
    new: Any

    @property
    def told(self) -> str:
        """In one line."""
        return f"{value_text(self.old)} → {value_text(self.new)}"


class Change(Section):
    """One accepted change; keys are those of live settings, relative to `midstream`."""

    version: int = Field(ge=1, le=LAST_VERSION)
    time: ShortText
    """ISO 8601, in UTC."""
    who: ShortText
    """user@host"""
    changes: dict[ShortText, Delta] = Field(max_length=_MOST_VALUES)
    values: dict[ShortText, Any] = Field(max_length=_MOST_VALUES)
    """All that differs from the job's own configuration with this change."""
    undoes: int | None = None
    """The version that is taken back by it."""

    @property
    def told(self) -> str:
        """In one line: each setting, what it was, and what it becomes."""
        return ", ".join(f"{key} {delta.told}" for key, delta in self.changes.items()) or "nothing changes"

    def encoded(self) -> bytes:
        """The content of its file."""
        return (json.dumps(self.model_dump(mode="json"), indent=1, allow_nan=False) + "\n").encode()


@dataclass(frozen=True)
class Entry:
    """A file of the folder: the change and the configuration that it makes, or why it makes none."""

    path: Path
    version: int
    change: Change | None = None
    layer: LayerConfig | None = None
    problem: str = ""


def path_of(run_dir: Path, version: int) -> Path:
    """The file of a version."""
    return run_dir / FOLDER / f"{version:06d}.json"


def version_in(name: str) -> int | None:
    """The version that a file is named after; None for any other name."""
    named = re.fullmatch(r"[0-9]{6}\.json", name)
    return (int(name[:6]) or None) if named else None


def read_change(path: Path, version: int, base: LayerConfig) -> tuple[Change, LayerConfig]:
    """A change, and ``base`` with it.

    Raises:
        Unreadable: the file has no content, now.
        ControlError: it is damaged, or not to be used on this configuration.
    """
    change = read_model(Change, path)
    if change.version != version:
        raise ControlError(f"it says that it is version {change.version}")
    for key in change.values:
        if key not in live_settings():
            raise ControlError(f"{key} is no setting that can be changed while the job runs")
    try:
        return change, merged(base, change.values)
    except ConfigError as error:
        first, *others = map(str, error.problems)
        raise ControlError(f"{first}; and {len(others):,} more" if others else first) from error


def entries_of(run_dir: Path, base: LayerConfig) -> Iterator[Entry]:
    """All changes of a run, oldest first. Raises OSError where the folder cannot be read."""
    named = {version_in(path.name): path for path in (run_dir / FOLDER).iterdir()}
    for version in sorted(version for version in named if version is not None):
        path = named[version]
        try:
            yield Entry(path, version, *read_change(path, version, base))
        except ControlError as error:
            yield Entry(path, version, problem=str(error))
