"""Looks at a directory or a layer and tells which state it is in, against one that is known."""

from dataclasses import dataclass
from pathlib import Path

from midstream.envs.errors import WorkspaceLimit
from midstream.envs.store.contents import Contents
from midstream.envs.store.layer import merged
from midstream.envs.store.nodes import Ingest
from midstream.envs.store.place import Owner
from midstream.envs.store.records import Entry, Tree, Updates, difference, parents
from midstream.envs.store.restore import change_tree, rewrite_tree
from midstream.envs.store.scan import UNLIMITED, TreeLimits, hash_only, scan
from midstream.envs.store.sizes import check_bytes
from midstream.envs.store.statcache import Inode, Scanned, StatCache


@dataclass(frozen=True)
class Seen:
    """A state: the cache of the scan, with the tree; what differs from the known state, None if not told."""

    cache: StatCache
    updates: Updates | None = None


def look_at_tree(
    directory: Path | str,
    cache: StatCache,
    before: Tree,
    ingest: Ingest = hash_only,
    limits: TreeLimits | None = None,
    mapped: frozenset[Inode] = frozenset(),
) -> Seen:
    """The state of a directory whose last scan is in the cache, which stays as it is.

    `before` is hashed already, so the digest costs what differs from it where the cache is empty.
    """
    if not cache.listings:
        # Without listings a scan cannot tell what is gone: it finds all that is there.
        scanned = scan(directory, StatCache(), ingest, limits, mapped)
        return Seen(_cached(scanned, StatCache(), _becoming(before, _present(scanned))))
    scanned = scan(directory, cache, ingest, limits, mapped)
    tree = cache.tree.updated(scanned.updates)
    return Seen(_cached(scanned, cache, tree), scanned.updates if cache.tree is before else None)


def look_afresh(directory: Path | str, expected: Tree) -> StatCache:
    """The state of a directory of which nothing is remembered, every file read."""
    return look_at_tree(directory, StatCache(), expected, limits=UNLIMITED).cache


def look_at_layer(
    directory: Path | str, before: Tree, ingest: Ingest, limits: TreeLimits, contents: Contents
) -> Seen:
    """The state that an overlay with this upper directory shows over a known one, whose contents are these.

    The limits are those of the whole tree. Raises WorkspaceLimit.
    """
    read: dict[bytes, int] = {}

    def counted(fd: int, size: int, allowance: int) -> tuple[bytes, int]:
        content, read_bytes = ingest(fd, size, allowance)
        read[content] = read_bytes
        return content, read_bytes

    scanned = scan(directory, StatCache(), counted, limits, layer=True)
    updates = merged(before, _present(scanned))
    tree = before.updated(updates)
    if len(tree.entries) > limits.entries:
        raise WorkspaceLimit(f"more than {limits.entries} entries in the workspace: delete some")
    check_bytes(tree, limits.bytes, read, contents)
    return Seen(StatCache(tree), updates)


def rewind(
    directory: Path,
    target: Tree,
    cache: StatCache,
    contents: Contents,
    owner: Owner | None,
    limits: TreeLimits,
) -> StatCache:
    """Makes the directory hold the target and looks at it again. Raises what `change_tree` does."""
    try:
        now, updates = _look_before(directory, cache, target, limits)
    except WorkspaceLimit:
        # More than may be read, or what cannot be: nothing of it is kept.
        rewrite_tree(target.entries, directory, contents, owner)
        return look_afresh(directory, target)
    if not updates:
        return now
    change_tree(now.tree, target, updates, directory, contents, owner)
    return _look_after(directory, now, target, updates)


def _look_before(
    directory: Path, cache: StatCache, target: Tree, limits: TreeLimits
) -> tuple[StatCache, Updates]:
    """The state of a directory, and what turns it into the target."""
    if not cache.listings:
        now = look_at_tree(directory, cache, target, limits=limits).cache
        return now, difference(now.tree.entries, target.entries)
    expected = difference(cache.tree.entries, target.entries)
    # What is to have another content anyway is not worth a look at its present one.
    scanned = scan(directory, cache, limits=limits, unread=expected)
    now = _cached(scanned, cache, cache.tree.updated(scanned.updates))
    is_now, to_be = now.tree.entries, target.entries
    paths = {*expected, *scanned.updates}
    return now, {path: to_be.get(path) for path in paths if is_now.get(path) != to_be.get(path)}


def _look_after(directory: Path, before: StatCache, target: Tree, updates: Updates) -> StatCache:
    """The state of a directory after these changes to one that was looked at a moment ago, each of them read."""
    touched = {*updates, *(above for path in updates for above in parents(path))}
    scanned = scan(directory, before, limits=UNLIMITED, only=touched)
    if scanned.updates == updates:
        return _cached(scanned, before, target)
    entries = before.tree.updated(scanned.updates).entries
    return _cached(scanned, before, _becoming(target, entries))


def _present(scanned: Scanned) -> dict[bytes, Entry]:
    return {path: entry for path, entry in scanned.updates.items() if entry is not None}


def _becoming(expected: Tree, entries: dict[bytes, Entry]) -> Tree:
    """The tree of these entries: the expected one itself where it has the same, which then share memory."""
    return expected if entries == expected.entries else expected.becoming(entries)


def _cached(scanned: Scanned, cache: StatCache, tree: Tree) -> StatCache:
    seen = StatCache(tree, dict(cache.listings), dict(cache.linked))
    scanned.into(seen, tree)
    return seen
