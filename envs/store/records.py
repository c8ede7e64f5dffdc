"""What a snapshot says about each node of a tree, and the digest of a whole tree.

The digest is that of a set: it is computed from the sum of one number per entry, so that a turn that changes
fifty of 100,000 files costs fifty hashes (MSet-Add-Hash of Clarke et al., "Incremental Multiset Hash Functions
and Their Application to Memory Integrity Checking", ASIACRYPT 2003; AdHash of Bellare and Micciancio,
EUROCRYPT 1997). Each number is a hash of the entry expanded to 2,048 bits, and the sum is taken modulo 2^2048.
So many bits because sums of short hashes can be made to collide by Wagner's generalized birthday search: with
up to 2^20 entries to choose from it costs some 2^(20 + 2048/21) = 2^117 steps at this width, and at 256 bits
it would cost less than 2^33.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b, shake_128
from typing import NamedTuple

from midstream.envs.protocol import Change

HASH_BYTES = 32
SUM_BYTES = 256
_MODULUS_MASK = (1 << 8 * SUM_BYTES) - 1

# The kind of a deleted path in the layer of an overlay; no snapshot has it.
WHITEOUT = "w"
# The content of a file that a scan was told not to read; no file in a snapshot has it.
UNREAD = b""

Attributes = tuple[tuple[bytes, bytes], ...]


class Entry(NamedTuple):
    """One node. Its path is the key under which it is kept: bytes relative to the root, which is b"".

    `kind` is f (file), d (directory), l (symbolic link), p (FIFO) or s (socket). `content` is the hash of a
    file's content or the target of a link. `attributes` are extended ones, in the order of their names.
    `link` is the first path, in the order of bytes, of those that are hard links of one file, b"" where there
    are no others in the tree.
    """

    kind: str
    mode: int
    mtime_ns: int
    size: int = 0
    content: bytes = b""
    attributes: Attributes = ()
    link: bytes = b""


# What becomes of each path; None where it is gone.
Updates = Mapping[bytes, Entry | None]


@dataclass(frozen=True)
class Tree:
    """All entries of one state, never changed in place. `sum` gives the digest, `content_bytes`
    is the size of all files.
    """

    entries: dict[bytes, Entry]
    sum: int = 0
    content_bytes: int = 0

    @cached_property
    def digest(self) -> str:
        """Equal for equal states: kinds, modes, paths, contents, attributes and hard links; not the mtimes."""
        return digest_of(self.sum)

    def updated(self, updates: Updates) -> "Tree":
        """The tree after these changes; costs a hash for each of them."""
        if not updates:
            return self
        entries, total, content_bytes = self.entries.copy(), self.sum, self.content_bytes
        for path, after in updates.items():
            before = entries.get(path)
            if before is not None and after is not None and _same_state(before, after):
                entries[path] = after
                continue
            if before is not None:
                total -= elements(path, before)
                content_bytes -= before.size
                del entries[path]
            if after is not None:
                total += elements(path, after)
                content_bytes += after.size
                entries[path] = after
        return Tree(entries, total & _MODULUS_MASK, content_bytes)

    def becoming(self, entries: dict[bytes, Entry]) -> "Tree":
        """The tree that holds just these entries, hashed only where they differ from this one's."""
        return self.updated(difference(self.entries, entries))


EMPTY = Tree({})


def digest_of(total: int) -> str:
    """The digest of a state whose entries' numbers have this sum, 64 hex digits."""
    return blake2b(total.to_bytes(SUM_BYTES, "little"), digest_size=HASH_BYTES).hexdigest()


def difference(before: Mapping[bytes, Entry], after: Mapping[bytes, Entry]) -> dict[bytes, Entry | None]:
    """What turns the one set of entries into the other, mtimes too."""
    updates: dict[bytes, Entry | None] = {
        path: entry
        for path, entry in after.items()
        # Most are the very same object, which is told sooner.
        if (old := before.get(path)) is not entry and old != entry
    }
    if len(before) + sum(path not in before for path in updates) != len(after):
        updates.update((path, None) for path in before if path not in after)
    return updates


def changes(before: Mapping[bytes, Entry], updates: Updates) -> tuple[Change, ...]:
    """The changes that a snapshot lists, in the order of their paths, the root left out.

    Neither mtimes nor hard links count: that two paths become or cease to be one file leaves both as they were.
    """
    found = []
    for path, after in sorted(updates.items()):
        old = before.get(path)
        if path == b"" or (after is None and old is None):
            continue
        if after is None:
            found.append(Change(text(path), "deleted", 0, short_digest(path, old), ""))
        elif old is None:
            found.append(Change(text(path), "created", after.size, "", short_digest(path, after)))
        elif not _same_node(old, after):
            digests = short_digest(path, old), short_digest(path, after)
            found.append(Change(text(path), "modified", after.size, *digests))
    return tuple(found)


def text(path: bytes) -> str:
    """A path as people and JSON see it."""
    return path.decode("utf-8", "surrogateescape")


def short_digest(path: bytes, entry: Entry | None) -> str:
    """16 hex digits for a node and its content, "" for none."""
    return "" if entry is None else shake_128(_canonical(path, entry)).hexdigest(8)


def elements(path: bytes, entry: Entry) -> int:
    """What the entry adds to the sum: a number for the node, one more for being a hard link of a group."""
    number = _expanded(_canonical(path, entry))
    if entry.link:
        number += _expanded(b"h" + _sized(entry.link) + path)
    return number


def _expanded(canonical: bytes) -> int:
    return int.from_bytes(shake_128(canonical).digest(SUM_BYTES), "little")


def _canonical(path: bytes, entry: Entry) -> bytes:
    """One text for each node, and no two nodes with the same: every part but the last is preceded by its size."""
    head = b"%s %o " % (entry.kind.encode(), entry.mode) + _sized(path) + _sized(entry.content)
    if entry.attributes:
        head += b"".join([_sized(name) + _sized(value) for name, value in entry.attributes])
    return head


def _sized(part: bytes) -> bytes:
    return b"%d:" % len(part) + part


def _same_node(one: Entry, other: Entry) -> bool:
    return (
        one.content == other.content
        and one.mode == other.mode
        and one.kind == other.kind
        and one.attributes == other.attributes
    )


def _same_state(one: Entry, other: Entry) -> bool:
    return one.link == other.link and one.size == other.size and _same_node(one, other)


def parents(path: bytes) -> Iterator[bytes]:
    """The directories above a path, the nearest first, the root left out."""
    while (cut := path.rfind(b"/")) > 0:
        path = path[:cut]
        yield path


def parent(path: bytes) -> bytes:
    """The directory that holds the path; b"" is the root."""
    return path[: max(path.rfind(b"/"), 0)]


def joined(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name
