"""What a job says of its control files: `RUN/control/acknowledged.json`, written anew at each step."""

import os
import socket
from pathlib import Path

from pydantic import Field

from midstream.conf.control.changes import ACKNOWLEDGED, FOLDER, LAST_VERSION
from midstream.conf.control.strict import ControlError, read_model
from midstream.conf.files import replace_file
from midstream.conf.schema.base import Section


class Refusal(Section):
    """A file that changes nothing."""

    file: str
    problem: str


class Acknowledgement(Section):
    """What a job had in force at a step."""

    version: int = Field(ge=0, le=LAST_VERSION)
    """0: its own configuration."""
    step: int
    time: str
    """ISO 8601, in UTC."""
    host: str = Field(default_factory=socket.gethostname)
    pid: int = Field(default_factory=os.getpid)
    refused: list[Refusal] = Field(default_factory=list)
    """Files newer than that version that cannot be used."""


def write_acknowledgement(run_dir: Path, acknowledgement: Acknowledgement) -> None:
    """Raises OSError."""
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / ACKNOWLEDGED, acknowledgement.model_dump_json(indent=1).encode())


def acknowledgement_in(run_dir: Path) -> Acknowledgement | None:
    """The last one; None where there is none that can be read."""
    try:
        return read_model(Acknowledgement, run_dir / FOLDER / ACKNOWLEDGED)
    except ControlError:
        return None
