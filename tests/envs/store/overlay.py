"""An overlay of two directories: mounted where that is allowed, else its rules followed by hand on a copy."""

# ruff: noqa: PTH101, PTH103, PTH108, PTH112, PTH114, PTH116, PTH118, PTH208

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MARKS = ("user.overlay.", "trusted.overlay.")


def can_mount() -> bool:
    return os.geteuid() == 0


@contextmanager
def mounted(lowers: list[Path], upper: Path | None, place: Path) -> Iterator[Path]:
    """Needs root. The first of the lower directories is the topmost."""
    place.mkdir(exist_ok=True)
    options = "lowerdir=" + ":".join(map(str, lowers))
    if upper is not None:
        work = upper.with_name(upper.name + ".work")
        work.mkdir(exist_ok=True)
        options += f",upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def merge_by_hand(layer: Path, into: Path) -> None:
    """Applies a layer to a directory that holds the lower tree."""
    copies: dict[int, str] = {}
    _merge(os.fsencode(layer), os.fsencode(into), copies)


def _merge(layer: bytes, into: bytes, copies: dict[int, bytes]) -> None:
    for name in os.listdir(layer):
        source, target = os.path.join(layer, name), os.path.join(into, name)
        info = os.lstat(source)
        is_directory = stat.S_ISDIR(info.st_mode)
        if os.path.lexists(target) and not (
            is_directory and os.path.isdir(target) and not os.path.islink(target)
        ):
            shutil.rmtree(target) if os.path.isdir(target) and not os.path.islink(target) else os.unlink(
                target
            )
        if stat.S_ISCHR(info.st_mode):
            assert info.st_rdev == 0
        elif is_directory:
            os.makedirs(target, exist_ok=True)
            _merge(source, target, copies)
        elif info.st_ino in copies:
            os.link(copies[info.st_ino], target, follow_symlinks=False)
        else:
            subprocess.run(["cp", "-a", "--", source, target], check=True)
            copies[info.st_ino] = target
    _copy_facts(layer, into)


def _copy_facts(source: bytes, target: bytes) -> None:
    info = os.stat(source)
    for key in os.listxattr(target):
        if key.startswith("user."):
            os.removexattr(target, key)
    for key in os.listxattr(source):
        if key.startswith("user.") and not key.startswith(MARKS):
            os.setxattr(target, key, os.getxattr(source, key))
    os.chmod(target, stat.S_IMODE(info.st_mode))
    os.utime(target, ns=(info.st_mtime_ns, info.st_mtime_ns))
