"""From Hydra overrides to a checked configuration, and from there to a file in the run directory."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from yaml import YAMLError  # type: ignore[import-untyped]

from midstream.conf.errors import ConfigError, Problem, closest, validate
from midstream.conf.files import replace_file
from midstream.conf.schema import JobConfig, LayerConfig

CONFIG_MODULE = "midstream.conf"
CONFIG_NAME = "config"


def compose(overrides: Iterable[str] = ()) -> JobConfig:
    """The job's configuration under Hydra overrides such as `job=quick` or `trainer.lr=1e-4`.

    Raises:
        ConfigError: an override that cannot be read, an unknown key, group or strategy, a wrong type, a value
            out of range, or settings that contradict each other.
    """
    config = validate(JobConfig, _composed(overrides))
    _check_strategies(config.strategies)
    return config


def compose_runs(overrides: Iterable[str] = ()) -> dict[str, JobConfig]:
    """One configuration for each of the compared strategies, in their order, all in the same run directory.

    Raises:
        ConfigError: as `compose`; what only some of the strategies cannot live with is told with their names.
    """
    overrides = list(overrides)
    shared = _composed(overrides)
    names = shared.get("strategies")
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        names = compose(overrides).strategies  # says what is wrong with them
    _check_strategies(names)
    _check_policy(overrides, names)
    here = f"run_dir={_quoted(str(shared.get('run_dir')))}"
    # Each run has a folder of its own, whatever an override says.
    own = "midstream.run_dir='${run_dir}/${strategy}'"
    runs: dict[str, JobConfig] = {}
    faults: dict[str, tuple[Problem, ...]] = {}
    for name in names:
        try:
            runs[name] = compose([*overrides, here, own, f"strategy={name}"])
        except ConfigError as error:
            faults[name] = error.problems
    if faults:
        raise ConfigError(_of_all_or_some(faults, len(names)))
    return runs


def known_strategies() -> list[str]:
    """The files of the config group `strategy`, by name."""
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        return list(GlobalHydra.instance().config_loader().get_group_options("strategy"))


def _composed(overrides: Iterable[str]) -> dict[str, Any]:
    """What Hydra makes of the overrides, unchecked. Raises ConfigError where it makes nothing."""
    OmegaConf.register_new_resolver("midstream.scaled", _scaled, replace=True)
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        parsed = [_parse(text) for text in overrides]
        groups = loader.list_groups("")
        try:
            composed = hydra.compose(CONFIG_NAME, [_forced_in(override, groups) for override in parsed])
            values = OmegaConf.to_container(composed, resolve=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError([_composition_problem(error, parsed)]) from error
    assert isinstance(values, dict)  # of a mapping Hydra makes nothing else
    return {str(key): value for key, value in values.items()}


def _of_all_or_some(faults: Mapping[str, Sequence[Problem]], strategies: int) -> Iterator[Problem]:
    """Problems that all strategies have, once; and those of some, with their names."""
    for problem in {str(problem): problem for problems in faults.values() for problem in problems}.values():
        whose = [name for name, problems in faults.items() if problem in problems]
        if len(whose) == strategies:
            yield problem
        else:
            yield dataclasses.replace(problem, fix=f"{problem.fix} (strategy {', '.join(whose)})")


def _check_policy(overrides: Iterable[str], strategies: Sequence[str]) -> None:
    """A policy that is set for all strategies makes them one, under several names."""
    for override in map(_parse, overrides):
        if override.key_or_group == "midstream.resume_policy" and len(strategies) > 1:
            fix = f"each of {', '.join(strategies)} has its own: name one strategy, whose place it takes"
            raise ConfigError([Problem("midstream.resume_policy", override.value(), fix)])


def layer_config(values: object) -> LayerConfig:
    """What a host job says under the key `midstream`, checked.

    Raises:
        ConfigError: as `compose`, and where no run directory is named.
    """
    config = validate(LayerConfig, values, prefix="midstream")
    if config.run_dir is None:
        raise ConfigError(
            [
                Problem(
                    "midstream.run_dir",
                    None,
                    "name a folder for the journal and the snapshots, under `midstream:`",
                )
            ]
        )
    return config


def write_resolved(config: BaseModel, path: Path) -> None:
    """Write every value of `config` as YAML; the file is there whole or not at all."""
    text = OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode())


def read_resolved(path: Path) -> dict[str, Any]:
    """The values that `write_resolved` wrote.

    Raises:
        ConfigError: the file is not such a file.
    """
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError([Problem(str(path), _first_line(error), "restore the file")]) from error
    if not isinstance(values, dict):
        raise ConfigError([Problem(str(path), values, "restore the file: it is not a mapping of settings")])
    return {str(key): value for key, value in values.items()}


def _scaled(count: int, factor: float) -> int:
    """`count` times `factor`, rounded up: arithmetic that YAML interpolation lacks."""
    return math.ceil(count * factor)


def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        fix = "write key=value, with quotes around the whole for your shell"
        raise ConfigError([Problem("override", text, f"{fix} ({_first_line(error)})")]) from None


def _forced_in(override: Override, groups: Iterable[str]) -> str:
    """The override as Hydra's `++`, except for choices of a group.

    So a key that is not there reaches the schema, which knows every key and names the one that was meant.
    """
    text, key = override.input_line or "", override.key_or_group
    plain = override.type is OverrideType.CHANGE and key not in groups and not key.startswith("hydra.")
    return f"++{text}" if plain else text


def _composition_problem(error: Exception, overrides: Iterable[Override]) -> Problem:
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return Problem(group, name, _fix_unknown_option(name, error.options))
    return Problem("overrides", [override.input_line for override in overrides], _first_line(error))


def _check_strategies(strategies: Iterable[str]) -> None:
    known = known_strategies()
    unknown = [name for name in strategies if name not in known]
    if unknown:
        raise ConfigError(Problem("strategies", name, _fix_unknown_option(name, known)) for name in unknown)


def _fix_unknown_option(name: str, options: Iterable[str]) -> str:
    options = sorted(options)
    meant = closest(name, options)
    return f"use one of {', '.join(options)}" + (f" (did you mean {meant!r}?)" if meant else "")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _quoted(value: str) -> str:
    """`value` as a string literal of Hydra's override grammar."""
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + r"\'", value)
    return f"'{escaped}'"
