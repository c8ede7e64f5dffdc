"""The raw mechanism that overlay snapshots rest on: overlay mounts and a rename, with nothing around them.

It runs in a process of its own with mount namespaces of its own (and a user namespace where it is not root's),
so that no mount outlives it.
"""

import ctypes
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

from trees import Turn

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18


class RawOverlay:
    """An overlay over `lower`, which nobody changes, in the empty folder `scratch`."""

    def __init__(self, lower: Path, scratch: Path) -> None:
        """`missing` says why it does not work here, "" where it does."""
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, lower, scratch), daemon=True)
        self._process.start()
        theirs.close()
        self.missing: str = self._ours.recv()

    def apply(self, turn: Turn) -> None:
        self._asked("apply", turn)

    def snapshot(self) -> float:
        """Unmounts, renames the upper, mounts again with one more lower; returns seconds."""
        return self._asked("snapshot")

    def fork(self) -> float:
        """Mounts the layers of the last snapshot elsewhere; returns seconds."""
        return self._asked("fork")

    def close(self) -> None:
        self._ours.close()
        self._process.join()

    def _asked(self, what: str, turn: Turn | None = None) -> float:
        self._ours.send((what, turn))
        result = self._ours.recv()
        if isinstance(result, Exception):
            raise result
        return float(result)


def _serve(theirs: Connection, lower: Path, scratch: Path) -> None:
    try:
        overlay = _Overlay(lower, scratch)
    except OSError as error:
        theirs.send(str(error))
        return
    theirs.send("")
    while True:
        try:
            what, turn = theirs.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            theirs.send(overlay.step(what, turn))
        except OSError as error:
            theirs.send(error)


class _Overlay:
    def __init__(self, lower: Path, scratch: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        _enter_namespaces(self._libc)
        # Short relative paths: the options of mount(2) end at a page.
        os.chdir(scratch)
        Path("0").symlink_to(lower)
        self._lowers = ["0"]
        self._forks = self._works = 0
        Path("merged").mkdir()
        self._new_upper("top")
        self._mount("top", "merged")

    def step(self, what: str, turn: Turn | None) -> float:
        """Seconds that it took, 0 for a turn."""
        if turn is not None:
            turn.apply(Path("merged"))
            return 0.0
        return self._snapshot() if what == "snapshot" else self._fork()

    def _snapshot(self) -> float:
        began = time.perf_counter()
        self._unmount("merged")
        name = str(len(self._lowers))
        Path("top/upper").rename(name)
        self._lowers.append(name)
        self._new_upper("top")
        self._mount("top", "merged")
        return time.perf_counter() - began

    def _fork(self) -> float:
        began = time.perf_counter()
        self._forks += 1
        name = f"fork{self._forks}"
        self._new_upper(name)
        Path(name, "merged").mkdir()
        self._mount(name, f"{name}/merged")
        took_s = time.perf_counter() - began
        self._unmount(f"{name}/merged")
        return took_s

    def _new_upper(self, name: str) -> None:
        # A volatile mount leaves a mark in its work folder, which keeps that from being used again.
        self._works += 1
        for folder in (Path(name, "upper"), Path(name, f"work{self._works}")):
            folder.mkdir(parents=True)

    def _mount(self, name: str, target: str) -> None:
        # Without `volatile` an unmount waits for the disk.
        lowers = ":".join(reversed(self._lowers))
        options = f"lowerdir={lowers},upperdir={name}/upper,workdir={name}/work{self._works},volatile"
        arguments = (b"overlay", target.encode(), b"overlay", ctypes.c_ulong(0), options.encode())
        _checked(self._libc.mount(*arguments), "mount")

    def _unmount(self, target: str) -> None:
        _checked(self._libc.umount2(target.encode(), 0), "umount")


def _enter_namespaces(libc: ctypes.CDLL) -> None:
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        _checked(libc.unshare(_CLONE_NEWNS), "unshare")
    else:
        _checked(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    _checked(libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "private mounts")


def _checked(result: int, step: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{step}: {os.strerror(number)}")
