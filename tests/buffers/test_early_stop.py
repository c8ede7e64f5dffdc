"""The chance that a group informs, given who has ended, against two other ways to it; and the rule that uses it."""

import itertools
import random
from fractions import Fraction
from typing import Any

import pytest

from midstream.buffers.curriculum.early_stop import chance_to_inform, decider, tokens_saved
from midstream.conf.schema.curriculum import CurriculumConfig

BELIEFS = [(1.0, 1.0), (0.5, 0.5), (7.0, 2.0), (0.1, 30.0)]
CASES = [(0, 0), (1, 0), (0, 1), (3, 0), (0, 4), (2, 1)]


@pytest.mark.parametrize("belief", BELIEFS)
@pytest.mark.parametrize(("successes", "failures"), CASES)
@pytest.mark.parametrize("left", range(6))
def test_the_chance_is_the_sum_over_all_that_the_others_may_do(
    belief: tuple[float, float], successes: int, failures: int, left: int
) -> None:
    """Each outcome in turn, from Polya's urn, in exact arithmetic."""
    informs = Fraction(0)
    for outcomes in itertools.product((True, False), repeat=left):
        a, b = Fraction(belief[0]) + successes, Fraction(belief[1]) + failures
        probability = Fraction(1)
        for success in outcomes:
            probability *= (a if success else b) / (a + b)
            a, b = a + success, b + (not success)
        succeeded = successes + sum(outcomes)
        if 0 < succeeded < successes + failures + left:
            informs += probability
    assert chance_to_inform(belief, successes, failures, left) == pytest.approx(float(informs), abs=1e-12)


@pytest.mark.parametrize(("successes", "failures"), [(0, 0), (3, 0), (0, 2)])
def test_the_chance_is_how_often_drawn_groups_inform(successes: int, failures: int) -> None:
    draw, trials, left = random.Random(7), 40_000, 4
    informed = 0
    for _ in range(trials):
        rate = draw.betavariate(2.0 + successes, 3.0 + failures)
        more = sum(draw.random() < rate for _ in range(left))
        informed += 0 < successes + more < successes + failures + left
    # Four standard deviations.
    assert chance_to_inform((2.0, 3.0), successes, failures, left) == pytest.approx(
        informed / trials, abs=4 * 0.5 / trials**0.5
    )


@pytest.mark.parametrize(
    ("belief", "successes", "failures", "left", "chance"),
    [
        ((1, 1), 3, 0, 1, 1 / 5),
        ((1, 1), 0, 2, 2, 1 - 3 / 4 * 4 / 5),
        ((9, 1), 7, 0, 1, 1 / 17),
        ((9, 1), 7, 1, 0, 1.0),
        ((9, 1), 8, 0, 0, 0.0),
        ((9, 1), 0, 0, 1, 0.0),
        ((9, 1), 0, 0, 0, 0.0),
    ],
)
def test_chances_by_hand(
    belief: tuple[float, float], successes: int, failures: int, left: int, chance: float
) -> None:
    assert chance_to_inform(belief, successes, failures, left) == pytest.approx(chance)


def curriculum(**early_stop: Any) -> CurriculumConfig:
    return CurriculumConfig.model_validate({"enabled": True, "early_stop": early_stop})


def test_a_group_is_given_up_when_its_chance_falls_below_what_is_asked() -> None:
    decide = decider(curriculum(min_informative=0.3, min_finished=2))
    # 0.4 with two left, 0.2 with one.
    assert not decide("p", [1.0, 1.0], 4, None)
    assert decide("p", [1.0, 1.0, 1.0], 4, None)
    assert decide("p", [0.0, 0.0, 0.0], 4, 3)
    assert decide("p", [1.0, 1.0], 3, None), "a member whose infrastructure failed is none of the others"


def test_no_group_is_given_up_before_enough_of_it_has_ended() -> None:
    decide = decider(curriculum(min_informative=1.0, min_finished=3))
    assert not decide("p", [1.0, 1.0], 8, None)
    assert decide("p", [1.0, 1.0, 1.0], 8, None)


def test_a_group_whose_rewards_differ_informs() -> None:
    decide = decider(curriculum(min_informative=1.0, min_finished=1))
    assert not decide("p", [1.0, 0.0], 8, None)
    assert not decide("p", [1.0, 0.75], 8, None), "both successes, and still of use to the trainer"


def test_what_is_known_of_the_prompt_counts() -> None:
    known = {"easy": (40.0, 1.0), "mixed": (20.0, 20.0)}
    decide = decider(curriculum(min_informative=0.5, min_finished=1), known.__getitem__)
    assert decide("easy", [1.0], 8, None)
    assert not decide("mixed", [1.0], 8, None)
    assert not decide("easy", [0.0], 8, None), "what is left will succeed"


def test_nobody_decides_where_no_group_is_to_be_given_up() -> None:
    assert decider(curriculum()) is None
    assert decider(CurriculumConfig.model_validate({"early_stop": {"min_informative": 0.5}})) is None, (
        "the curriculum is not enabled"
    )


@pytest.mark.parametrize(
    ("ended", "stopped", "saved"),
    [([100, 200], [0, 50], 250.0), ([100], [300, 40], 60.0), ([100], [], 0.0), ([], [0], 0.0)],
)
def test_what_was_stopped_would_have_taken_what_the_others_took(
    ended: list[int], stopped: list[int], saved: float
) -> None:
    assert tokens_saved(ended, stopped) == saved
