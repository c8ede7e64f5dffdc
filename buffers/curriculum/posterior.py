"""What is believed of a prompt's pass rate p, as Beta(a, b), and what that says of a group of n rollouts.

A group informs where some of its rollouts succeed and some do not: with probability 1 - p^n - (1 - p)^n. Moments of
Beta(a, b): E[p^i (1 - p)^j] = (a)_i (b)_j / (a + b)_{i + j}, with rising factorials (x)_i = x (x + 1) ... (x + i - 1).
"""

import math


def informative(a: float, b: float, n: int) -> float:
    """The probability that a group of n informs, in [0, 1]."""
    all_succeed, all_fail = alike(a, b, n)
    return max(0.0, 1.0 - all_succeed - all_fail)


def alike(a: float, b: float, n: int) -> tuple[float, float]:
    """The probabilities that n rollouts all succeed, and that they all fail."""
    all_succeed = all_fail = 1.0
    for i in range(n):
        whole = a + b + i
        all_succeed *= (a + i) / whole
        all_fail *= (b + i) / whole
    return all_succeed, all_fail


def informative_deviation(a: float, b: float, n: int) -> float:
    """How uncertain that is: the standard deviation of 1 - p^n - (1 - p)^n over what is believed of p."""
    square = _moment(a, b, 2 * n, 0) + _moment(a, b, 0, 2 * n) + 2 * _moment(a, b, n, n)
    mean = 1.0 - informative(a, b, n)
    return math.sqrt(max(0.0, square - mean**2))


def informative_at(p: float, n: int) -> float:
    """The same probability where the pass rate is known."""
    return float(1.0 - p**n - (1.0 - p) ** n)


def deviation(a: float, b: float) -> float:
    """The standard deviation of p."""
    return math.sqrt(a * b / (a + b + 1)) / (a + b)


def variance_of_rewards(a: float, b: float) -> float:
    """E[p (1 - p)], by which the improvement of a policy gradient step is bounded below (arXiv 2504.03380)."""
    return a * b / ((a + b) * (a + b + 1))


def log_likelihood(successes: float, failures: float, a: float, b: float) -> float:
    """Of so many successes and failures in one order, in nats; that of a Beta-Bernoulli process."""
    return _log_beta(a + successes, b + failures) - _log_beta(a, b)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _moment(a: float, b: float, i: int, j: int) -> float:
    return math.exp(_log_beta(a + i, b + j) - _log_beta(a, b))
