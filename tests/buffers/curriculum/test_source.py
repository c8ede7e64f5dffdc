"""The prior of a source, its clock, and when it is surprised."""

import math

import numpy as np
import pytest

from midstream.buffers.curriculum.posterior import informative
from midstream.buffers.curriculum.prior import Prior
from midstream.buffers.curriculum.source import Source
from midstream.conf.schema.curriculum import ForgetConfig

FOREVER = ForgetConfig(half_life=None, surprise=None)


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (0.4, 0.2), (1.2, 0.6)])
def test_the_prior_finds_the_parameters_that_pass_rates_were_drawn_with(a: float, b: float) -> None:
    random, prior = np.random.default_rng(0), Prior()
    for p in random.beta(a, b, 20_000):
        prior.observe(random.binomial(8, p) / 8, 8, 1.0)
    found_a, found_b = prior.beta()
    assert found_a / (found_a + found_b) == pytest.approx(a / (a + b), abs=0.01)
    assert found_a + found_b == pytest.approx(a + b, rel=0.1)


def test_a_prompt_unlike_all_others_of_its_source_is_believed() -> None:
    """Prompts that are alike make no prior that outweighs what one of them has shown."""
    prior = Prior()
    for _ in range(1_000):
        prior.observe(0.5, 8, 1.0)
    a, b = prior.beta()
    assert a == pytest.approx(b) and a + b == pytest.approx(2)
    assert informative(a + 16, b, 8) < 0.5


def test_nothing_known_is_an_even_prior() -> None:
    assert Prior().beta() == pytest.approx((1, 1))


def test_a_source_of_one_kind_keeps_a_proper_prior() -> None:
    prior = Prior()
    for _ in range(1_000):
        prior.observe(1.0, 8, 1.0)
    a, b = prior.beta()
    assert a / (a + b) == pytest.approx(0.98) and b > 0


def test_half_of_what_was_noted_counts_after_a_half_life() -> None:
    source, forget = Source(), ForgetConfig(half_life=10.0, surprise=None)
    source.advance(5, forget)
    noted_at = source.time
    source.advance(15, forget)
    assert source.remembered(8.0, 2.0, noted_at, 0) == pytest.approx((4, 1))
    source.advance(3, forget)  # a host that goes back to a checkpoint
    assert source.remembered(8.0, 2.0, noted_at, 0) == pytest.approx((4, 1))


@pytest.mark.parametrize("half_life", [1e-9, 1e-300, 5e-324])
def test_the_shortest_half_life_forgets_all_and_a_longer_one_holds_again_after_it(half_life: float) -> None:
    source, at_once, slowly = Source(), *(ForgetConfig(half_life=each) for each in (half_life, 100.0))
    source.observe(8, 0, (0.0, 0.0), at_once)
    for version in range(1_000):
        source.advance(version, at_once)
    assert source.remembered(8.0, 0.0, 0.0, 0) == (0, 0)
    assert source.prior.beta() == pytest.approx((1, 1))
    noted_at = source.time
    for version in range(1_000, 1_200):
        source.advance(version, slowly)
    assert source.remembered(8.0, 0.0, noted_at, 0) == pytest.approx((2, 0), rel=0.02)


def test_a_prompt_that_changes_alone_surprises_nobody() -> None:
    source, forget = Source(), ForgetConfig(surprise=8.0, half_life=None)
    for _ in range(3):
        source.observe(4, 4, (8.0, 8.0), forget)
    assert not source.observe(8, 0, (1.0, 39.0), forget)
    assert source.era == 0
    for _ in range(40):
        assert not source.observe(4, 4, (20.0, 20.0), forget)
    assert source.surprise == 0


def test_a_source_that_changes_is_forgotten_and_begins_with_what_came_after() -> None:
    source, forget = Source(), ForgetConfig(surprise=8.0, half_life=None)
    for _ in range(200):
        source.observe(8, 0, (40.0, 0.0), forget)
    a, b = source.prior.beta()
    assert a / (a + b) > 0.95
    after = [source.observe(0, 8, (40.0, 0.0), forget) for _ in range(5)]
    assert after == [False, False, False, False, True]
    assert source.era == 1
    assert source.remembered(38.0, 2.0, 0.0, 0) == (0, 0)
    assert source.remembered(38.0, 2.0, 0.0, 1) == pytest.approx((38, 2))
    a, b = source.prior.beta()
    assert a / (a + b) < 0.1


def test_without_surprise_nothing_is_forgotten_at_once() -> None:
    source = Source()
    for _ in range(50):
        assert not source.observe(0, 8, (40.0, 0.0), FOREVER)
    assert source.era == 0


def test_the_prior_is_the_same_in_whatever_order_groups_of_a_version_end() -> None:
    outcomes = [(8, 0, (0.0, 0.0)), (3, 5, (2.0, 6.0)), (0, 8, (0.0, 0.0)), (1, 3, (16.0, 0.0))]
    priors = []
    for order in (outcomes, outcomes[::-1]):
        source = Source()
        for passed, failed, known in order:
            source.observe(passed, failed, known, FOREVER)
        priors.append(source.prior.beta())
    assert priors[0] == pytest.approx(priors[1], rel=1e-12)
    assert math.isfinite(priors[0][0])
