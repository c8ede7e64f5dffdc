"""What is wrong with a configuration, said so that the reader knows what to change."""

import difflib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from midstream.conf.nesting import nested

SHOWN_VALUE_CHARS = 80
"""Longer values are cut in messages."""


@dataclass(frozen=True)
class Problem:
    """One wrong setting: the dotted key, the value found there, and what to do about it."""

    key: str
    value: object
    fix: str

    def __str__(self) -> str:
        shown = repr(self.value)
        if len(shown) > SHOWN_VALUE_CHARS:
            shown = shown[: SHOWN_VALUE_CHARS - 1] + "…"
        return f"{self.key}: got {shown}; {self.fix}"


class ConfigError(ValueError):
    """A configuration that cannot be used. `problems` holds every fault found, `str()` one line for each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class Contradiction(ValueError):
    """Raised by the schema's own checks; its problems' keys are relative to the section that raises it."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def refuse(problems: Iterable[Problem]) -> None:
    """Raise Contradiction if there is any problem."""
    found = tuple(problems)
    if found:
        raise Contradiction(found)


Model = TypeVar("Model", bound=BaseModel)


def validate(
    schema: type[Model], values: object, *, prefix: str = "", most_problems: int | None = None
) -> Model:
    """`values` as an instance of `schema`; `prefix` is the dotted key under which they stand in the file.

    Raises:
        ConfigError: naming every unknown key, wrong type, value out of range and contradiction, or so many of them.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        told = error.errors()[:most_problems]
        problems = [problem for details in told for problem in _problems(details, schema, prefix)]
        raise ConfigError(problems) from None


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was most likely meant to be, or None if nothing comes near."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return matches[0] if matches else None


def _problems(details: ErrorDetails, schema: type[BaseModel], prefix: str) -> Iterator[Problem]:
    key = _dotted(prefix, details["loc"])
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "value_error" and isinstance(context["error"], Contradiction):
        for problem in context["error"].problems:
            yield replace(problem, key=_join(key, problem.key))
    elif kind == "extra_forbidden":
        fix = unknown_key_fix(_dotted("", details["loc"]), list(known_keys(schema)), prefix)
        yield Problem(key, value, fix)
    elif kind == "missing":
        yield Problem(key, None, "set it, there is no default")
    elif kind == "literal_error":
        names = str(context["expected"])
        meant = closest(str(value), names.replace("'", "").replace(" or ", ", ").split(", "))
        yield Problem(key, value, f"use {names}" + (f" (did you mean {meant!r}?)" if meant else ""))
    elif kind in FIXES:
        yield Problem(key, value, FIXES[kind].format(**context))
    else:
        yield Problem(key, value, details["msg"].lower())


FIXES = {
    "greater_than": "use a value above {gt}",
    "greater_than_equal": "use {ge} or more",
    "less_than": "use a value below {lt}",
    "less_than_equal": "use {le} or less",
    "int_type": "use a whole number",
    "int_from_float": "use a whole number",
    "float_type": "use a number (in YAML 1e-4 is text: write 1.0e-4)",
    "finite_number": "use a finite number",
    "bool_type": "use true or false",
    "string_type": "use a string",
    "list_type": "use a list, such as [a, b]",
    "path_type": "use a path",
    "model_type": "use a mapping of settings",
    "dict_type": "use a mapping, such as {{a: 1}}",
    "string_too_short": "use at least {min_length} character(s)",
    "too_short": "use at least {min_length} item(s)",
}
"""What to do about each kind of fault that pydantic reports; the fields are those of its error context."""


def unknown_key_fix(key: str, known: Collection[str], prefix: str = "") -> str:
    """What to write in place of a dotted key that is not among those that are known; ``prefix`` is put before them."""
    name = key.rpartition(".")[2]
    nearest = closest(key, known)
    meant = [k for k in known if k.rpartition(".")[2] == name] or ([nearest] if nearest else [])
    if not meant:
        return "there is no such key, remove it"
    return f"there is no such key, did you mean {' or '.join(_join(prefix, k) for k in meant)}?"


def known_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted keys of all settings and sections."""
    for name, field in schema.model_fields.items():
        key = _join(prefix, name)
        yield key
        if (within := nested(field.annotation)) is not None:
            yield from known_keys(within[0], f"{key}.{within[1]}".rstrip("."))


def _dotted(prefix: str, location: tuple[int | str, ...]) -> str:
    key = prefix
    for part in location:
        key = f"{key}[{part}]" if isinstance(part, int) else _join(key, part)
    return key


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix and key else prefix or key
