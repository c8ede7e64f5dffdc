"""The job's side of its control files: which configuration is in force."""

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from midstream.conf.control.acknowledged import Acknowledgement, Refusal, write_acknowledgement
from midstream.conf.control.changes import ACKNOWLEDGED, BASE, FOLDER, read_change, version_in
from midstream.conf.control.strict import ControlError, Unreadable
from midstream.conf.files import replace_file
from midstream.conf.schema import LayerConfig

_MOST_REFUSALS = 20
"""The newest so many are named to whoever tunes."""
_MOST_CHARS = 500
"""Of an alarm."""

# A file as it was when it was refused: its number on disk, time and size. None: it could not be read.
_Seen = tuple[int, int, int] | None


@dataclass(frozen=True)
class Settled:
    """What a look at the control files came to."""

    version: int
    """Of the change that made the configuration in force; 0: it is the job's own."""
    layer: LayerConfig
    changed: bool
    """Whether it is another one than at the look before."""
    alarms: tuple[str, ...]
    """What is wrong, each said once."""


class Control:
    """Which configuration is in force in a job.

    The newest valid control file decides, and versions only go up: a file that cannot be used changes nothing, and
    neither does one that is damaged or removed after it was taken up. After a restart the newest valid file holds
    again, on top of the job's own configuration as it is then: what the file does not name follows that
    configuration, what it names stays as it was tuned. A file whose values the new configuration does not admit
    is refused like any other, and the newest before it that is admitted holds, or the job's own configuration.

    Nothing of it raises for what files hold or disks do. For one thread.
    """

    def __init__(self, run_dir: Path, base: LayerConfig) -> None:
        """Write down ``base``, the job's own configuration, for whoever tunes."""
        self._run_dir, self._base = run_dir, base
        self._folder = run_dir / FOLDER
        self._version, self._layer = 0, base
        self._refused: dict[str, tuple[_Seen, str]] = {}
        self._past: set[str] = set()  # names that say nothing new any more
        self._said: set[str] = set()
        self._alarms: list[str] = []
        self._noted: tuple[int, int, list[Refusal]] | None = None
        self.refusals = 0
        """How many files were refused, since the job's start."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._folder / BASE, base.model_dump_json(indent=1).encode())
        except OSError as error:
            self._alarm(
                f"{self._folder / BASE} cannot be written ({error.strerror}): nobody can tune this job"
            )

    def read(self) -> Settled:
        """The configuration in force now; costs a listing of the folder where nothing has changed."""
        before = self._version
        names = self._names()
        for name in names:
            if self._takes(name):
                break
        newer = set(filter(self._is_newer, names))
        self._refused = {name: known for name, known in self._refused.items() if name in newer}
        alarms, self._alarms = tuple(self._alarms), []
        return Settled(self._version, self._layer, self._version != before, alarms)

    def acknowledge(self, step: int) -> None:
        """Note for whoever tunes that what was read last is in force at a step."""
        newest = sorted(self._refused.items(), reverse=True)[:_MOST_REFUSALS]
        refused = [Refusal(file=_line(name), problem=_line(problem)) for name, (_, problem) in newest]
        noted = (self._version, step, refused)
        if noted == self._noted:
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            write_acknowledgement(
                self._run_dir, Acknowledgement(version=self._version, step=step, time=now, refused=refused)
            )
        except OSError as error:
            path = self._folder / ACKNOWLEDGED
            self._alarm(f"{path} cannot be written ({error.strerror}): whoever tunes waits in vain")
        else:
            self._noted = noted

    def _names(self) -> list[str]:
        """Files that may say something new, newest first; those that are not named after a version at the end."""
        try:
            with os.scandir(self._folder) as entries:
                names = {entry.name for entry in entries if entry.name.endswith(".json")}
                # A writer that was killed leaves its draft.
                found = {name for name in names if not name.startswith(".")} - self._past
        except FileNotFoundError:
            return []
        except OSError as error:
            self._alarm(f"{self._folder} cannot be read ({error.strerror}): mend access")
            return []
        newer = set(filter(self._is_newer, found))
        self._past |= found - newer
        return sorted(newer, key=lambda name: (version_in(name) or 0, name), reverse=True)

    def _is_newer(self, name: str) -> bool:
        version = version_in(name)
        if version is None:
            return name not in (BASE, ACKNOWLEDGED)
        return version > self._version

    def _takes(self, name: str) -> bool:
        """Whether a file is valid, and with that in force."""
        path, version = self._folder / name, version_in(name)
        seen = _seen(path)
        if seen is not None and seen == self._refused.get(name, (None, ""))[0]:
            return False
        try:
            if version is None:
                raise ControlError("no change has such a name")
            _, layer = read_change(path, version, self._base)
        except ControlError as error:
            # What could not be read is tried again, what was read only once it is another file.
            self._refused[name] = (None if isinstance(error, Unreadable) else seen, str(error))
            self.refusals += self._alarm(
                f"{path} changes nothing: {error}. Remove it, and write changes with `midstream tune`"
            )
            return False
        self._version, self._layer = version, layer
        return True

    def _alarm(self, text: str) -> bool:
        """Whether it was not said before."""
        line = _line(text)
        if line in self._said:
            return False
        self._said.add(line)
        self._alarms.append(line)
        return True


def _seen(path: Path) -> _Seen:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _line(text: str) -> str:
    """As a log can take it: files hold anything."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:_MOST_CHARS])
