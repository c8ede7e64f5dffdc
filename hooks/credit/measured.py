"""What the trainer measured of each rollout, beside what is kept of it: one file for each step and rank.

`rollouts/000012.ratios-3.jsonl.zst` holds a JSON object a line, one for each sample that data-parallel rank 3 trained
on in step 12.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midstream.hooks.credit.lines import FOLDER, damaged, read_lines, write_lines
from midstream.hooks.credit.note import Note
from midstream.hooks.credit.ratios import Ratios, prefix_squares
from midstream.hooks.credit.training import Segments


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

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Measured":
        """The inverse of `vars`, after JSON. Raises TypeError or LookupError where it is no such."""
        return cls(**{**value, "products": tuple((at, log) for at, log in value["products"])})


def measured(notes: Sequence[Note], segments: Segments, ratios: Ratios) -> list[Measured]:
    """A line for each sample of a rank."""
    squares, older = (values.tolist() for values in prefix_squares(segments, ratios))
    products = ratios.products.tolist()
    found, first = [], 0
    for sample, note in enumerate(notes):
        at, logs = 0, []
        for number, length in enumerate(note.lengths):
            if note.at_snapshot[number]:
                logs.append((at, products[first + number]))
            at += length
        first += len(note.lengths)
        found.append(Measured(note.key, int(older[sample]), squares[sample], tuple(logs)))
    return found


def keep_measured(run_dir: Path, step: int, rank: int, rollouts: Sequence[Measured]) -> None:
    """Write a rank's file of a step. Raises OSError, with its old file as it was."""
    path = run_dir / FOLDER / f"{step:06d}.ratios-{rank}.jsonl.zst"
    write_lines(path, map(vars, rollouts))


def measured_in(run_dir: Path, step: int) -> dict[str, Measured]:
    """What all ranks measured in a step, by key; none where nothing is there. Raises KeptError."""
    found = {}
    for path in sorted((run_dir / FOLDER).glob(f"{step:06d}.ratios-*.jsonl.zst")):
        values = read_lines(path)
        try:
            rollouts = [Measured.from_json(value) for value in values]
        except (TypeError, LookupError, ValueError) as error:
            raise damaged(path, error) from error
        found.update({rollout.key: rollout for rollout in rollouts})
    return found
