"""What the trainer does with the notes of its samples: values of segments become values of tokens.

Shapes: N samples, S segments of all of them in order, T tokens of all responses that this rank owns. Under context
parallelism a rank owns two slices of each response; `owned` says which.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.hooks.credit.batch import NONE, is_outdated, per_token
from midstream.hooks.credit.note import Note

Owned = Callable[[Tensor, int], Tensor]
"""The entries of a tensor over the response of a sample that this rank owns, given the sample's index."""


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
    counts = torch.tensor([len(note.lengths) for note in notes])
    samples = per_token(torch.arange(len(notes)), counts)
    lengths = torch.tensor([length for note in notes for length in note.lengths], dtype=torch.int64)
    versions = torch.tensor([version for note in notes for version in note.versions], dtype=torch.int64)
    trains = torch.tensor([note.version for note in notes], dtype=torch.int64)
    of_tokens = per_token(torch.arange(len(lengths)), lengths).split(list(response_lengths))
    made = versions != NONE
    found = {
        "samples": samples,
        "lengths": lengths,
        "made": made,
        "lags": torch.where(made, (trains[samples] - versions).clamp(min=0), 0),
        "older": is_outdated(versions, samples, len(notes)),
        "at_snapshot": torch.tensor([at for note in notes for at in note.at_snapshot], dtype=torch.bool),
        "of_tokens": torch.cat([owned(each, index) for index, each in enumerate(of_tokens)]),
    }
    return Segments(len(notes), **{name: value.to(device) for name, value in found.items()})


def advantages_of(notes: Sequence[Note], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """[S] What replaces the host's advantages, and what the host has spread over the tokens instead.

    None where the host's stay.
    """
    if any(note.advantages is None for note in notes):
        return None
    ours = [value for note in notes for value in note.advantages or ()]
    spread = [note.spread for note in notes for _ in note.lengths]
    return torch.tensor(ours, device=device), torch.tensor(spread, device=device)


def weights_of(notes: Sequence[Note], device: torch.device) -> Tensor | None:
    """[S] What advantages are multiplied with, None where by nothing."""
    if all(note.weights is None for note in notes):
        return None
    weights = [w for note in notes for w in note.weights or [1.0] * len(note.lengths)]
    return torch.tensor(weights, device=device)


def credit_metrics(
    given: Tensor, changed: Tensor, mask: Tensor, prefix_weights: Tensor | None, bound: float
) -> dict[str, float]:
    """What estimators did to the host's advantages `given`, over the tokens in the loss; all are [T].

    `prefix_weights` are those of `prefix_is`, None where it has no part.
    """
    trained = mask > 0
    before, after = given[trained], changed[trained]
    weights = torch.ones(1) if prefix_weights is None else prefix_weights[trained]
    size = before.abs().sum()
    return {
        "credit/changed": _mean((before != after).double()),
        "credit/size": float(after.abs().sum() / size) if size else 0.0,
        "credit/prefix_weight_mean": _mean(weights),
        "credit/prefix_weight_bounded": 0.0 if prefix_weights is None else _mean((weights >= bound).double()),
    }


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0
