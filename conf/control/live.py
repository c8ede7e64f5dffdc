"""Which settings can be changed while a job runs, and the configuration with some of them changed."""

import functools
import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from midstream.conf.errors import validate
from midstream.conf.reference import default_text, is_section, meaning, type_text
from midstream.conf.schema import LayerConfig
from midstream.conf.schema.base import Section


@dataclass(frozen=True)
class LiveSetting:
    """One that can be changed; its key is relative to `midstream`."""

    key: str
    field: FieldInfo

    @property
    def is_mapping(self) -> bool:
        """Whether its entries can be changed one by one."""
        return typing.get_origin(self.field.annotation) is dict

    @property
    def range(self) -> str:
        """Type and range, as people read them."""
        return type_text(self.field).replace("`", "")

    @property
    def default(self) -> str:
        return default_text(self.field).replace("`", "")

    @property
    def meaning(self) -> str:
        return meaning(self.field)


@functools.cache
def live_settings() -> Mapping[str, LiveSetting]:
    """All of them by their keys, in the order of the schema."""
    return {setting.key: setting for setting in _live(LayerConfig, "")}


def _live(model: type[BaseModel], prefix: str) -> Iterator[LiveSetting]:
    is_live = issubclass(model, Section) and model.live
    for name, field in model.model_fields.items():
        if is_section(field):
            yield from _live(typing.cast(type[BaseModel], field.annotation), f"{prefix}{name}.")
        elif is_live:
            yield LiveSetting(prefix + name, field)


def value_at(layer: LayerConfig, key: str) -> Any:
    """The value of a live setting."""
    return functools.reduce(getattr, key.split("."), layer)


def value_text(value: Any) -> str:
    """A value as it is typed."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def differing(base: LayerConfig, layer: LayerConfig) -> dict[str, Any]:
    """The live settings of ``layer`` that are not as in ``base``, by their keys."""
    return {
        key: value_at(layer, key) for key in live_settings() if value_at(layer, key) != value_at(base, key)
    }


def merged(base: LayerConfig, values: Mapping[str, Any]) -> LayerConfig:
    """``base`` with these live settings, checked as a whole. Raises ConfigError; keys must be live ones."""
    told = base.model_dump()
    for key, value in values.items():
        *sections, name = key.split(".")
        section = functools.reduce(lambda part, inner: part[inner], sections, told)
        section[name] = value
    return validate(LayerConfig, told)
