"""Moments of a Beta distribution against integration, enumeration and cases by hand."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.buffers.curriculum.posterior import (
    deviation,
    informative,
    informative_at,
    informative_deviation,
    log_likelihood,
    variance_of_rewards,
)


def integrated(a: float, b: float, of, steps: int = 20_000) -> float:
    """The mean of a function of p under Beta(a, b), by the midpoint rule; a and b are 1 or more."""
    points = [(i + 0.5) / steps for i in range(steps)]
    weights = [p ** (a - 1) * (1 - p) ** (b - 1) for p in points]
    return sum(w * of(p) for w, p in zip(weights, points, strict=True)) / sum(weights)


@pytest.mark.parametrize(("a", "b", "n"), [(1, 1, 8), (3, 1.5, 4), (9, 1, 8), (2.5, 7, 16)])
def test_moments_are_those_of_the_distribution(a: float, b: float, n: int) -> None:
    assert informative(a, b, n) == pytest.approx(integrated(a, b, lambda p: informative_at(p, n)), abs=1e-4)
    mean = informative(a, b, n)
    variance = integrated(a, b, lambda p: (informative_at(p, n) - mean) ** 2)
    assert informative_deviation(a, b, n) == pytest.approx(math.sqrt(variance), abs=1e-3)
    rate = a / (a + b)
    assert deviation(a, b) ** 2 == pytest.approx(integrated(a, b, lambda p: (p - rate) ** 2), abs=1e-5)
    assert variance_of_rewards(a, b) == pytest.approx(integrated(a, b, lambda p: p * (1 - p)), abs=1e-5)


def test_under_an_even_prior_every_count_of_successes_is_as_likely_as_another() -> None:
    assert informative(1, 1, 8) == pytest.approx(1 - 2 / 9)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_known_rate_informs_as_often_as_enumeration_says(n: int) -> None:
    p = 0.3
    chance = sum(
        math.prod(p if success else 1 - p for success in group)
        for group in itertools.product((True, False), repeat=n)
        if len(set(group)) > 1
    )
    assert informative_at(p, n) == pytest.approx(chance)


@given(
    a=st.floats(0.01, 1e4),
    b=st.floats(0.01, 1e4),
    n=st.integers(1, 64),
)
def test_chances_are_chances_whatever_is_believed(a: float, b: float, n: int) -> None:
    assert 0 <= informative(a, b, n) <= 1
    assert 0 <= informative_deviation(a, b, n) <= 0.5
    assert informative(a, b, n) == pytest.approx(informative(b, a, n))


def test_likelihoods_of_all_orders_sum_to_one() -> None:
    total = sum(math.comb(5, k) * math.exp(log_likelihood(k, 5 - k, 0.7, 2.0)) for k in range(6))
    assert total == pytest.approx(1)
