"""What a curriculum knows, in a file: it goes on from there with the same choices."""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from midstream.buffers.curriculum.choice import Exploration
from midstream.buffers.curriculum.curriculum import Curriculum
from midstream.buffers.curriculum.drawing import Prompts
from midstream.buffers.curriculum.prior import Prior
from midstream.buffers.curriculum.source import Source
from midstream.buffers.curriculum.tally import BINS, Calibration
from midstream.conf.files import replace_file
from midstream.conf.schema.curriculum import CurriculumConfig

_FORMAT = 1
_Taken = TypeVar("_Taken")


class StateError(ValueError):
    """A file that no curriculum can go on from; the message names it and says what to do."""


def save(curriculum: Curriculum, path: Path) -> None:
    """Write all that it knows; the file is there whole or not at all. Raises OSError."""
    drawing = curriculum.drawing
    rest = {
        "format": _FORMAT,
        "names": curriculum.names,
        "group_size": curriculum.group_size,
        "outcome": curriculum.config.outcome.by,
        "sources": {name: asdict(source) for name, source in curriculum.sources.items()},
        "calibrations": {name: asdict(each) for name, each in curriculum.calibrations.items()},
        "walks": {name: [walk.round, walk.at, len(walk)] for name, walk in drawing.walks.items()},
        "given": drawing.turns.given,
        "begun": drawing.begun,
        "exploration": asdict(drawing.exploration),
        "random": drawing.random.bit_generator.state,
    }
    columns: dict[str, Any] = {
        "rest": np.frombuffer(json.dumps(rest).encode(), np.uint8),
        "source": curriculum.source_of_row,
        **curriculum.book.columns(),
    }
    buffer = io.BytesIO()
    np.savez(buffer, **columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, buffer.getvalue())


def restore(curriculum: Curriculum, path: Path) -> int:
    """Go on from what was saved; returns of how many prompts something was known.

    Prompts and sources that were not there then are new, as is a prompt of another source than then, and those that
    are there no more are forgotten. A walk whose prompts are others than then begins its round anew.

    Raises:
        StateError: the file cannot be read, or is none of these; the curriculum is as it was.
    """
    return _reading(path, lambda columns, rest: _adopt(curriculum, columns, rest))


def sources_in(path: Path) -> list[str]:
    """The names of the sources of the prompts that were there when it was saved.

    Raises:
        StateError: as `restore`.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            return [str(name) for name in json.loads(stored["rest"].tobytes())["names"]]
    except Exception as error:
        raise StateError(f"{path} cannot be read ({type(error).__name__}: {error})") from error


def curriculum_of(path: Path, config: CurriculumConfig) -> Curriculum:
    """One that knows what was saved, over the prompts that were there then, without their dataset.

    Raises:
        StateError: as `restore`.
    """
    return _reading(path, lambda columns, rest: _made(config, columns, rest))


def _reading(path: Path, take: Callable[[dict[str, NDArray[Any]], dict[str, Any]], _Taken]) -> _Taken:
    try:
        with np.load(path, allow_pickle=False) as stored:
            columns = {name: stored[name] for name in stored.files}
        rest = json.loads(columns.pop("rest").tobytes())
        if rest["format"] != _FORMAT:
            raise ValueError(f"its format is {rest['format']}, expected {_FORMAT}")
        return take(columns, rest)
    except OSError as error:
        raise StateError(f"cannot read {path} ({error.strerror or error}): mend access to it") from error
    except Exception as error:
        raise StateError(
            f"{path} is damaged, or of another version of midstream ({type(error).__name__}: {error}): remove it to "
            "let the curriculum begin anew, or go on from another checkpoint"
        ) from error


def _made(config: CurriculumConfig, columns: dict[str, NDArray[Any]], rest: dict[str, Any]) -> Curriculum:
    prompts = Prompts(
        columns["digests"], columns["source"].astype(np.int32), [str(name) for name in rest["names"]]
    )
    curriculum = Curriculum(
        config, prompts, group_size=int(rest["group_size"]), groups_per_step=1, seed=0, shuffle=True
    )
    _adopt(curriculum, columns, rest)
    return curriculum


def _adopt(curriculum: Curriculum, columns: dict[str, NDArray[Any]], rest: dict[str, Any]) -> int:
    if rest["outcome"] != curriculum.config.outcome.by:
        raise ValueError(f"it counts by midstream.curriculum.outcome.by={rest['outcome']}")
    # All is read before anything is taken over.
    sources = {name: _source(value) for name, value in rest["sources"].items()}
    calibrations = {name: _calibration(value) for name, value in rest["calibrations"].items()}
    walks = {str(name): tuple(map(int, where)) for name, where in rest["walks"].items()}
    given = {str(name): float(groups) for name, groups in rest["given"].items()}
    begun = int(rest["begun"])
    exploration = Exploration(**rest["exploration"])
    random = np.random.default_rng()
    random.bit_generator.state = rest["random"]
    of_row, names = columns.pop("source"), np.array(rest["names"], dtype=object)
    if of_row.shape != columns["digests"].shape or (
        len(of_row) and not 0 <= of_row.min() <= of_row.max() < len(names)
    ):
        raise ValueError("its prompts are of sources that it does not have")
    known = curriculum.book.adopt(columns)
    curriculum.sources.update({name: sources[name] for name in curriculum.names if name in sources})
    _keep_time(curriculum, columns["digests"], names[of_row], sources)
    curriculum.calibrations.update(
        {name: calibrations[name] for name in curriculum.names if name in calibrations}
    )
    drawing = curriculum.drawing
    for name, walk in drawing.walks.items():
        round_, at, length = walks.get(name, (0, 0, -1))
        walk.go_to(round_, at if length == len(walk) else 0)
    drawing.turns.given = given
    drawing.begun = begun
    drawing.exploration, drawing.random = exploration, random
    return known


def _keep_time(
    curriculum: Curriculum, digests: NDArray[np.uint64], then: NDArray[Any], sources: Mapping[str, Source]
) -> None:
    """Prompts that are of another source now go by its clock; `then` has the name of each one's source before."""
    book = curriculum.book
    _, rows, places = np.intersect1d(book.digests, digests, assume_unique=True, return_indices=True)
    now = np.array(curriculum.names, dtype=object)[curriculum.source_of_row[rows]]
    moved = (then[places] != now) & (book.successes[rows] + book.failures[rows] > 0)
    for row, before, after in zip(rows[moved], then[places][moved], now[moved], strict=True):
        passed, failed = sources[before].remembered(
            book.successes[row], book.failures[row], book.noted_at[row], book.era[row]
        )
        its = curriculum.sources[after]
        book.note(int(row), float(passed), float(failed), its.time, its.era)


def _source(value: dict[str, Any]) -> Source:
    priors = {name: Prior(**value[name]) for name in ("prior", "since")}
    return Source(**{**value, **priors})


def _calibration(value: dict[str, Any]) -> Calibration:
    calibration = Calibration(**value)
    if any(len(sums) != BINS for sums in vars(calibration).values()):
        raise ValueError(f"its calibration has not {BINS} bins")
    return calibration
