"""What a run directory holds already: whether a comparison may begin there, or go on."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from midstream.conf.compose import read_resolved
from midstream.conf.errors import ConfigError, Problem
from midstream.conf.schema import JobConfig
from midstream.local.events import EVENTS_FOLDER, NothingRecorded, RunEvents, read_run

CONFIG_FILE = "config.yaml"

# Where the directory lies and how it is named may have changed since.
_PLACES = ("run_dir", "midstream.run_dir")
# What a slow or crowded machine asks for, and no result depends on.
_OF_THE_MACHINE = (
    "server.port", "server.launch_timeout_s", "server.stop_timeout_s", "server.restart_limit", "server.threads",
)  # fmt: skip


def strategy_dir(config: JobConfig) -> Path:
    """The folder of everything that the run of one strategy writes."""
    assert config.midstream.run_dir is not None
    return config.midstream.run_dir


def refuse_used(run_dir: Path) -> None:
    """Raise ConfigError where something has been recorded in the run directory."""
    used = sorted(run_dir.glob(f"*/{EVENTS_FOLDER}/*.jsonl"))
    if used:
        fix = f"choose another: {used[0].parent} holds an earlier run; or go on with that one by --resume"
        raise ConfigError([Problem("run_dir", str(run_dir), fix)])


def check_resumable(runs: Mapping[str, JobConfig]) -> None:
    """Raise ConfigError unless the run directory holds a comparison with these settings, begun or not."""
    run_dir = next(iter(runs.values())).run_dir
    recorded = {name: strategy_dir(config) / CONFIG_FILE for name, config in runs.items()}
    if not any(path.exists() for path in recorded.values()):
        fix = "name the run directory of an earlier comparison: there is nothing to resume here"
        raise ConfigError([Problem("run_dir", str(run_dir), fix)])
    problems: dict[str, Problem] = {}
    for name, path in recorded.items():
        if path.exists():
            problems |= {problem.key: problem for problem in _differences(path, runs[name])}
    if problems:
        raise ConfigError(problems.values())


def recorded_run(folder: Path) -> RunEvents | None:
    """What a strategy has recorded in its folder, None where it has not begun. Raises EventsError for damage."""
    try:
        return read_run(folder)
    except NothingRecorded:
        return None


def has_ended(folder: Path) -> bool:
    """Whether a strategy has trained all its steps."""
    run = recorded_run(folder)
    return run is not None and run.status == "ok"


def _differences(path: Path, config: JobConfig) -> Iterator[Problem]:
    before = dict(_flat(read_resolved(path)))
    now = dict(_flat(config.model_dump(mode="json")))
    for key in sorted(before.keys() | now.keys()):
        if key not in (*_PLACES, *_OF_THE_MACHINE) and before.get(key) != now.get(key):
            yield Problem(
                key, now.get(key), f"use {before.get(key)!r} as in {path}: a run is resumed with its settings"
            )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value
