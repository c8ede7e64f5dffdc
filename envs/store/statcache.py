"""What is remembered of a directory between two scans, and what a scan finds to differ from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from midstream.envs.store.records import EMPTY, Entry, Tree

# Device and inode.
Inode = tuple[int, int]
V = TypeVar("V")


@dataclass
class StatCache:
    """What the last scan of one directory saw, so that only what differs from it is read.

    `listings` by directory; `linked` are the files that have several names, by path.
    """

    tree: Tree = EMPTY
    listings: dict[bytes, bytes] = field(default_factory=dict)
    linked: dict[bytes, Inode] = field(default_factory=dict)


@dataclass
class Scanned:
    """What a scan found to differ from its cache; None is what is gone."""

    updates: dict[bytes, Entry | None] = field(default_factory=dict)
    listings: dict[bytes, bytes | None] = field(default_factory=dict)
    linked: dict[bytes, Inode | None] = field(default_factory=dict)

    def into(self, cache: StatCache, tree: Tree) -> None:
        """Makes the cache that of this scan, whose result is the tree."""
        cache.tree = tree
        _merge(cache.listings, self.listings)
        _merge(cache.linked, self.linked)

    def group_links(self, cache: StatCache) -> None:
        """Gives the names of one file their common first one, and takes it from those that are alone now."""
        if not self.linked and not cache.linked:
            return
        linked = dict(cache.linked)
        _merge(linked, self.linked)
        groups: dict[Inode, list[bytes]] = {}
        for path, inode in linked.items():
            groups.setdefault(inode, []).append(path)
        links: dict[bytes, bytes] = {}
        for paths in groups.values():
            if len(paths) > 1:
                links.update(dict.fromkeys(paths, min(paths)))
        for path in {*cache.linked, *linked}:
            entry = self.updates.get(path, cache.tree.entries.get(path))
            if entry is not None and entry.link != links.get(path, b""):
                self.updates[path] = entry._replace(link=links.get(path, b""))


def _merge(known: dict[bytes, V], found: Mapping[bytes, V | None]) -> None:
    for path, value in found.items():
        if value is None:
            known.pop(path, None)
        else:
            known[path] = value
