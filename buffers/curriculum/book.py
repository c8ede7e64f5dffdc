"""What is remembered of each prompt: a row of numbers in arrays, so that a million prompts fit in a host's memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_COLUMNS = {
    "successes": np.float32,
    "failures": np.float32,
    "noted_at": np.float64,
    "era": np.uint32,
    "played_at": np.int64,
    "ended_at": np.int64,
    "tokens": np.float32,
    "turns": np.float32,
    "seconds": np.float32,
}
# Of what a rollout cost, the share that the newest group counts.
_NEWEST = 0.5


def digest_of(prompt_key: str) -> int:
    """64 bits of a prompt's key, which is a hash in hex digits."""
    return int(prompt_key[:16], 16)


@dataclass(frozen=True)
class Cost:
    """What a rollout of a group cost, on average."""

    tokens: float = 0.0
    turns: float = 0.0
    seconds: float = 0.0


class Book:
    """R prompts, sorted by their digests: a row means the same prompt on every host and after every restart.

    Attributes:
        digests: [R] uint64.
        successes, failures: [R] rollouts, as much of them as was remembered at `noted_at`.
        noted_at: [R] the time of the source's clock at the last group.
        era: [R] that of the source at the last group.
        played_at: [R] how many groups had been begun, itself included, when the prompt was played last, or 0.
        ended_at: [R] how many had been begun when a group of it ended last, or 0.
        tokens, turns, seconds: [R] what a rollout costs; 0 where no group was played.
    """

    def __init__(self, digests: Sequence[int] | NDArray[np.uint64]) -> None:
        self.digests = np.unique(np.asarray(digests, dtype=np.uint64))
        rows = len(self.digests)
        self.successes = np.zeros(rows, np.float32)
        self.failures = np.zeros(rows, np.float32)
        self.noted_at = np.zeros(rows, np.float64)
        self.era = np.zeros(rows, np.uint32)
        self.played_at = np.zeros(rows, np.int64)
        self.ended_at = np.zeros(rows, np.int64)
        self.tokens = np.zeros(rows, np.float32)
        self.turns = np.zeros(rows, np.float32)
        self.seconds = np.zeros(rows, np.float32)

    def __len__(self) -> int:
        return len(self.digests)

    def row_of(self, digest: int) -> int | None:
        """The row of a prompt, None where it is not in the book."""
        row = int(np.searchsorted(self.digests, np.uint64(digest)))
        return row if row < len(self) and int(self.digests[row]) == digest else None

    def rows_of(self, digests: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Those of prompts that are all in the book."""
        return np.searchsorted(self.digests, digests)

    def note(self, row: int, successes: float, failures: float, time: float, era: int) -> None:
        """What is remembered of a prompt now."""
        self.successes[row] = successes
        self.failures[row] = failures
        self.noted_at[row] = time
        self.era[row] = era

    def note_cost(self, row: int, cost: Cost) -> None:
        """Remember what a rollout of a group cost."""
        for column, value in (
            (self.tokens, cost.tokens),
            (self.turns, cost.turns),
            (self.seconds, cost.seconds),
        ):
            old = column[row]
            column[row] = value if old == 0 else old + _NEWEST * (value - old)

    def cost(self, row: int) -> Cost:
        """What a rollout of the prompt costs."""
        return Cost(float(self.tokens[row]), float(self.turns[row]), float(self.seconds[row]))

    def columns(self) -> dict[str, NDArray[Any]]:
        """All arrays by name, to be stored."""
        return {"digests": self.digests} | {name: getattr(self, name) for name in _COLUMNS}

    def adopt(self, columns: dict[str, NDArray[Any]]) -> int:
        """Take over what another book knew of prompts that are in this one; returns of how many.

        Raises:
            ValueError, LookupError: these are not the columns of a book; nothing is taken over.
        """
        digests = columns["digests"]
        if (
            digests.dtype != np.uint64
            or digests.ndim != 1
            or (len(digests) and (np.diff(digests) <= 0).any())
        ):
            raise ValueError("its digests are not sorted")
        _, mine, theirs = np.intersect1d(self.digests, digests, assume_unique=True, return_indices=True)
        for name, dtype in _COLUMNS.items():
            column = columns[name]
            if column.shape != digests.shape or column.dtype != dtype:
                raise ValueError(f"its {name} are of another shape or type")
            if column.dtype.kind == "f" and not (np.isfinite(column).all() and (column >= 0).all()):
                raise ValueError(f"its {name} are not all finite and positive")
        for name in _COLUMNS:
            getattr(self, name)[mine] = columns[name][theirs]
        return len(mine)
