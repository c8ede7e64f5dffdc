"""Says on disk whose a directory is, in a way that no kill can leave undone.

A sandbox's directory `<root>/<name>` is claimed by the symbolic link `<root>/.claims-<uid>/<name>`, whose target
is the owner's label: a link is made with its target in one step. It is made before the directory and removed
after it, so that a directory without a claim was never ours. A temporary folder carries the label in its own
name instead, for the same reason.

Owners on other hosts, in other containers or of earlier boots cannot be seen; they count as gone where

- the root lies on a disk of this host, which has rebooted since, or
- they once said in this root that they live (`beat`), and have been silent for SILENT_S since, by the clock of
  the root's own file system.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.ownership.mounts import is_local
from midstream.envs.ownership.owners import Owner, is_alive, is_of_earlier_boot, this_process

SILENT_S = 900.0
TEMP_PREFIX = "midstream-"

_BEATS = ".beats"
_TEMP_LABEL = re.compile(r"(?:[a-z]+-)?(\d+\..+)-[a-z0-9_]+")

OwnerState = Literal["alive", "gone", "unknown"]


@dataclass(frozen=True)
class Claimed:
    """A directory that somebody claimed; it may not exist yet, or no more. `owner` is None where unreadable."""

    directory: Path
    owner: Owner | None
    state: OwnerState


def claim(directory: Path, label: str) -> None:
    """Says whose the directory is going to be; call it before the directory is made.

    Claiming again what one owns is fine. Raises EnvironmentFailure where another owner
    has the directory, the label is none, or the parent cannot be written.
    """
    if Owner.parse(label) is None:
        raise EnvironmentFailure(
            f"{label!r} is no owner's label: take it from owners.this_process(job).label"
        )
    claims = claims_of(directory.parent)
    try:
        claims.mkdir(mode=0o700, parents=True, exist_ok=True)
        (claims / directory.name).symlink_to(label)
    except FileExistsError:
        present = _label(claims / directory.name)
        if present != label:
            raise EnvironmentFailure(f"{directory} belongs to {present}, not to {label}") from None
    except OSError as error:
        raise EnvironmentFailure(f"cannot claim {directory}: {error.strerror}") from error


def release(directory: Path) -> None:
    """Takes the claim back; call it when the directory is gone. Fine where there is none."""
    (claims_of(directory.parent) / directory.name).unlink(missing_ok=True)


def beat(root: Path, label: str) -> None:
    """Says to whoever cannot see this process that it lives; call it now and then, at least every minute."""
    beats = claims_of(root) / _BEATS
    beats.mkdir(mode=0o700, parents=True, exist_ok=True)
    (beats / label).touch()


def end_beat(root: Path, label: str) -> None:
    (claims_of(root) / _BEATS / label).unlink(missing_ok=True)


def claimed(root: Path) -> list[Claimed]:
    """All that this user has claimed in the root."""
    claims = claims_of(root)
    if not _is_own(claims):
        return []
    local = is_local(root)
    found = []
    for link in sorted(claims.iterdir()):
        label = _label(link)
        if label is not None:
            owner = Owner.parse(label)
            found.append(Claimed(root / link.name, owner, _state(owner, claims, local)))
    return found


def leftovers(root: Path) -> list[Path]:
    """The directories in the root whose owners are gone; they may not exist any more."""
    return [each.directory for each in claimed(root) if each.state == "gone"]


def forget_silent(root: Path) -> None:
    """Removes the heartbeats of owners that are gone."""
    claims = claims_of(root)
    local = is_local(root)
    for path in _listed(claims / _BEATS):
        owner = Owner.parse(path.name)
        if owner is not None and _state(owner, claims, local) == "gone":
            path.unlink(missing_ok=True)


def claims_of(root: Path) -> Path:
    """The directory of this user's claims in the root."""
    return root / f".claims-{os.geteuid()}"


def foreign_claims(root: Path) -> list[tuple[int, int]]:
    """Users other than this one who have claims in the root, by number, with how many they have at least."""
    others = [path for path in _listed(root, ".claims-*") if path != claims_of(root)]
    return [(path.lstat().st_uid, len(_listed(path))) for path in others]


def temp_prefix(kind: str = "", job: str = "") -> str:
    """How the names of temporary folders begin that the reaper finds when we are killed; for `tempfile`.

    The whole name is `midstream-[kind-]<label>-<random>`; `kind` is a word of small letters.
    """
    return (
        f"{TEMP_PREFIX}{kind}-{this_process(job).label}-"
        if kind
        else f"{TEMP_PREFIX}{this_process(job).label}-"
    )


def temp_directories(temp: Path) -> Iterator[tuple[Path, Owner | None, OwnerState]]:
    """The folders that midstream made in the temp directory; without owner where the name has no label."""
    local = is_local(temp)
    for path in _listed(temp, f"{TEMP_PREFIX}*"):
        if path.is_dir() and not path.is_symlink():
            match = _TEMP_LABEL.fullmatch(path.name.removeprefix(TEMP_PREFIX))
            owner = None if match is None else Owner.parse(match.group(1))
            yield path, owner, _state(owner, None, local)


def _state(owner: Owner | None, claims: Path | None, local: bool) -> OwnerState:
    if owner is None:
        return "unknown"
    alive = is_alive(owner)
    if alive is None:
        gone = (local and is_of_earlier_boot(owner)) or (claims is not None and _is_silent(owner, claims))
        return "gone" if gone else "unknown"
    return "alive" if alive else "gone"


def _is_silent(owner: Owner, claims: Path) -> bool:
    beats = claims / _BEATS
    try:
        last_s = (beats / owner.label).stat().st_mtime
        now = beats / f".now-{os.getpid()}"
        now.touch()
        now_s = now.stat().st_mtime
        now.unlink(missing_ok=True)
    except OSError:
        return False
    return now_s - last_s > SILENT_S


def _label(link: Path) -> str | None:
    try:
        return str(link.readlink())
    except OSError:
        return None


def _is_own(directory: Path) -> bool:
    try:
        return directory.lstat().st_uid == os.geteuid() and not directory.is_symlink()
    except OSError:
        return False


def _listed(directory: Path, pattern: str = "*") -> list[Path]:
    try:
        return sorted(directory.glob(pattern))
    except OSError:
        return []
