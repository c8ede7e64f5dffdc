"""Bias and spread of gradient estimates against the exact gradient, with intervals, from independent batches."""

import math
from dataclasses import dataclass

from torch import Tensor

# Of the standard normal distribution, for intervals of 95 %.
Z = 1.959964


@dataclass(frozen=True)
class Interval:
    """An estimate with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float

    def over(self, other: "Interval") -> "Interval":
        """The quotient by an independent estimate, which is above 0, to first order."""
        value = self.value / other.value
        own, others = ((each.high - each.low) / 2 for each in (self, other))
        margin = math.hypot(own, value * others) / other.value
        return Interval(value, value - margin, value + margin)

    def rounded(self) -> list[float]:
        return [round(x, 3) for x in (self.value, self.low, self.high)]


def relative_bias(products: Tensor, squared_norm: float) -> Interval:
    """Of the mean of B independent errors, from their inner `products` [B, B], by the norm of what they err about.

    Its square is the mean product of the errors of two different batches (a U-statistic), so that the noise of the
    mean does not count as bias. The variance of that is 4 z1 / B + 2 z2 / B^2 (Hoeffding 1948), with z1 the variance
    of a batch's mean product with the others and z2 the trace of the squared covariance, estimated by the same
    products about their mean. The interval begins at 0 where there may be no bias.
    """
    gram = products / squared_norm
    count = len(gram)
    with_others = (gram.sum(1) - gram.diagonal()) / (count - 1)
    centred = gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()
    z2 = float((centred.pow(2).sum() - centred.diagonal().pow(2).sum()) / (count * (count - 1)))
    # The variance of `with_others` holds z2 / B of noise besides z1.
    variance = max(4 * float(with_others.var()) / count - 2 * z2 / count**2, 2 * z2 / count**2)
    square, margin = float(with_others.mean()), Z * variance**0.5
    return Interval(*(max(x, 0.0) ** 0.5 for x in (square, square - margin, square + margin)))


def relative_variances(products: Tensor, squared_norm: float) -> Tensor:
    """[B] Squared distances of B estimates to their mean, times B / (B - 1), by the squared norm; see above."""
    count = len(products)
    distances = products.diagonal() - 2 * products.mean(0) + products.mean()
    return distances / squared_norm * count / (count - 1)


def deviation(variances: Tensor, cost: float) -> Interval:
    """The relative standard deviation of as many batches as cost 1 where one costs `cost`."""
    mean = float(variances.mean()) * cost
    margin = Z * float(variances.std()) * cost / len(variances) ** 0.5
    return Interval(*(max(x, 0.0) ** 0.5 for x in (mean, mean - margin, mean + margin)))
