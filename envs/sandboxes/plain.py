"""A workspace in a plain folder, whose states live in the store: works anywhere, with no privilege."""

import os
from collections.abc import Mapping
from pathlib import Path

from midstream.envs.errors import RestoreMismatch
from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.directories import write_files
from midstream.envs.sandboxes.files import Frozen, Running
from midstream.envs.sandboxes.protocol import SandboxSpec
from midstream.envs.store.removal import remove_tree
from midstream.envs.store.store import Baseline, SnapshotStore


class PlainFiles:
    """One folder. A snapshot scans it for what its last one did not see, a restore in place mends what differs."""

    def __init__(self, directory: Path, store: SnapshotStore, owner: tuple[int, int] | None) -> None:
        """Files are made for `owner`, a uid and a gid, where that is not this process' user."""
        self.directory = directory
        self._store = store
        self._owner = owner
        self._baseline = Baseline()
        self._last: Snapshot | None = None

    def create(self, spec: SandboxSpec) -> None:
        write_files(self.directory, spec, self._owner)
        self._baseline, self._last = Baseline(), None

    def attach(self, init_pid: int | None) -> None:
        """The folder is in its place already."""

    def open(self, init_pid: int | None) -> int:
        return os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def freeze(self, state: Mapping[str, str], running: Running) -> Frozen:
        """The whole snapshot: the folder is all there is, so nothing may change in it until it is recorded."""
        self._last = self._store.put(
            self.directory, self._last, baseline=self._baseline, state=state, mapped=running.mapped
        )
        return Frozen(snapshot=self._last)

    def harvest(self, frozen: Frozen) -> Snapshot:
        assert frozen.snapshot is not None
        return frozen.snapshot

    def restore(self, snapshot: Snapshot, spec: SandboxSpec) -> dict[str, str]:
        if self.directory.exists():
            digest = self._store.restore_in_place(
                snapshot, self.directory, baseline=self._baseline, owner=self._owner
            )
        else:
            digest = self._store.restore(snapshot, self.directory, baseline=self._baseline, owner=self._owner)
        if digest != snapshot.digest:
            raise RestoreMismatch(
                f"snapshot {snapshot.id} has digest {snapshot.digest}, what was restored has {digest}"
            )
        self._last = snapshot
        return dict(self._baseline.state)

    def destroy(self) -> None:
        remove_tree(self.directory)
