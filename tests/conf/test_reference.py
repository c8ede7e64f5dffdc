"""The page of settings says what the schema says."""

from pathlib import Path

from midstream.conf.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "python -m midstream.conf.reference > docs/configuration.md"
