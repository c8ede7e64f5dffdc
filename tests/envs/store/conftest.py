"""A store and a small tree."""

from pathlib import Path

import pytest

from midstream.envs.store.store import SnapshotStore


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "store")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "sub" / "empty").mkdir(parents=True)
    (root / "a").write_text("one\n")
    (root / "sub" / "b").write_text("two\n")
    return root
