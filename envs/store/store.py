"""Content-addressed snapshots of directory trees on a local file system.

    objects/ab/cdef…    the content of a file, named by its hash
    manifests/<id>      one snapshot: its entries and its state, named by the hash of this file
    tmp/                files being written
    lock                held shared while writing or reading, exclusively while pruning; holds the epoch

A file is written under `tmp/` and renamed, contents before the manifest, so that a snapshot is complete or
absent after a crash of any process. Nothing is synced: a power cut may take the last snapshots.
"""

import fcntl
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from midstream.envs.errors import SnapshotError, SnapshotMissing
from midstream.envs.protocol import Change, ChangeKind, Snapshot
from midstream.envs.store.restore import make_empty, remove_tree, write_tree
from midstream.envs.store.scan import CHUNK_BYTES, DIGEST_BYTES, Entry, StatCache, Tree, TreeLimits, scan

FORMAT = 1
EPOCH_BYTES = 16


@dataclass
class Baseline(StatCache):
    """What one environment remembers between its snapshots: stats of files, and its last snapshot."""

    snapshot_id: str | None = None
    entries: tuple[Entry, ...] = ()
    state: Mapping[str, str] = field(default_factory=dict)


class SnapshotStore:
    """All snapshots under one directory. Threads and processes may use it at once."""

    def __init__(self, path: Path | str, limits: TreeLimits | None = None) -> None:
        self.path = Path(path).absolute()
        self._limits = limits or TreeLimits()
        self._writer = os.urandom(8).hex()
        self._serial = itertools.count()
        try:
            for name in ("objects", "manifests", "tmp"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SnapshotError(f"cannot create the snapshot store {self.path}: {error.strerror}") from error

    def put(
        self,
        tree_dir: Path | str,
        parent: Snapshot | None = None,
        *,
        baseline: Baseline | None = None,
        state: Mapping[str, str] | None = None,
    ) -> Snapshot:
        """Records the tree and `state`, a few strings beside it; returns `parent` itself if both are its own.

        A `baseline`, one for each directory, makes later snapshots cheap. Raises SnapshotError, naming the
        path: what cannot be recorded, or a disk that is full, and then leaves nothing behind.
        """
        baseline = Baseline() if baseline is None else baseline
        state = dict(state or {})
        with self._lock(fcntl.LOCK_SH) as epoch:
            if baseline.epoch != epoch:
                # Contents that the cache vouches for may have been pruned since: read every file again.
                baseline.files, baseline.epoch = {}, epoch
            if parent is not None and parent.id != baseline.snapshot_id:
                self._remember(parent.id, self._manifest(parent.id), baseline)
            tree = scan(tree_dir, baseline, self._ingest, self._limits)
            before = () if parent is None else baseline.entries
            if parent is not None and tree.entries == before and state == baseline.state and parent in self:
                return parent
            snapshot = self._write_snapshot(tree, parent, before, state)
        baseline.snapshot_id, baseline.entries, baseline.state = snapshot.id, tree.entries, state
        return snapshot

    def restore(self, snapshot: Snapshot, into: Path | str, *, baseline: Baseline | None = None) -> str:
        """Writes the snapshot into a missing or empty directory and returns the digest of what is there.

        The digest is of a fresh scan, so it differs from the snapshot's where the content was damaged. Raises
        SnapshotMissing where the store lacks it or a content of it, SnapshotError where it cannot be written;
        the directory is then empty or gone.
        """
        baseline = Baseline() if baseline is None else baseline
        into = Path(into)
        with self._lock(fcntl.LOCK_SH) as epoch:
            self._remember(snapshot.id, self._manifest(snapshot.id), baseline)
            make_empty(into)
            try:
                write_tree(baseline.entries, into, self._extract)
                found = scan(into, baseline, limits=self._limits)
            except BaseException as error:
                remove_tree(into)
                if isinstance(error, OSError):
                    raise SnapshotError(f"cannot restore {snapshot.id} into {into}: {error}") from error
                raise
        baseline.epoch = epoch
        return found.digest

    def state(self, snapshot: Snapshot) -> dict[str, str]:
        """The strings that were recorded beside the tree. Raises SnapshotMissing."""
        with self._lock(fcntl.LOCK_SH):
            return dict(self._manifest(snapshot.id)["state"])

    def __contains__(self, snapshot: Snapshot) -> bool:
        return (self.path / "manifests" / snapshot.id).is_file()

    def delete(self, snapshot: Snapshot) -> None:
        """Forgets one snapshot; its contents go with the next `prune`."""
        with self._lock(fcntl.LOCK_EX):
            (self.path / "manifests" / snapshot.id).unlink(missing_ok=True)

    def prune(self, keep_ids: Iterable[str]) -> int:
        """Deletes every snapshot but these, every content that none of these uses, and leftovers of crashes.

        Returns the bytes freed. Waits for snapshots being written, and they for it.
        """
        keep = set(keep_ids)
        freed = 0
        with self._lock(fcntl.LOCK_EX):
            # Before the first deletion: whoever trusts an older epoch must look again, even after a crash.
            self._write(self.path / "lock", os.urandom(EPOCH_BYTES), in_place=True)
            used: set[str] = set()
            for manifest in (self.path / "manifests").iterdir():
                if manifest.name in keep:
                    entries = (Entry(*entry) for entry in self._manifest(manifest.name)["entries"])
                    used.update(entry.content for entry in entries if entry.kind == "f")
                else:
                    freed += _remove(manifest)
            for content in (self.path / "objects").glob("*/*"):
                if content.parent.name + content.name not in used:
                    freed += _remove(content)
            for leftover in (self.path / "tmp").iterdir():
                freed += _remove(leftover)
        return freed

    @contextmanager
    def _lock(self, kind: int) -> Iterator[bytes]:
        """Holds the lock file and yields the epoch, which changes whenever contents may have gone."""
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SnapshotError(f"cannot open the snapshot store {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, kind)
            yield os.read(fd, EPOCH_BYTES)
        finally:
            os.close(fd)

    def _remember(self, snapshot_id: str, manifest: dict[str, Any], baseline: Baseline) -> None:
        baseline.snapshot_id, baseline.state = snapshot_id, manifest["state"]
        baseline.entries = tuple(Entry(*entry) for entry in manifest["entries"])

    def _write_snapshot(
        self, tree: Tree, parent: Snapshot | None, before: tuple[Entry, ...], state: Mapping[str, str]
    ) -> Snapshot:
        parent_id = None if parent is None else parent.id
        manifest = {"format": FORMAT, "parent": parent_id, "state": state, "entries": tree.entries}
        # Escapes keep the file pure ASCII and carry the surrogates of names that are not UTF-8.
        content = json.dumps(manifest, separators=(",", ":")).encode("ascii")
        snapshot_id = _hash(content)
        path = self.path / "manifests" / snapshot_id
        if not path.exists():
            self._write(path, content)
        return Snapshot(snapshot_id, tree.digest, parent_id, diff(before, tree.entries), tree.bytes)

    def _manifest(self, snapshot_id: str) -> dict[str, Any]:
        path = self.path / "manifests" / snapshot_id
        try:
            content = path.read_bytes()
        except FileNotFoundError as error:
            raise SnapshotMissing(f"no snapshot {snapshot_id} in the store {self.path}") from error
        if _hash(content) != snapshot_id:
            raise SnapshotError(f"{path} is damaged: its content does not match its name")
        manifest: dict[str, Any] = json.loads(content)
        if manifest["format"] != FORMAT:
            raise SnapshotError(f"{path} has format {manifest['format']}, this version reads {FORMAT}")
        return manifest

    def _object(self, content_hash: str) -> Path:
        return self.path / "objects" / content_hash[:2] / content_hash[2:]

    def _ingest(self, fd: int, size: int) -> str:
        """Reads an open file, keeps its content unless it is there already, and returns its hash."""
        if size > CHUNK_BYTES:
            return self._ingest_large(fd)
        content = os.read(fd, size + 1)
        content_hash = _hash(content)
        path = self._object(content_hash)
        if not os.path.exists(path):  # noqa: PTH110 (three times as fast, and called for every file)
            self._write(path, content)
        return content_hash

    def _ingest_large(self, fd: int) -> str:
        content = blake2b(digest_size=DIGEST_BYTES)
        temporary = self._temporary()
        try:
            with temporary.open("xb") as copy:
                while chunk := os.read(fd, CHUNK_BYTES):
                    content.update(chunk)
                    copy.write(chunk)
            path = self._object(content.hexdigest())
            path.parent.mkdir(exist_ok=True)
            temporary.replace(path)
        except OSError as error:
            raise _write_failed(temporary, error) from error
        finally:
            temporary.unlink(missing_ok=True)
        return content.hexdigest()

    def _extract(self, content_hash: str, fd: int) -> None:
        path = self._object(content_hash)
        try:
            source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise SnapshotMissing(f"the content {content_hash} is missing: no {path}") from error
        try:
            while chunk := os.read(source, CHUNK_BYTES):
                _write_all(fd, chunk)
        finally:
            os.close(source)

    def _temporary(self) -> Path:
        return self.path / "tmp" / f"{self._writer}-{os.getpid()}-{next(self._serial)}"

    def _write(self, path: Path, content: bytes, *, in_place: bool = False) -> None:
        """Writes a file whole or not at all; `in_place` for one that others hold open."""
        temporary = path if in_place else self._temporary()
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                _write_all(fd, content)
            finally:
                os.close(fd)
            if not in_place:
                _rename_into(temporary, path)
        except OSError as error:
            if not in_place:
                temporary.unlink(missing_ok=True)
            raise _write_failed(path, error) from error


def diff(before: Iterable[Entry], after: Iterable[Entry]) -> tuple[Change, ...]:
    """What changed between two trees, by path, the root left out; mtimes alone are no change."""
    old = {entry.path: entry for entry in before}
    changes = []
    for entry in after:
        previous = old.pop(entry.path, None)
        if entry is previous or entry.path == ".":
            continue
        if previous is None:
            changes.append(Change(entry.path, "created", entry.size))
        elif (entry.kind, entry.mode, entry.content) != (previous.kind, previous.mode, previous.content):
            changes.append(Change(entry.path, "modified", entry.size))
    deleted: ChangeKind = "deleted"
    changes += [Change(path, deleted, 0) for path in old if path != "."]
    return tuple(sorted(changes, key=lambda change: change.path))


def _hash(content: bytes) -> str:
    return blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def _rename_into(temporary: Path, path: Path) -> None:
    try:
        os.rename(temporary, path)  # noqa: PTH104 (the common case, without building another Path)
    except FileNotFoundError:
        path.parent.mkdir(exist_ok=True)
        temporary.replace(path)


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def _write_failed(path: Path, error: OSError) -> SnapshotError:
    return SnapshotError(f"cannot write {path}: {error.strerror}; free space or set snapshots.path elsewhere")


def _remove(path: Path) -> int:
    size = path.stat().st_size
    path.unlink()
    return size
