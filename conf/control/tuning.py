"""The side of whoever tunes: what a run's control folder says, the next change of it, and its writing."""

import getpass
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from midstream.conf.control.acknowledged import Acknowledgement, acknowledgement_in
from midstream.conf.control.changes import (
    BASE,
    FOLDER,
    LAST_VERSION,
    MOST_CHARS,
    Change,
    Delta,
    Entry,
    entries_of,
    path_of,
)
from midstream.conf.control.live import differing, merged, value_at
from midstream.conf.control.strict import ControlError, model_in, read_model
from midstream.conf.errors import ConfigError, Problem
from midstream.conf.files import create_file
from midstream.conf.schema import LayerConfig


@dataclass(frozen=True)
class Chain:
    """What stands in the control folder of a run: the job's own configuration, and all changes, oldest first."""

    run_dir: Path
    base: LayerConfig
    entries: tuple[Entry, ...]
    acknowledgement: Acknowledgement | None

    @property
    def valid(self) -> list[Change]:
        """The changes that can be used."""
        return [entry.change for entry in self.entries if entry.change is not None]

    @property
    def version(self) -> int:
        """The newest valid version; 0: the job's own configuration."""
        return max((change.version for change in self.valid), default=0)

    @property
    def layer(self) -> LayerConfig:
        """The configuration that is in force once the job has read the files."""
        return next((e.layer for e in reversed(self.entries) if e.layer is not None), self.base)

    @property
    def next_version(self) -> int:
        """The first that is not taken, by whatever, after all that were ever in force. Raises ControlError."""
        taken = {entry.version for entry in self.entries}
        version = max(self.version, self.acknowledgement.version if self.acknowledgement else 0) + 1
        while version in taken:
            version += 1
        if version > LAST_VERSION:
            raise ControlError(
                f"{self.run_dir / FOLDER} has no version left after {LAST_VERSION}: remove that file"
            )
        return version


def has_control(run_dir: Path) -> bool:
    """Whether a job has begun there, also where it may not be looked at, which whoever reads it says."""
    try:
        return (run_dir / FOLDER / BASE).exists()
    except PermissionError:
        return True


def chain_of(run_dir: Path) -> Chain:
    """What stands in the control folder of a run. Raises ControlError."""
    path = run_dir / FOLDER / BASE
    try:
        base = read_model(LayerConfig, path)
        entries = tuple(entries_of(run_dir, base))
    except ControlError as error:
        raise ControlError(f"{path}: {error}; the job writes it when it starts") from error
    except OSError as error:
        raise ControlError(f"cannot read {path.parent} ({error.strerror}): mend access") from error
    return Chain(run_dir, base, entries, acknowledgement_in(run_dir))


def changed(chain: Chain, values: Mapping[str, Any], problems: Sequence[Problem] = ()) -> Change | None:
    """The change that gives live settings these values, checked as the job will; None where they are so already.

    ``problems`` are those found before.

    Raises:
        ConfigError: naming all problems.
        ControlError: what it comes to cannot be written.
    """
    try:
        layer = merged(chain.layer, values)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    change = _change_to(chain, layer)
    return change if change.changes else None


def undone(chain: Chain) -> Change:
    """The change that takes back the newest that is not taken back yet. Raises ControlError."""
    standing: list[Change] = []
    for change in chain.valid:
        if change.undoes is None:
            standing.append(change)
        else:
            standing = [other for other in standing if other.version != change.undoes]
    if not standing:
        raise ControlError(f"{chain.run_dir} has no change left to undo")
    before = standing[-2].values if len(standing) > 1 else {}
    try:
        layer = merged(chain.base, before)
    except ConfigError as error:
        raise ControlError(
            f"what was before version {standing[-1].version} is not valid any more: {error}"
        ) from error
    return _change_to(chain, layer, standing[-1].version)


def commit(run_dir: Path, change: Change) -> None:
    """Write a change. Raises ControlError, where somebody was quicker too; nothing is written then."""
    path = path_of(run_dir, change.version)
    try:
        create_file(path, change.encoded())
    except FileExistsError:
        raise ControlError(
            f"{_quicker(path, change.version)}; nothing of yours is written: look at --log, and tune again"
        ) from None
    except OSError as error:
        raise ControlError(
            f"cannot write {path} ({error.strerror}): tune as the user of the job, on a file system with space and "
            "hard links"
        ) from error


def _change_to(chain: Chain, layer: LayerConfig, undoes: int | None = None) -> Change:
    now = chain.layer
    change = Change(
        version=chain.next_version,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        who=_who(),
        changes={
            key: Delta(old=value_at(now, key), new=value_at(layer, key)) for key in differing(now, layer)
        },
        values=differing(chain.base, layer),
        undoes=undoes,
    )
    # What the job would not read is not to be written.
    model_in(Change, change.encoded())
    return change


def _quicker(path: Path, version: int) -> str:
    try:
        theirs = read_model(Change, path)
    except ControlError as error:
        return f"{path} is there already: {error}"
    return f"{theirs.who} wrote version {version} at {theirs.time}, while this was checked ({theirs.told})"


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # Containers run as numbers without a name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:MOST_CHARS]
