"""The way of file contents into packs and out of them."""

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from midstream.envs.errors import SnapshotDamaged, SnapshotError, SnapshotMissing
from midstream.envs.store.chunks import CHUNK_BYTES, chunk_hashes, read_content, recipe_chunks, write_blob
from midstream.envs.store.index import Index
from midstream.envs.store.packs import BlockReader, Location, Pack
from midstream.envs.store.records import Entry, text

# So many blobs, or so many bytes of them, are looked up in the index at once.
_BATCH_BLOBS = 500
_BATCH_BYTES = 8 << 20


class Incoming:
    """Blobs on their way into a pack: those that are in no pack yet are written. For one thread.

    The pack is made for the first blob. As a context manager it removes the pack again unless it was `kept`.
    """

    def __init__(self, store: Path, index: Index) -> None:
        self._store = store
        self._index = index
        self._seen: set[bytes] = set()
        self._waiting: dict[bytes, bytes] = {}
        self._waiting_bytes = 0
        self.pack: Pack | None = None
        self.kept = False

    def __enter__(self) -> "Incoming":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.pack is not None:
            self.pack.close(keep=self.kept)

    def ingest(self, fd: int, size: int, allowance: int) -> tuple[bytes, int]:
        """Reads an open file and keeps its blobs."""
        return read_content(fd, size, self.keep, allowance)

    def keep(self, blob_hash: bytes, blob: bytes) -> None:
        """Raises SnapshotError where the pack cannot be written."""
        if blob_hash in self._seen:
            return
        self._seen.add(blob_hash)
        self._waiting[blob_hash] = blob
        self._waiting_bytes += len(blob)
        if len(self._waiting) >= _BATCH_BLOBS or self._waiting_bytes >= _BATCH_BYTES:
            self._write_waiting()

    def finish(self, *, sync: bool) -> None:
        """Closes the pack, if there is one, under its name, still to be collected if nobody names it."""
        self._write_waiting()
        if self.pack is not None:
            try:
                self.pack.finish(sync=sync)
            except OSError as error:
                raise write_failed(self.pack.path, error) from error

    def _write_waiting(self) -> None:
        existing = self._index.existing(self._waiting)
        new = [(blob_hash, blob) for blob_hash, blob in self._waiting.items() if blob_hash not in existing]
        self._waiting, self._waiting_bytes = {}, 0
        try:
            for blob_hash, blob in new:
                if self.pack is None:
                    self.pack = Pack(self._store)
                self.pack.add(blob_hash, blob)
        except OSError as error:
            raise write_failed(self._store / "packs", error) from error


class Contents:
    """Reads contents back, each checked against its hash. For one thread."""

    def __init__(self, store: Path, index: Index) -> None:
        self._index = index
        self._reader = BlockReader(store)
        self._known: dict[bytes, Location] = {}

    def locate(self, hashes: Iterable[bytes]) -> dict[bytes, Location]:
        """Where the blobs are, looked up at once for the reads that follow."""
        self._known.update(self._index.locate([h for h in hashes if h not in self._known]))
        return self._known

    def blob(self, blob_hash: bytes) -> bytes:
        """Raises SnapshotMissing or SnapshotDamaged, which name the content."""
        for _ in range(2):
            location = self._known.get(blob_hash) or self.locate([blob_hash]).get(blob_hash)
            if location is None:
                break
            try:
                return self._reader.read(blob_hash, location)
            except FileNotFoundError:
                # Collected, or moved into another pack, since it was looked up.
                del self._known[blob_hash]
                lost = location.pack
        else:
            raise SnapshotDamaged(f"the content {blob_hash.hex()} is lost: its pack {lost} is missing")
        raise SnapshotMissing(f"the content {blob_hash.hex()} is not in the store")

    def existing(self, hashes: Iterable[bytes]) -> set[bytes]:
        return self._index.existing(hashes)

    def chunk_hashes(self, recipe_hash: bytes) -> list[bytes]:
        """The chunks of a large file, none where the list of them is lost or damaged."""
        try:
            return chunk_hashes(self.blob(recipe_hash))
        except (SnapshotMissing, SnapshotDamaged):
            return []

    def write(self, path: bytes, entry: Entry, fd: int) -> None:
        """Writes a file's content into an empty open file, zeros as holes. Raises OSError, too."""
        if entry.size == 0:
            return
        try:
            if entry.size <= CHUNK_BYTES:
                write_blob(fd, self._whole(entry))
                return
            chunks = recipe_chunks(self.blob(entry.content), entry.size)
            self.locate([chunk_hash for _, _, chunk_hash in chunks])
            for offset, _, chunk_hash in chunks:
                write_blob(fd, self.blob(chunk_hash), offset)
        except (SnapshotDamaged, SnapshotMissing) as fault:
            raise _of(path, fault) from fault

    def small(self, path: bytes, entry: Entry) -> bytes:
        """The whole content of a file of up to CHUNK_BYTES."""
        try:
            return self._whole(entry)
        except (SnapshotDamaged, SnapshotMissing) as fault:
            raise _of(path, fault) from fault

    def _whole(self, entry: Entry) -> bytes:
        blob = self.blob(entry.content)
        if len(blob) != entry.size:
            raise SnapshotDamaged(f"the content {entry.content.hex()} has not {entry.size} bytes")
        return blob


def _of(path: bytes, fault: SnapshotDamaged | SnapshotMissing) -> SnapshotError:
    return type(fault)(f"{text(path)!r} cannot be restored: {fault}")


def write_failed(path: Path, error: OSError) -> SnapshotError:
    return SnapshotError(f"cannot write {path}: {error.strerror}; free space or set snapshots.path elsewhere")
