"""What somebody wants to change, as it is typed: `curriculum.gate.min_informative=0.4`."""

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from midstream.conf.control.live import LiveSetting, live_settings, value_at
from midstream.conf.control.strict import WHOLE_NUMBER_BITS
from midstream.conf.errors import Problem, known_keys, unknown_key_fix
from midstream.conf.schema import LayerConfig

_PREFIX = "midstream."


def wanted_values(words: Sequence[str], layer: LayerConfig) -> tuple[dict[str, Any], list[Problem]]:
    """New values of live settings by their keys, not checked against their ranges, and what is wrong with the words.

    Values are read as Hydra reads them. An entry of a mapping can be given by its own key, which may hold any
    characters but `=`: ``curriculum.sampler.weights.gsm8k/main=2``; null takes it out. ``layer`` is what is in force.
    """
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    given: set[str] = set()
    for word in words:
        key, sign, text = word.partition("=")
        key = key.strip().removeprefix(_PREFIX)
        setting, entry = _setting_of(key)
        if not sign or not key:
            problems.append(
                Problem("change", word, "write key=value, with quotes around the whole for your shell")
            )
        elif setting is None:
            problems.append(Problem(key, text, _fix(key)))
        elif key in given:
            problems.append(Problem(key, text, "give it once"))
        else:
            given.add(key)
            try:
                value = _read(text)
            except (HydraException, ValueError) as error:
                problems.append(
                    Problem(key, text, f"write one value, as in YAML ({str(error).partition(chr(10))[0]})")
                )
            else:
                before = values.get(setting.key, value_at(layer, setting.key))
                values[setting.key] = value if entry is None else _with_entry(before, entry, value)
    return values, problems


def _read(text: str) -> Any:
    override = OverridesParser.create().parse_override(f"value={text}")
    if override.is_sweep_override():
        raise ValueError("several are written [a, b]")
    value = override.value()
    if isinstance(value, int) and value.bit_length() > WHOLE_NUMBER_BITS:
        raise ValueError(f"of at most {WHOLE_NUMBER_BITS} bits")
    return value


def _with_entry(mapping: Any, entry: str, value: Any) -> Any:
    if not isinstance(mapping, Mapping):
        return mapping  # what was given for the whole is wrong, which the schema says
    return {name: v for name, v in {**mapping, entry: value}.items() if v is not None}


def _setting_of(key: str) -> tuple[LiveSetting | None, str | None]:
    """The live setting of a key, and which entry of it."""
    settings = live_settings()
    if key in settings:
        return settings[key], None
    for setting in settings.values():
        if setting.is_mapping and key.startswith(f"{setting.key}.") and key != f"{setting.key}.":
            return setting, key.removeprefix(f"{setting.key}.")
    return None, None


def _fix(key: str) -> str:
    if inner := [live for live in live_settings() if live.startswith(f"{key}.")]:
        return f"name one of its settings: {', '.join(inner)}"
    if key in known_keys(LayerConfig):
        return f"it cannot be changed while the job runs: set {_PREFIX}{key} in its configuration, and start it again"
    return f"{unknown_key_fix(key, list(live_settings()))} (--list shows all)"
