"""Layers of an overlay file system: an upper directory as the changes of a tree, and changes as a layer.

In a layer, a character device 0/0 or an empty file with the attribute `overlay.whiteout` deletes the path, and a
directory with the attribute `overlay.opaque` hides all that lies below it; the attributes are of `user.` or
`trusted.`, by who mounted it. Everything else is a node of the merged tree as it is, and directories merge.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from midstream.envs.errors import SnapshotError
from midstream.envs.store.attributes import is_mark
from midstream.envs.store.contents import Contents
from midstream.envs.store.place import Owner, Placement
from midstream.envs.store.records import WHITEOUT, Attributes, Entry, Tree, difference, parent, parents, text

# What is in a file or directory with these is not in the layer: the mount has to leave them out.
_ELSEWHERE = {b"redirect": "redirect_dir=off", b"metacopy": "metacopy=off"}


def merged(base: Tree, layer: Mapping[bytes, Entry]) -> dict[bytes, Entry | None]:
    """What an overlay with this upper layer, scanned with its marks, changes in the tree.

    Raises SnapshotError for a layer that does not hold its own contents.
    """
    updates: dict[bytes, Entry | None] = {}
    hidden: set[bytes] = set()
    for path, entry in sorted(layer.items()):
        marks = _marks(path, entry)
        old = base.entries.get(path)
        if _deletes(entry, marks):
            updates[path] = None
            if old is not None and old.kind == "d":
                hidden.add(path)
            continue
        updates[path] = entry._replace(attributes=_unmarked(entry.attributes))
        if old is not None and old.kind == "d" and (entry.kind != "d" or marks.get(b"opaque") == b"y"):
            hidden.add(path)
    if hidden:
        for path in base.entries:
            if path not in updates and any(above in hidden for above in parents(path)):
                updates[path] = None
    _loosen_links(base, updates)
    return {path: entry for path, entry in updates.items() if base.entries.get(path) != entry}


def _marks(path: bytes, entry: Entry) -> dict[bytes, bytes]:
    found = {name.split(b".", 2)[2]: value for name, value in entry.attributes if is_mark(name)}
    for mark, option in _ELSEWHERE.items():
        if mark in found:
            raise SnapshotError(f"{text(path)!r} keeps its content in another layer: mount with {option}")
    return found


def _deletes(entry: Entry, marks: Mapping[bytes, bytes]) -> bool:
    return entry.kind == WHITEOUT or (entry.kind == "f" and entry.size == 0 and b"whiteout" in marks)


def _unmarked(attributes: Attributes) -> Attributes:
    return tuple((name, value) for name, value in attributes if not is_mark(name))


def _loosen_links(base: Tree, updates: dict[bytes, Entry | None]) -> None:
    """A name that was copied up is a file of its own: the others of its group stay one without it."""
    left = {entry.link for path in updates if (entry := base.entries.get(path)) is not None and entry.link}
    if not left:
        return
    groups: dict[bytes, list[bytes]] = {}
    for path, entry in base.entries.items():
        if entry.link in left and path not in updates:
            groups.setdefault(entry.link, []).append(path)
    for paths in groups.values():
        link = min(paths) if len(paths) > 1 else b""
        updates.update((path, base.entries[path]._replace(link=link)) for path in paths)


def write_layer(base: Tree, target: Tree, into: Path, contents: Contents, owner: Owner | None) -> None:
    """Makes, in an empty directory, the layer that turns the one tree into the other.

    Raises OSError, SnapshotMissing, SnapshotDamaged.
    """
    updates = difference(base.entries, target.entries)
    made = {path: entry for path, entry in updates.items() if entry is not None}
    # Names of one file have to be in one layer.
    links = {entry.link for entry in made.values() if entry.link}
    if links:
        made.update((path, entry) for path, entry in target.entries.items() if entry.link in links)
    whiteouts = [
        path for path, entry in updates.items() if entry is None and _is_directory(target, parent(path))
    ]
    on_the_way = {above for path in (*made, *whiteouts) for above in parents(path)}
    made.update((path, target.entries[path]) for path in on_the_way)
    made.pop(b"", None)
    root_fd = os.open(into, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with Placement(root_fd, contents, owner) as placement:
            placement.make(made)
            for path in whiteouts:
                placement.whiteout(path)
            directories = {path: entry for path, entry in made.items() if entry.kind == "d"}
            placement.finish({**directories, b"": target.entries[b""]})
    finally:
        os.close(root_fd)


def _is_directory(tree: Tree, path: bytes) -> bool:
    entry = tree.entries.get(path)
    return entry is not None and entry.kind == "d"
