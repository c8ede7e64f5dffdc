"""The page of all settings: `python -m midstream.conf.reference > docs/configuration.md`."""

import sys
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from midstream.conf.nesting import nested
from midstream.conf.schema import JobConfig, LayerConfig

_INTRODUCTION = """\
# Settings

All keys, their types, ranges and defaults. `python -m midstream.conf.reference` writes this page.

- In a slime job the keys under `midstream` stand in the YAML file of `--custom-config-path`; for the rest,
  slime has its own flags, whose names the keys under `rollout` share.
- For `midstream compare` every key can be overridden on the command line: `midstream compare seed=1`. The
  groups `job`, `model` and `strategy` (files in `conf/`) choose several at once: `job=quick`. A key that
  has no default here gets its value from one of these files.
- A wrong key, type or range, and settings that contradict each other, are errors that name the key, the value
  and the fix. `midstream compare --dry-run` checks and prints the resolved configuration.
"""

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def reference() -> str:
    """The whole page, in Markdown."""
    sections = [*_sections(LayerConfig, "midstream"), *_sections(JobConfig, "", skip={"midstream"})]
    return "\n".join([_INTRODUCTION, *sections])


def _sections(model: type[BaseModel], prefix: str, skip: typing.Collection[str] = ()) -> Iterator[str]:
    inner = {name: field for name, field in model.model_fields.items() if name not in skip}
    plain = {name: field for name, field in inner.items() if not is_section(field)}
    yield f"## {f'`{prefix}`' if prefix else 'The job'}\n\n{_first_line(model)}\n"
    yield "| key | type | default | what it is |\n|---|---|---|---|"
    for name, field in plain.items():
        key = f"{prefix}.{name}" if prefix else name
        texts = (type_text(field), default_text(field), meaning(field))
        yield " | ".join([f"| `{key}`", *(text.replace("|", "\\|") for text in texts)]) + " |"
    yield ""
    for name, field in inner.items():
        if (within := nested(field.annotation)) is not None:
            schema, before = within
            yield from _sections(schema, f"{prefix}.{name}.{before}".strip("."))


def is_section(field: FieldInfo) -> bool:
    """Whether settings of its own stand in its place; a mapping of sections by name is a setting besides."""
    within = nested(field.annotation)
    return within is not None and not within[1]


def _first_line(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().partition("\n")[0]


def type_text(field: FieldInfo) -> str:
    """Type and range, choices in backticks."""
    bounds = [
        f"{sign} {getattr(part, name):g}"
        for part in (*field.metadata, *_inner_metadata(field.annotation))
        for name, sign in _BOUNDS.items()
        if isinstance(getattr(part, name, None), int | float)
    ]
    return ", ".join([_type_name(field.annotation), *bounds])


def _inner_metadata(annotation: Any) -> Iterator[Any]:
    """What stands at the parts of a union, such as the range of a number that may be null."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        for part in typing.get_args(annotation):
            if typing.get_origin(part) is typing.Annotated:
                for note in part.__metadata__:
                    yield from note.metadata if isinstance(note, FieldInfo) else [note]


def _type_name(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _type_name(typing.get_args(annotation)[0])
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_name(part) for part in typing.get_args(annotation))
    if origin is Literal:
        return " | ".join(f"`{choice}`" for choice in typing.get_args(annotation))
    if origin is list:
        return f"list of {_type_name(typing.get_args(annotation)[0])}"
    if annotation is type(None):
        return "null"
    return {
        "str": "text",
        "Path": "path",
        "int": "integer",
        "float": "number",
        "bool": "true or false",
        "dict": "mapping",
    }.get(annotation.__name__, annotation.__name__)


def default_text(field: FieldInfo) -> str:
    """In backticks, unless it is null; "" where there is none."""
    if field.is_required():
        return ""
    default = field.get_default(call_default_factory=True, validated_data={})
    return "null" if default is None else f"`{default}`"


def meaning(field: FieldInfo) -> str:
    """The sentence under it in the schema."""
    return " ".join((field.description or "").split())


if __name__ == "__main__":
    sys.stdout.write(reference())
