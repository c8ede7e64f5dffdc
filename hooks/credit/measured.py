"""What the trainer measured of each rollout, beside what is kept of it: one file for each step and rank.

`rollouts/000012.ratios-3.json.zst` holds, for the samples that data-parallel rank 3 trained on in step 12, a list for
each field of `Measurements`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from midstream.hooks.credit.lines import FOLDER, damaged, read_lines, write_lines
from midstream.hooks.credit.note import Note
from midstream.hooks.credit.ratios import Ratios, prefix_squares
from midstream.hooks.credit.training import Segments

# Of what is kept; more take twice as long to write.
_DIGITS = 6


def rollout_key(group_key: str, index: int | None) -> str:
    """What names a rollout in all that is kept: its group, and the host's index of the sample."""
    return f"{group_key}/{index}"


@dataclass(frozen=True)
class Measured:
    """How far the policy that trained on a rollout was from those that made it.

    Attributes:
        key: Its group and the sample's index, with a slash between.
        older_tokens: Model tokens older than the rollout's newest version.
        prefix_log_ratio_sq: Their mean squared log-ratio, in nats squared.
        products: For each turn that began in a state with a snapshot, the response token at which it did, and the log
            of the prefix product there: how much likelier, or less likely, the policy would have come there.
    """

    key: str
    older_tokens: int
    prefix_log_ratio_sq: float
    products: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Measurements:
    """Those of a rank in one step: a number for each sample, and for each turn that began in a state with a snapshot.

    Attributes:
        keys, older_tokens, prefix_log_ratio_sq: As in `Measured`, of each sample.
        samples: The position of each turn's sample, ascending.
        starts: The response token at which it began.
        log_products: The log of the prefix product there, in nats.
    """

    keys: list[str]
    older_tokens: list[int]
    prefix_log_ratio_sq: list[float]
    samples: list[int]
    starts: list[int]
    log_products: list[float]

    def by_key(self) -> dict[str, Measured]:
        """Raises ValueError, TypeError or LookupError where lists do not fit each other."""
        products: list[list[tuple[int, float]]] = [[] for _ in self.keys]
        for sample, at, log in zip(self.samples, self.starts, self.log_products, strict=True):
            products[sample].append((at, log))
        of_samples = zip(self.keys, self.older_tokens, self.prefix_log_ratio_sq, products, strict=True)
        return {key: Measured(key, older, square, tuple(turns)) for key, older, square, turns in of_samples}


def measured_on_host(segments: Segments, ratios: Ratios) -> tuple[Segments, Ratios]:
    """The same with all that `measured` reads in the host's memory; copies where it was on a device."""
    fields = ("samples", "lengths", "older", "at_snapshot")
    return (
        replace(segments, **{name: getattr(segments, name).cpu() for name in fields}),
        replace(ratios, squares=ratios.squares.cpu(), products=ratios.products.cpu()),
    )


def measured(notes: Sequence[Note], segments: Segments, ratios: Ratios) -> Measurements:
    """Of the samples of a rank."""
    squares, older = prefix_squares(segments, ratios)
    here = segments.at_snapshot
    starts = segments.lengths.cumsum(0) - segments.lengths
    of_samples = torch.zeros(segments.count, dtype=torch.int64, device=starts.device)
    of_samples.index_add_(0, segments.samples, segments.lengths)
    before = (of_samples.cumsum(0) - of_samples)[segments.samples]
    return Measurements(
        [note.key for note in notes],
        older.to(torch.int64).tolist(),
        squares.round(decimals=_DIGITS).tolist(),
        segments.samples[here].tolist(),
        (starts - before)[here].tolist(),
        ratios.products[here].round(decimals=_DIGITS).tolist(),
    )


def keep_measured(run_dir: Path, step: int, rank: int, measurements: Measurements) -> None:
    """Write a rank's file of a step. Raises OSError, with its old file as it was."""
    path = run_dir / FOLDER / f"{step:06d}.ratios-{rank}.json.zst"
    write_lines(path, [vars(measurements)])


def measured_in(run_dir: Path, step: int) -> dict[str, Measured]:
    """What all ranks measured in a step, by key; none where nothing is there. Raises KeptError."""
    found = {}
    for path in sorted((run_dir / FOLDER).glob(f"{step:06d}.ratios-*.json.zst")):
        values = read_lines(path)
        try:
            [columns] = values
            found.update(Measurements(**columns).by_key())
        except (TypeError, LookupError, ValueError) as error:
            raise damaged(path, error) from error
    return found
