"""The content of a file as blobs: small ones whole, large ones in chunks, holes and zeros as counts.

A file of up to CHUNK_BYTES is one blob, named by its hash. A larger one is a list of chunks, and the list is the
blob that is named by the file's content hash; chunks of zeros are counted there and stored nowhere. The hash
depends on the bytes of the file alone, not on which of its zeros are holes. The size of a file tells which of
the two it is.
"""

import errno
import os
import struct
from collections.abc import Callable
from hashlib import blake2b

from midstream.envs.errors import SnapshotDamaged, WorkspaceLimit
from midstream.envs.store.records import HASH_BYTES

CHUNK_BYTES = 1 << 20
PAGE_BYTES = 4096
EMPTY_HASH = blake2b(b"", digest_size=HASH_BYTES).digest()

_ZEROS = bytes(CHUNK_BYTES)
_ZERO_PAGE = bytes(PAGE_BYTES)
_NUMBER = struct.Struct("<Q")

# Is given each blob of a file, by its hash.
Keep = Callable[[bytes, bytes], None]


class FileMoved(Exception):
    """The file grew or shrank while it was read."""


def hash_of(blob: bytes) -> bytes:
    return blake2b(blob, digest_size=HASH_BYTES).digest()


def read_content(fd: int, size: int, keep: Keep | None = None, allowance: int = 1 << 62) -> tuple[bytes, int]:
    """The content hash of an open file of this size, and how many bytes were read; `keep` gets its blobs.

    Raises FileMoved where the size is another one, WorkspaceLimit where more than `allowance` bytes would
    have to be read; holes cost nothing.
    """
    if size == 0:
        return EMPTY_HASH, 0
    if size > CHUNK_BYTES:
        return _read_chunks(fd, size, keep, allowance)
    content = _pread(fd, size, 0)
    content_hash = hash_of(content)
    if keep is not None:
        keep(content_hash, content)
    return content_hash, size


def _read_chunks(fd: int, size: int, keep: Keep | None, allowance: int) -> tuple[bytes, int]:
    tokens: list[bytes] = []
    zeros = at = read = 0
    while at < size:
        data = _next_data(fd, at, size) // CHUNK_BYTES * CHUNK_BYTES
        if data > at:
            zeros += (data - at) // CHUNK_BYTES
            at = data
            continue
        chunk = _pread(fd, min(CHUNK_BYTES, size - at), at)
        read += len(chunk)
        if read > allowance:
            raise WorkspaceLimit("holds more bytes than the limit leaves")
        at += len(chunk)
        if chunk == _ZEROS[: len(chunk)]:
            zeros += 1
            continue
        if zeros:
            tokens.append(b"z" + _NUMBER.pack(zeros))
            zeros = 0
        chunk_hash = hash_of(chunk)
        if keep is not None:
            keep(chunk_hash, chunk)
        tokens.append(b"c" + chunk_hash)
    if zeros:
        tokens.append(b"z" + _NUMBER.pack(zeros))
    recipe = _NUMBER.pack(size) + b"".join(tokens)
    name = recipe_hash(recipe)
    if keep is not None:
        keep(name, recipe)
    return name, read


def recipe_hash(recipe: bytes) -> bytes:
    """The content hash of a file that is made of these chunks.

    Not a plain hash of the list, or a small file with the same bytes would be taken for it.
    """
    return blake2b(recipe, digest_size=HASH_BYTES, person=b"chunks").digest()


def recipe_chunks(recipe: bytes, size: int) -> list[tuple[int, int, bytes]]:
    """Offset, size and hash of each stored chunk; what lies between them is zeros.

    Raises SnapshotDamaged where the list is not that of a file of this size.
    """
    chunks: list[tuple[int, int, bytes]] = []
    at, position = 0, _NUMBER.size
    while position < len(recipe) and at < size:
        if recipe[position : position + 1] == b"z":
            (run,) = _NUMBER.unpack(recipe[position + 1 : position + 1 + _NUMBER.size])
            at += run * CHUNK_BYTES
            position += 1 + _NUMBER.size
        else:
            length = min(CHUNK_BYTES, size - at)
            chunks.append((at, length, recipe[position + 1 : position + 1 + HASH_BYTES]))
            at += length
            position += 1 + HASH_BYTES
    if recipe[: _NUMBER.size] != _NUMBER.pack(size) or position != len(recipe) or at < size:
        raise SnapshotDamaged(f"the list of chunks is not that of a file of {size} bytes")
    return chunks


def chunk_hashes(recipe: bytes) -> list[bytes]:
    """The stored chunks in a list of chunks."""
    (size,) = _NUMBER.unpack_from(recipe)
    return [chunk_hash for _, _, chunk_hash in recipe_chunks(recipe, size)]


def has_holes(blob: bytes) -> bool:
    """Whether `write_blob` may leave a hole."""
    return _ZERO_PAGE in blob


def write_blob(fd: int, blob: bytes, offset: int = 0) -> None:
    """Writes the bytes at this offset of a new file, whole pages of zeros left as holes."""
    if _ZERO_PAGE not in blob:
        _pwrite(fd, blob, offset)
        return
    view, start = memoryview(blob), 0
    for at in range(0, len(blob), PAGE_BYTES):
        if blob.startswith(_ZERO_PAGE, at):
            _pwrite(fd, view[start:at], offset + start)
            start = at + PAGE_BYTES
    _pwrite(fd, view[start:], offset + start)


def _next_data(fd: int, at: int, size: int) -> int:
    """Where the next byte that is not in a hole lies, at or after `at`; the end where there is none."""
    try:
        return min(os.lseek(fd, at, os.SEEK_DATA), size + CHUNK_BYTES - 1)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size + CHUNK_BYTES - 1
        if error.errno == errno.EINVAL:  # a file system without holes
            return at
        raise


def _pread(fd: int, size: int, offset: int) -> bytes:
    content = os.pread(fd, size, offset)
    while len(content) < size:
        more = os.pread(fd, size - len(content), offset + len(content))
        if not more:
            raise FileMoved
        content += more
    return content


def _pwrite(fd: int, content: bytes | memoryview, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
