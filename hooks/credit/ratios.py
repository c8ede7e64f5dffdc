"""How far the policy that is trained is from those that made the tokens, where both log-probs are known."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.hooks.credit.training import Segments

Reduce = Callable[[Tensor], Tensor]
"""The sum of a tensor over the ranks that own slices of the same responses."""

# Lags in policy versions at which an effective sample size is told on its own, up to each of these.
_LAGS = (0, 1, 2, 4, 8, 16)
_BANDS = [
    *(
        str(high) if high - low == 1 else f"{low + 1}_{high}"
        for low, high in itertools.pairwise((-1, *_LAGS))
    ),
    f"above_{_LAGS[-1]}",
]


@dataclass(frozen=True)
class Ratios:
    """Log-ratios, in nats: log-prob under the policy that is trained, minus the one recorded.

    Attributes:
        tokens: [T] of each token of the model, 0 for others.
        trained: [T] bool, the model's tokens that are in the loss.
        sums: [S] summed over a segment, by whatever rank its tokens are owned.
        squares: [S] their squares, summed likewise.
        products: [S] summed over all earlier segments of the same sample: the log of the prefix product.
    """

    tokens: Tensor
    trained: Tensor
    sums: Tensor
    squares: Tensor
    products: Tensor


def prefix_products(log_ratios: Tensor, rollouts: Tensor) -> Tensor:
    """[S] The sum of the log-ratios of all earlier segments of the same rollout.

    ``log_ratios`` [S] is the sum over a segment's own model tokens of log-prob under the policy that is trained,
    minus the log-prob recorded when the token was made; ``rollouts`` [S] is ascending. Transitions of the
    environment cancel in the ratio of two policies, so the exponential of this sum is the ratio of the two
    policies' distributions of what precedes the segment: transcript and environment state together.
    """
    before = torch.cumsum(log_ratios, dim=0) - log_ratios
    is_first = torch.ones_like(rollouts, dtype=torch.bool)
    is_first[1:] = rollouts[1:] != rollouts[:-1]
    at_start = before[is_first]
    return before - at_start[torch.cumsum(is_first, dim=0) - 1]


def ratios_of(
    segments: Segments, log_probs: Tensor, recorded: Tensor, mask: Tensor, reduce: Reduce
) -> Ratios:
    """From log-probs under the policy that is trained and the `recorded` ones; these and the loss mask are [T].

    What a masked prefix holds counts in sums and products: the policy has made it all the same.
    """
    made = segments.made[segments.of_tokens]
    tokens = torch.where(made, (log_probs - recorded).to(torch.float64), 0.0)
    sums = tokens.new_zeros(2, len(segments.made))
    for row, values in zip(sums, (tokens, tokens**2), strict=True):
        row.index_add_(0, segments.of_tokens, values)
    of_segments, squares = reduce(sums)
    products = prefix_products(of_segments, segments.samples)
    return Ratios(tokens, made & (mask > 0), of_segments, squares, products)


def prefix_squares(segments: Segments, ratios: Ratios) -> tuple[Tensor, Tensor]:
    """[N] The mean squared log-ratio of what is older than the newest version of its sample; and how many tokens."""
    values = torch.stack([ratios.squares, segments.lengths.to(torch.float64)], dim=1)
    values = torch.where(segments.older[:, None], values, 0.0)
    sums = values.new_zeros(segments.count, 2).index_add_(0, segments.samples, values)
    return sums[:, 0] / sums[:, 1].clamp(min=1), sums[:, 1]


def ratio_metrics(segments: Segments, ratios: Ratios | None) -> dict[str, float]:
    """Figures of one rank's share of a batch; zeros where nothing is known, and an effective sample size of 1.

    `staleness/measured` is 1 where log-probs were known, else 0.
    """
    measured = float(ratios is not None)
    if ratios is None:
        nothing = torch.zeros_like(segments.of_tokens)
        ratios = ratios_of(segments, nothing, nothing, nothing, lambda sums: sums)
    squares, older = prefix_squares(segments, ratios)
    products = ratios.products[segments.at_snapshot]
    lowest, highest = products.aminmax() if len(products) else (0.0, 0.0)
    of_loss = ratios.trained
    weights = torch.where(of_loss, ratios.tokens.exp(), 0.0)
    count = max(int(of_loss.sum()), 1)
    bands = torch.bucketize(segments.lags, torch.tensor(_LAGS, device=segments.lags.device))
    bands = torch.where(of_loss, bands[segments.of_tokens], len(_LAGS) + 1)
    sizes = effective_sample_sizes(ratios.tokens, bands, len(_LAGS) + 2).tolist()
    return {
        "staleness/measured": measured,
        "staleness/ratio_mean": float(weights.sum()) / count,
        "staleness/ratio_deviation": float(((weights - 1).abs() * of_loss).sum()) / count,
        "staleness/log_ratio_sq": float((ratios.tokens**2 * of_loss).sum()) / count,
        "staleness/prefix_log_ratio_sq": float((squares * older).sum() / older.sum().clamp(min=1)),
        "staleness/prefix_log_ratio_sq_max": float(squares.max()) if len(squares) else 0.0,
        "staleness/prefix_product_log_mean": _mean(products),
        "staleness/prefix_product_log_min": float(lowest),
        "staleness/prefix_product_log_max": float(highest),
    } | {f"staleness/ess_lag_{name}": size for name, size in zip(_BANDS, sizes[:-1], strict=True)}


def effective_sample_sizes(log_ratios: Tensor, bands: Tensor, count: int) -> Tensor:
    """[count] (sum w)^2 / (n sum w^2) in each band, of the weights exp(`log_ratios`) [n]; source: Kish 1965.

    `bands` [n] are numbers below `count`. In (0, 1]; 1 where a band is empty.
    """
    if not len(log_ratios):
        return torch.ones(count)
    largest = log_ratios.new_zeros(count).scatter_reduce(0, bands, log_ratios, "amax", include_self=False)
    weights = (log_ratios - largest[bands]).exp()  # the largest of a band is 1: no sum overflows
    sums = log_ratios.new_zeros(3, count)
    for row, values in zip(sums, (torch.ones_like(weights), weights, weights**2), strict=True):
        row.index_add_(0, bands, values)
    numbers, totals, squares = sums
    return torch.where(numbers > 0, totals**2 / (numbers * squares), 1.0)


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0
