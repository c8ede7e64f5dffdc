"""Fixtures for tests of more than one file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hooks.jobs import Jobs


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Jobs that end with the test."""
    found = Jobs(tmp_path)
    yield found
    found.end()
