"""Random trees, made by plain system calls and read back by them, in another way than the store does."""

# ruff: noqa: PTH101, PTH102, PTH108, PTH112, PTH114, PTH115, PTH118, PTH123, PTH211
# Names that are bytes need functions that take bytes.

import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from midstream.envs.store.removal import remove_tree

# How many random trees a test draws, at least. In batches, since hypothesis remembers all that one test has drawn.
TRIALS = int(os.environ.get("MIDSTREAM_TREES", "60"))
BATCH = 250


def checked(test):
    """Runs a test of the arguments that it is given, and of `batch`, on so many random trees."""
    batches = range(-(-TRIALS // BATCH))
    examples = settings(
        max_examples=min(TRIALS, BATCH), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    return pytest.mark.parametrize("batch", batches)(examples(test))


# No NUL and no slash; anything else, newlines and bytes that are not UTF-8 too.
NAMES = st.one_of(
    st.sampled_from([b"a", b"b", b"c", b".git"]),
    st.binary(min_size=1, max_size=6).map(lambda name: name.replace(b"\0", b"n").replace(b"/", b"s")),
).filter(lambda name: name not in (b".", b".."))
TIMES = st.integers(0, 2**61)
ATTRIBUTES = st.dictionaries(st.sampled_from(["user.a", "user.b"]), st.binary(max_size=8), max_size=2)
# Pages of zeros between data, at sizes around the page and the chunk.
HOLED = st.builds(
    lambda head, zeros, tail: head + bytes(zeros) + tail,
    st.binary(max_size=3),
    st.sampled_from([4096, 8191, 1 << 20, (2 << 20) + 5]),
    st.binary(max_size=3),
)
CONTENTS = st.one_of(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40), HOLED)
FILES = st.tuples(
    st.just("file"), CONTENTS, st.sampled_from([0o644, 0o4755, 0o600, 0o000]), TIMES, ATTRIBUTES
)
SYMLINKS = st.tuples(st.just("symlink"), st.sampled_from([b"/etc/passwd", b"..", b"nowhere", b"\xff\n"]))
# A further name of the file that was made so many files ago.
HARD_LINKS = st.tuples(st.just("hard link"), st.integers(1, 4))
NODES = st.recursive(
    st.one_of(FILES, SYMLINKS, HARD_LINKS, st.just(("fifo",))),
    lambda nodes: st.tuples(
        st.just("dir"),
        st.dictionaries(NAMES, nodes, max_size=4),
        st.sampled_from([0o755, 0o1777, 0o500]),
        TIMES,
        ATTRIBUTES,
    ),
    max_leaves=12,
)
TREES = st.dictionaries(NAMES, NODES, max_size=5)


def build(root: Path, nodes) -> None:
    """Makes the nodes in an existing directory."""
    _build(os.fsencode(root), nodes, [])


def rebuild(root: Path, nodes) -> None:
    remove_tree(root)
    root.mkdir()
    build(root, nodes)


def _build(root: bytes, nodes, files: list[bytes]) -> None:
    for name, (kind, *what) in nodes.items():
        path = os.path.join(root, name)
        if kind == "file":
            content, mode, mtime_ns, attributes = what
            with open(path, "wb") as file:
                file.write(content)
            _finish(path, mode, mtime_ns, attributes)
            files.append(path)
        elif kind == "symlink":
            os.symlink(what[0], path)
        elif kind == "hard link":
            if len(files) >= what[0]:
                os.link(files[-what[0]], path)
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            children, mode, mtime_ns, attributes = what
            os.mkdir(path)
            _build(path, children, files)
            _finish(path, mode, mtime_ns, attributes)


def _finish(path: bytes, mode: int, mtime_ns: int, attributes) -> None:
    for name, value in attributes.items():
        os.setxattr(path, name, value)
    os.chmod(path, mode)
    os.utime(path, ns=(mtime_ns, mtime_ns))


def edit(root: Path, nodes) -> None:
    """Puts the nodes over what is there: same names are replaced, directories merge."""
    for name, (kind, *what) in nodes.items():
        path = os.path.join(os.fsencode(root), name)
        is_directory = os.path.isdir(path) and not os.path.islink(path)
        if kind == "dir" and is_directory:
            edit(Path(os.fsdecode(path)), what[0])
            continue
        if is_directory:
            remove_tree(os.fsdecode(path))
        elif os.path.lexists(path):
            os.unlink(path)
        build(root, {name: (kind, *what)})


def listing(root: Path) -> dict[bytes, tuple]:
    """What the operating system says is there: mode, mtime, content, attributes, and the names of one file."""
    found, inodes = {}, {}
    for directory, directories, files in os.walk(os.fsencode(root)):
        for name in [*directories, *files, b"."]:
            path = os.path.join(directory, name)
            relative = os.path.normpath(os.path.relpath(path, os.fsencode(root)))
            info = os.lstat(path)
            content, attributes = None, {}
            if stat.S_ISREG(info.st_mode):
                with open(path, "rb") as file:
                    content = file.read()
                inodes.setdefault(info.st_ino, []).append(relative)
            elif stat.S_ISLNK(info.st_mode):
                content = os.readlink(path)
            if stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode):
                attributes = {
                    key: os.getxattr(path, key) for key in os.listxattr(path) if key.startswith("user.")
                }
            found[relative] = (info.st_mode, info.st_mtime_ns, content, attributes)
    for names in inodes.values():
        for name in names:
            found[name] += (sorted(names),)
    return found
