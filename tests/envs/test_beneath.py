"""Reading and writing a workspace from outside, where the agent may have put anything."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.envs.sandboxes.beneath import read_beneath, write_beneath


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "workspace").mkdir()
    fd = os.open(tmp_path / "workspace", os.O_RDONLY)
    yield fd
    os.close(fd)


def test_what_is_written_is_read_and_folders_are_made(root: int, tmp_path: Path):
    write_beneath(root, "a/b/c.bin", b"\0\xff")
    write_beneath(root, "a/b/c.bin", b"new")

    assert read_beneath(root, "./a/b/c.bin", 3) == b"new"
    assert sorted(path.name for path in (tmp_path / "workspace/a/b").iterdir()) == ["c.bin"]


@pytest.mark.parametrize("path", ["", ".", "/etc/passwd", "../out", "a/../../out", "a\0b"])
def test_a_path_that_leaves_the_workspace_is_refused(root: int, path: str):
    with pytest.raises(ValueError, match="does not name a file"):
        read_beneath(root, path, 10)
    with pytest.raises(ValueError, match="does not name a file"):
        write_beneath(root, path, b"")


def test_links_are_followed_neither_as_file_nor_as_folder(root: int, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("host")
    os.symlink(secret, "link", dir_fd=root)
    os.symlink(tmp_path, "folder", dir_fd=root)

    for path in ("link", "folder/secret"):
        with pytest.raises(ValueError):
            read_beneath(root, path, 10)
    with pytest.raises(ValueError):
        write_beneath(root, "folder/secret", b"agent")
    write_beneath(root, "link", b"agent")
    assert secret.read_text() == "host"


def test_a_fifo_does_not_block_and_a_large_file_is_not_read_to_its_end(root: int):
    os.mkfifo("fifo", dir_fd=root)
    with pytest.raises(ValueError, match="not a regular file"):
        read_beneath(root, "fifo", 10)
    write_beneath(root, "large", b"x" * 100)
    with pytest.raises(ValueError, match="more than 99 bytes"):
        read_beneath(root, "large", 99)
    with pytest.raises(FileNotFoundError):
        read_beneath(root, "missing", 1)


def test_a_file_that_is_replaced_keeps_its_mode_and_a_new_one_is_plain(root: int, tmp_path: Path):
    for mode in (0o755, 0o600):
        write_beneath(root, "file", b"old")
        (tmp_path / "workspace/file").chmod(mode)
        write_beneath(root, "file", b"new")
        assert (tmp_path / "workspace/file").stat().st_mode & 0o7777 == mode
    write_beneath(root, "other", b"")
    assert (tmp_path / "workspace/other").stat().st_mode & 0o7777 == 0o644


def test_a_write_that_fails_leaves_nothing(root: int, tmp_path: Path):
    os.mkdir("taken", dir_fd=root)
    with pytest.raises(OSError):
        write_beneath(root, "taken", b"")
    assert [path.name for path in (tmp_path / "workspace").iterdir()] == ["taken"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_files_are_made_as_their_owner_and_only_where_the_owner_may(root: int, tmp_path: Path):
    workspace = tmp_path / "workspace"
    os.chown(workspace, 65534, 65534)
    write_beneath(root, "sub/file", b"", owner=(65534, 65534))
    info = (workspace / "sub/file").stat()
    assert (info.st_uid, info.st_gid) == (65534, 65534)
    (workspace / "closed").mkdir(mode=0o700)
    with pytest.raises(OSError):
        write_beneath(root, "closed/file", b"", owner=(65534, 65534))
    (tmp_path / "ours").write_text("")
    assert (tmp_path / "ours").stat().st_uid == 0
