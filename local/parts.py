"""The parts of a job that its configuration names: whether they are there, known before anything is started."""

from collections.abc import Mapping

from midstream.buffers.policies.load import load_policy
from midstream.conf.errors import ConfigError, Problem
from midstream.conf.schema import JobConfig
from midstream.hooks.slime.host import load_function


def check_parts(runs: Mapping[str, JobConfig]) -> None:
    """Import every hook and make every policy. Raises ConfigError, naming the setting."""
    for config in runs.values():
        load_policy(config.midstream)
        for key, path in config.rollout.model_dump().items():
            if key.endswith("_path") and path is not None:
                _check_hook(f"rollout.{key}", path)


def _check_hook(key: str, path: str) -> None:
    try:
        load_function(path)
    except ImportError as error:
        raise ConfigError([Problem(key, path, f"name a function that exists ({error})")]) from error
