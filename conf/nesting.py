"""Which settings of a schema hold further settings."""

import typing
from typing import Any

from pydantic import BaseModel


def nested(annotation: Any) -> tuple[type[BaseModel], str] | None:
    """The schema within a field, and what stands before its keys: nothing, or `<name>.` in a mapping by name.

    None where the field is a plain setting.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    if typing.get_origin(annotation) is dict and (within := nested(typing.get_args(annotation)[1])):
        return within[0], f"<name>.{within[1]}"
    return None
