"""Fixtures that tests of more than one layer use."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of this repository."""
    return Path(__file__).resolve().parent.parent
