"""How much of a workspace's disk the files of a tree take, told from the records alone."""

from collections.abc import Mapping

from midstream.envs.errors import WorkspaceLimit
from midstream.envs.store.chunks import CHUNK_BYTES, PAGE_BYTES, recipe_chunks
from midstream.envs.store.contents import Contents
from midstream.envs.store.records import Entry, Tree


def check_bytes(tree: Tree, limit: int, read: Mapping[bytes, int], contents: Contents) -> None:
    """Raises WorkspaceLimit where the files take more than `limit` bytes, in whole pages and without holes.

    `read` are the bytes outside of holes of files whose contents may not be in the store yet, by content. Trees
    far below the limit, which are most, cost nothing.
    """
    if tree.content_bytes + PAGE_BYTES * len(tree.entries) <= limit:
        return
    files = [entry for path, entry in tree.entries.items() if _counts(path, entry)]
    total = sum(_pages(entry.size) for entry in files)
    # Only large files have holes, whose lists of chunks have to be read: the largest may be enough.
    for entry in sorted(
        (entry for entry in files if entry.size > CHUNK_BYTES), key=lambda entry: -entry.size
    ):
        if total <= limit:
            return
        total += _pages(_data_bytes(entry, read, contents)) - _pages(entry.size)
    if total > limit:
        raise WorkspaceLimit(f"more than {limit} bytes of files in the workspace: delete some")


def _counts(path: bytes, entry: Entry) -> bool:
    """Whether the path is a file, or the first name of one that has several."""
    return entry.kind == "f" and entry.link in (b"", path)


def _data_bytes(entry: Entry, read: Mapping[bytes, int], contents: Contents) -> int:
    if entry.content in read:
        return read[entry.content]
    return sum(size for _, size, _ in recipe_chunks(contents.blob(entry.content), entry.size))


def _pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES
