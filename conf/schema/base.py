"""What all parts of the schema have in common."""

import re
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from midstream.conf.errors import Problem, refuse


class Section(BaseModel):
    """One mapping of settings: immutable, strict about types, closed to unknown keys."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    live: ClassVar[bool] = False
    """Whether its settings can be changed while the job runs."""


PathSetting = Annotated[Path, Field(strict=False)]
"""A path, written as a string in YAML."""


def _import_path(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", text):
        refuse([Problem("", text, "write package.module.name")])
    return text


OBJECT_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"


def _object_path(text: str) -> str:
    if not re.fullmatch(OBJECT_PATH, text):
        refuse([Problem("", text, "write package.module:Name")])
    return text


ImportPath = Annotated[str, AfterValidator(_import_path)]
"""`package.module.name`: how slime's flags name a hook."""

ObjectPath = Annotated[str, AfterValidator(_object_path)]
"""`package.module:Name`: how the layer's own settings name a class."""

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
