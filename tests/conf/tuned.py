"""A run whose settings are changed, from both sides."""

from pathlib import Path
from typing import Any

from midstream.conf.control.changes import Change, path_of
from midstream.conf.control.job import Control
from midstream.conf.control.tuning import chain_of, changed, commit
from midstream.conf.control.wanted import wanted_values
from midstream.conf.schema import LayerConfig


def layer_config(run_dir: Path, **settings: Any) -> LayerConfig:
    """A job's own configuration; one value is set, so that no test goes by its default."""
    curriculum = {"enabled": True, "gate": {"min_informative": 0.3}}
    return LayerConfig.model_validate({"run_dir": str(run_dir), "curriculum": curriculum, **settings})


def control_of(run_dir: Path, **settings: Any) -> Control:
    """What a job does at its start, with these settings of its own."""
    return Control(run_dir, layer_config(run_dir, **settings))


def proposed(run_dir: Path, *words: str) -> Change:
    chain = chain_of(run_dir)
    change = changed(chain, *wanted_values(words, chain.layer))
    assert change is not None
    return change


def tuned(run_dir: Path, *words: str) -> Change:
    """Change settings as the command does."""
    change = proposed(run_dir, *words)
    commit(run_dir, change)
    return change


def write(run_dir: Path, version: int, content: bytes) -> Path:
    """A control file that says anything."""
    path = path_of(run_dir, version)
    path.write_bytes(content)
    return path
