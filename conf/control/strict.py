"""JSON from a file that anybody may have written: bounded, and without what JSON leaves to its readers."""

import json
import math
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from midstream.conf.errors import ConfigError, validate
from midstream.conf.files import read_file

LARGEST_BYTES = 1 << 20
"""Longer files are not read; the layer's whole configuration takes some 3 KiB."""
_DEEPEST = 32
WHOLE_NUMBER_BITS = 63
_WHOLE_NUMBER_CHARS = 20


class ControlError(ValueError):
    """A file of the control folder cannot be used, or nothing can be written there."""


class Unreadable(ControlError):
    """The system does not give a file's content, now; it may be there another time."""


Model = TypeVar("Model", bound=BaseModel)


def read_model(schema: type[Model], path: Path) -> Model:
    """What a file holds, by its schema.

    Raises:
        Unreadable: no content.
        ControlError: other content.
    """
    try:
        content = read_file(path, LARGEST_BYTES)
    except OSError as error:
        raise Unreadable(f"it cannot be read ({error.strerror})") from error
    return model_in(schema, content)


def model_in(schema: type[Model], content: bytes) -> Model:
    """What bytes hold, by its schema. Raises ControlError."""
    if len(content) > LARGEST_BYTES:
        raise ControlError(f"it has more than {LARGEST_BYTES:,} bytes")
    try:
        # To tell what was meant by each of many wrong keys would take seconds.
        return validate(schema, _parsed(content), most_problems=1)
    except ConfigError as error:
        raise ControlError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise ControlError(f"it is not sound JSON ({error})") from error


def _parsed(content: bytes) -> Any:
    parsed = json.loads(
        content.decode(),
        object_pairs_hook=_without_twins,
        parse_int=_whole_number,
        parse_float=_number,
        parse_constant=_number,
    )
    _check_texts_and_depth(parsed)
    return parsed


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in it")
    return found


def _whole_number(text: str) -> int:
    if len(text) > _WHOLE_NUMBER_CHARS or int(text).bit_length() > WHOLE_NUMBER_BITS:
        raise ValueError(f"a whole number is beyond {WHOLE_NUMBER_BITS} bits")
    return int(text)


def _number(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:_WHOLE_NUMBER_CHARS]} is not a finite number")
    return float(text)


def _check_texts_and_depth(parsed: Any) -> None:
    """Raise ValueError for what a later reader would stumble over: half a character, or endless nesting."""
    level: list[Any] = [parsed]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for part in level:
            if isinstance(part, str):
                part.encode()  # raises UnicodeEncodeError, a ValueError
            elif isinstance(part, dict):
                inner += [*part.keys(), *part.values()]
            elif isinstance(part, list):
                inner += part
        if not inner:
            return
        level = inner
    raise ValueError(f"it is nested deeper than {_DEEPEST} levels")
