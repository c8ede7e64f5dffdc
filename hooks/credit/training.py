"""What the trainer does with the notes of its samples: values of segments become values of tokens.

Shapes: N samples, S segments of all of them in order, T tokens of all responses that this rank owns. Under context
parallelism a rank owns two slices of each response; `owned` says which.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.hooks.credit.batch import NONE, is_outdated, per_token
from midstream.hooks.credit.joined import joined
from midstream.hooks.credit.note import Note

Owned = Callable[[Tensor], Tensor]
"""From a tensor over the responses of all samples to the entries that this rank owns, [T]."""


@dataclass(frozen=True)
class Segments:
    """The segments of a rank's samples.

    Attributes:
        count: N, of which the last may have no segment.
        samples: [S] the sample of each, ascending.
        lengths: [S] tokens.
        made: [S] bool, made by the policy.
        lags: [S] policy versions between the one that trains and the one that made it; 0 for the environment's.
        older: [S] bool, made by an older version than the newest of its sample.
        at_snapshot: [S] bool, see `Note`.
        of_tokens: [T] the segment of each token.
    """

    count: int
    samples: Tensor
    lengths: Tensor
    made: Tensor
    lags: Tensor
    older: Tensor
    at_snapshot: Tensor
    of_tokens: Tensor


def segments_of(
    notes: Sequence[Note], response_lengths: Sequence[int], owned: Owned, device: torch.device
) -> Segments:
    """Lay the notes of N samples out; raises NoteError where one does not fit its response."""
    for note, length in zip(notes, response_lengths, strict=True):
        note.check(length)
    samples = per_token(torch.arange(len(notes)), _counts(notes))
    lengths = joined((note.lengths for note in notes), torch.int64)
    versions = joined((note.versions for note in notes), torch.int64)
    trains = torch.tensor([note.version for note in notes], dtype=torch.int64)
    of_tokens = per_token(torch.arange(len(lengths)), lengths)
    made = versions != NONE
    found = {
        "samples": samples,
        "lengths": lengths,
        "made": made,
        "lags": torch.where(made, (trains[samples] - versions).clamp(min=0), 0),
        "older": is_outdated(versions, samples, len(notes)),
        "at_snapshot": joined((note.at_snapshot for note in notes), torch.bool),
        "of_tokens": owned(of_tokens),
    }
    return Segments(len(notes), **{name: value.to(device) for name, value in found.items()})


def advantages_of(notes: Sequence[Note], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """[S] What replaces the host's advantages, and what the host has spread over the tokens instead.

    None where the host's stay.
    """
    if any(note.advantages is None for note in notes):
        return None
    ours = joined((note.advantages or () for note in notes), torch.float64)
    spread = torch.tensor([note.spread for note in notes], dtype=torch.float64)
    return ours.to(device), per_token(spread, _counts(notes)).to(device)


def weights_of(notes: Sequence[Note], device: torch.device) -> Tensor | None:
    """[S] What advantages are multiplied with, None where by nothing."""
    if all(note.weights is None for note in notes):
        return None
    weights = joined((note.weights or [1.0] * len(note.lengths) for note in notes), torch.float64)
    return weights.to(device)


def credit_metrics(
    given: Tensor, changed: Tensor, mask: Tensor, prefix_weights: Tensor | None, bound: float
) -> dict[str, float]:
    """What estimators did to the host's advantages `given`, over the tokens in the loss; all are [T].

    `prefix_weights` are those of `prefix_is`, None where it has no part.
    """
    trained = mask > 0
    count = max(int(trained.sum()), 1)
    size = float((given.abs() * trained).sum())
    weights = torch.ones_like(given) if prefix_weights is None else prefix_weights
    return {
        "credit/changed": float(((given != changed) & trained).sum()) / count,
        "credit/size": float((changed.abs() * trained).sum()) / size if size else 0.0,
        "credit/prefix_weight_mean": float((weights * trained).sum()) / count,
        "credit/prefix_weight_bounded": 0.0
        if prefix_weights is None
        else float(((weights >= bound) & trained).sum()) / count,
    }


def _counts(notes: Sequence[Note]) -> Tensor:
    """[N] Segments of each sample."""
    return torch.tensor([len(note.lengths) for note in notes], dtype=torch.int64)
