"""Every estimator against an example computed by hand."""

import dataclasses
from fractions import Fraction

import pytest
import torch

from midstream.buffers.rollout import Anchor
from midstream.conf.schema.credit import CreditConfig
from midstream.hooks.credit.batch import NONE, CreditBatch, per_token
from midstream.hooks.credit.estimates import estimates_of
from midstream.hooks.credit.estimators.anchored import anchored, anchored_shrunk, telescoped
from midstream.hooks.credit.estimators.grpo import grpo
from midstream.hooks.credit.estimators.lag_decay import lag_decay
from midstream.hooks.credit.estimators.mask_prefix import mask_prefix
from midstream.hooks.credit.estimators.prefix_is import prefix_is
from midstream.hooks.credit.estimators.state_hash import state_hash
from midstream.hooks.credit.prior import prior_of, share_of_state
from midstream.hooks.credit.ratios import prefix_products
from midstream.hooks.credit.segments import Earned, Segment, batch_of

PREFIX = Segment(2, version=3, shared=True, state="start")
INHERITED = Segment(2, version=3, shared=True, inherited=True, state="start")
SUFFIX = Segment(1, version=5, state="half", at_snapshot=True)


def alone(reward: float, *, group: str = "g", counted: bool = True, state: str = "end") -> Earned:
    return Earned(
        group, reward, counted, None, [Segment(4, version=5, state="start"), Segment(1, 5, state=state)]
    )


def fork(reward: float, *, group: str = "g", owner: bool = False, counted: bool = True) -> Earned:
    return Earned(group, reward, counted, Anchor("half", 2), [PREFIX if owner else INHERITED, SUFFIX])


def group(name: str = "g") -> list[Earned]:
    """Two that were played on their own, and three continuations of one state."""
    return [
        alone(1, group=name),
        alone(0, group=name),
        fork(1, group=name, owner=True),
        fork(1, group=name),
        fork(0, group=name),
    ]


def values(batch: CreditBatch, advantages: torch.Tensor) -> list[list[float]]:
    """By rollout, one for each of its two segments."""
    assert len(advantages) == 2 * len(batch.rewards)
    return advantages.reshape(-1, 2).tolist()


def nearly(expected: list[list[float]]) -> object:
    """What equals lists of lists of nearly these numbers."""
    return [pytest.approx(row) for row in expected]


def test_grpo_is_the_reward_above_the_mean_of_the_counted_in_its_group():
    batch = batch_of([*group(), alone(9, counted=False), alone(3, group="h")])
    mean = 3 / 5
    expected = [[reward - mean] * 2 for reward in (1, 0, 1, 1, 0)] + [[0, 0], [0, 0]]
    assert values(batch, grpo(batch).advantages) == nearly(expected)
    # Squares of the distances: 2 x 0.36 + 3 x 0.16 = 1.2, over n - 1 = 4.
    scaled = values(batch, grpo(batch, normalise=True).advantages)
    assert scaled[0][0] == pytest.approx(0.4 / (0.3**0.5 + 1e-6), abs=1e-12)
    assert scaled[-1] == [0, 0], "a group of one is not divided"


def test_anchored_compares_continuations_with_each_other_and_their_prefix_with_strangers():
    batch = batch_of(group())
    credit = anchored(batch)
    # Of the anchor 2/3, of the strangers 1/2; the prefix counts for three continuations.
    prefix = 3 * (2 / 3 - 1 / 2)
    assert values(batch, credit.advantages) == nearly(
        [
            [1 - 2 / 4] * 2,  # others: 0, 1, 1, 0
            [0 - 3 / 4] * 2,
            [prefix, 1 - 1 / 2],
            [prefix, 1 - 1 / 2],
            [prefix, 0 - 1],
        ]
    )
    assert credit.trained.all()
    assert credit.fallbacks == {"without_continuations": 0, "without_strangers": 0, "without_baseline": 0}


def test_each_part_of_a_prefix_counts_for_all_who_went_on_from_its_end():
    """Forked after 2 tokens; one ended, and the others were forked again after 4, from one that had begun as a fork."""
    first, second = Anchor("half", 2), Anchor("late", 4)
    middle = Segment(2, version=5, shared=True, state="half", at_snapshot=True)
    last = Segment(1, version=6, state="late", at_snapshot=True)
    inherits = dataclasses.replace(middle, inherited=True)
    through = frozenset({first, second})
    batch = batch_of(
        [
            alone(1),
            alone(0),
            Earned("g", 0.0, True, first, [INHERITED, SUFFIX], frozenset({first})),
            Earned("g", 1.0, True, second, [PREFIX, inherits, last], through),
            Earned("g", 1.0, True, second, [INHERITED, middle, last], through),
            Earned("g", 0.0, True, second, [INHERITED, inherits, last], through),
        ]
    )
    assert batch.families.tolist() == [NONE, NONE, 0, 0, 0, 0]
    advantages = anchored(batch).advantages.tolist()
    assert advantages[6:9] == pytest.approx(
        [
            4 * (2 / 4 - 1 / 2),  # before the first fork: all four went on from its end
            3 * (2 / 3 - 1 / 2),  # between the two: three
            1 - 1 / 2,
        ]
    )
    # Who ended between the forks is compared with all others that went on from where it did.
    assert advantages[4:6] == pytest.approx([4 * (2 / 4 - 1 / 2), 0 - 2 / 3])


def test_what_has_failed_is_in_no_mean_and_gets_nothing():
    batch = batch_of([*group()[:4], fork(0, counted=False)])
    assert values(batch, anchored(batch).advantages)[2:] == [
        [2 * (1 - 1 / 2), 0],
        [2 * (1 - 1 / 2), 0],
        [0, 0],
    ]


def test_a_family_without_strangers_teaches_by_its_suffixes_alone():
    batch = batch_of([fork(1, owner=True), fork(0)])
    credit = anchored(batch)
    assert values(batch, credit.advantages) == [[0, 1], [0, -1]]
    assert credit.fallbacks == {"without_continuations": 0, "without_strangers": 2, "without_baseline": 0}


def test_a_continuation_that_is_alone_is_compared_with_the_strangers():
    batch = batch_of([alone(1), alone(0), fork(1, owner=True)])
    credit = anchored(batch)
    assert values(batch, credit.advantages)[2] == [1 - 1 / 2, 1 - 1 / 2]
    assert credit.fallbacks["without_continuations"] == 1
    batch = batch_of([fork(1, owner=True)])
    assert values(batch, anchored(batch).advantages) == [[0, 0]], "nothing to compare with"
    assert anchored(batch).fallbacks["without_baseline"] == 1


def test_a_group_of_one_teaches_nothing():
    batch = batch_of([alone(1), alone(0, group="h"), alone(1, group="h")])
    for estimator in (grpo, anchored, anchored_shrunk, telescoped, state_hash):
        advantages = values(batch, estimator(batch).advantages)
        assert advantages[0] == [0, 0]
        assert advantages[1][0] < 0 < advantages[2][0]


def test_telescoped_trains_who_made_the_prefix_and_takes_the_probes_out():
    batch = batch_of(group())
    credit = telescoped(batch)
    advantages = values(batch, credit.advantages)
    assert advantages[2] == pytest.approx([2 / 3 - 1 / 2, 1 - 1 / 2])
    assert credit.trained.reshape(-1, 2).all(dim=1).tolist() == [True, True, True, False, False]


def test_anchored_shrunk_learns_its_share_from_the_other_groups():
    """Of group h: three continuations with rewards 1, 1, 0, and strangers of 1/2."""
    rewards = {"g": (1, 0, 1, 1, 0), "h": (1, 0, 0, 0, 1)}
    batch = batch_of(
        [
            *group("g"),
            *(alone(reward, group="h") for reward in (1, 0)),
            fork(0, group="h", owner=True),
            fork(0, group="h"),
            fork(1, group="h"),
        ]
    )
    assert batch.rewards.tolist() == [*rewards["g"], *rewards["h"]]
    # For g, from h: squares 4/9 + 1/9 + 1/9 over 2; gap (1/3 - 1/2)^2 less s2 / 3: below 0, so nothing is known of
    # states apart from their prompt, and the baseline is the strangers' alone.
    advantages = values(batch, anchored_shrunk(batch).advantages)
    assert [a[1] for a in advantages[2:5]] == pytest.approx([1 - 1 / 2, 1 - 1 / 2, 0 - 1 / 2])


def test_the_share_of_a_state_is_that_of_its_variance():
    others = [
        alone(0, group="h"),
        alone(0, group="h"),
        fork(1, group="h", owner=True),
        fork(1, group="h"),
        fork(0, group="h"),
    ]
    batch = batch_of([*group(), *others])
    within = Fraction(1, 3)  # (1/9 + 1/9 + 4/9) / 2
    between = Fraction(2, 3) ** 2 - within / 3
    share = between / (between + within / 2)
    baseline = [share * mean + (1 - share) * Fraction(1, 2) for mean in (Fraction(1, 2), Fraction(1, 2), 1)]
    expected = [float(reward - b) for reward, b in zip((1, 1, 0), baseline, strict=True)]
    assert [a[1] for a in values(batch, anchored_shrunk(batch).advantages)[2:5]] == pytest.approx(expected)


def elsewhere() -> list[Earned]:
    """Eight groups: where strangers fail continuations succeed in 1 of 3, where strangers succeed in 2 of 3."""
    found = []
    for name, strangers, continuations in (("low", 0, (1, 0, 0)), ("high", 1, (1, 1, 0))):
        for number in range(4):
            key = f"{name}-{number}"
            found += [alone(strangers, group=key)] * 2
            found += [fork(each, group=key, owner=index == 0) for index, each in enumerate(continuations)]
    return found


def test_anchored_shrunk_learns_from_other_groups_what_strangers_say_about_a_prompt():
    own = [alone(0), alone(0), fork(1, owner=True), fork(1), fork(0)]
    batch = batch_of([*own, *elsewhere()])
    advantages = values(batch, anchored_shrunk(batch).advantages)
    # The line is 1/3 + x / 3, and 1/3 where the strangers have failed. No anchor is off it: states say nothing more.
    assert advantages[2] == pytest.approx([3 * (2 / 3 - 1 / 3), 1 - 1 / 3])
    assert advantages[4][1] == pytest.approx(0 - 1 / 3)
    assert advantages[:2] == nearly([[0 - 2 / 4] * 2] * 2), "who is alone is compared with the siblings"
    few = batch_of([*own, *elsewhere()[5:]])
    assert values(few, anchored_shrunk(few).advantages)[2][0] == pytest.approx(3 * 2 / 3), "seven are too few"


def test_anchored_shrunk_compares_a_prefix_without_strangers_with_other_groups():
    batch = batch_of([fork(1, owner=True), fork(0), *elsewhere()])
    assert values(batch, anchored_shrunk(batch).advantages)[0][0] == pytest.approx(2 * (1 / 2 - 1 / 2))
    batch = batch_of([fork(1, owner=True), fork(1), *elsewhere()])
    assert values(batch, anchored_shrunk(batch).advantages)[0][0] == pytest.approx(2 * (1 - 1 / 2))


def test_no_rollout_has_a_part_in_what_it_is_compared_with():
    batch = batch_of([*group(), *elsewhere()])
    plain = prior_of(batch)
    rewards = batch.rewards.clone()
    rewards[2:5] = torch.tensor([0.0, 7.0, -3.0])
    changed = dataclasses.replace(batch, rewards=rewards)
    other = prior_of(changed)
    shares = share_of_state(batch, plain), share_of_state(changed, other)
    means, gaps = (plain.prompt.mean, other.prompt.mean), (plain.gap, other.gap)
    for one, another in (shares, means, gaps):
        torch.testing.assert_close(one[2:5], another[2:5])
    for one, another in (means, gaps):
        assert not torch.allclose(one[5:], another[5:]), "the other groups learn from it"


def test_one_group_alone_is_not_shrunk():
    batch = batch_of(group())
    assert torch.equal(anchored_shrunk(batch).advantages, anchored(batch).advantages)


def scaled(of_g: float, of_others: float) -> list[float]:
    """What `anchored_shrunk` gives the suffixes of group g, in units of `of_g`, with rewards of these sizes."""
    rollouts = [dataclasses.replace(each, reward=each.reward * of_g) for each in group()]
    for name, rewards in {"h": (0, 0, 1, 1, 0), "i": (1, 0, 1, 0, 1)}.items():
        of_other = [*map(alone, rewards[:2]), fork(rewards[2], owner=True), *map(fork, rewards[3:])]
        rollouts += [
            dataclasses.replace(each, group=name, reward=each.reward * of_others) for each in of_other
        ]
    batch = batch_of(rollouts)
    return [each[1] / of_g for each in values(batch, anchored_shrunk(batch).advantages)[2:5]]


@pytest.mark.parametrize(("of_g", "of_others"), [(1e9, 1e-3), (1e-9, 1e-9), (1e6, 1e6)])
def test_the_share_of_a_state_is_of_no_scale_and_keeps_nothing_of_its_own_group(
    of_g: float, of_others: float
):
    assert scaled(1, 1) != pytest.approx([1 / 2, 1 / 2, -1]), "it is not all the state's"
    assert scaled(of_g, of_others) == pytest.approx(scaled(1, 1))


def test_state_hash_compares_those_who_acted_in_one_state():
    batch = batch_of([alone(1, state="a"), alone(0, state="a"), alone(1, state="a"), alone(0, state="b")])
    advantages = values(batch, state_hash(batch).advantages)
    assert advantages == nearly(
        [
            [1 - 1 / 3, 1 - 1 / 2],  # at the start the others of the group, in state a the two others there
            [0 - 2 / 3, 0 - 1],
            [1 - 1 / 3, 1 - 1 / 2],
            [0 - 2 / 3, 0 - 2 / 3],  # nobody else was in state b
        ]
    )


def test_state_hash_leaves_a_family_out_of_what_it_has_in_common():
    batch = batch_of([alone(1), fork(1, owner=True), fork(0), fork(0)])
    advantages = values(batch, state_hash(batch).advantages)
    # At the start: the family's mean of 1/3, for three, against the one stranger who was there.
    assert advantages[1][0] == pytest.approx(3 * (1 / 3 - 1))
    assert [a[1] for a in advantages[1:]] == [1, -1 / 2, -1 / 2], (
        "in the state of the anchor the other continuations"
    )
    assert advantages[0][0] == pytest.approx(1 - 1 / 3)


def test_a_state_that_a_rollout_was_in_twice_counts_once():
    twice = Earned("g", 1.0, True, None, [Segment(1, 5, state="a"), Segment(1, 5, state="a")])
    batch = batch_of([twice, alone(0, state="a"), alone(0, state="a")])
    assert state_hash(batch).advantages[:2].tolist() == [1, 1]
    assert state_hash(batch).advantages[3] == pytest.approx(0 - 1 / 2), "one of them 1, the other 0"


def test_groups_do_not_share_states():
    batch = batch_of([alone(1, state="a"), alone(0, state="b"), alone(0, group="h", state="a")])
    assert state_hash(batch).advantages.tolist() == [1, 1, -1, -1, 0, 0]


def test_mask_prefix_spares_what_one_version_made():
    old = Earned("g", 1.0, True, None, [Segment(3, version=1), Segment(1), Segment(3, version=1)])
    resumed = Earned("g", 1.0, True, None, [Segment(3, version=1), Segment(1), Segment(3, version=4)])
    assert mask_prefix(batch_of([old, resumed])).tolist() == [True] * 3 + [False, True, True]


def test_lag_decay_has_a_rate_for_each_level():
    segment = Segment(3, version=1, lags=(5.0, 2.0, 0.5))
    batch = batch_of([Earned("g", 1.0, True, None, [segment])])
    rates = torch.tensor([0.1, 0.2, 0.4], dtype=torch.float64)
    assert lag_decay(batch, rates).item() == pytest.approx(2.718281828459045**-1.1)


def test_prefix_is_multiplies_the_ratios_of_what_came_before():
    rollouts = torch.tensor([0, 0, 0, 2, 2])
    log_ratios = torch.tensor([2.0, 0.5, 3.0, 4.0, 1.0], dtype=torch.float64).log()
    assert prefix_products(log_ratios, rollouts).exp().tolist() == pytest.approx([1, 2, 1, 1, 4])


def test_prefix_is_multiplies_the_ratios_of_all_other_tokens():
    log_ratios = torch.tensor([2.0, 0.5, 1.0, 4.0, 3.0], dtype=torch.float64).log()
    totals = torch.tensor([1.0, 1.0, 1.0, 12.0, 12.0], dtype=torch.float64).log()
    assert prefix_is(log_ratios, totals, 3.5).tolist() == pytest.approx([0.5, 2, 1, 3, 3.5])


def test_estimators_compose_and_are_scaled_by_one_deviation_for_the_batch():
    batch = batch_of([*group(), alone(1, group="h"), alone(0, group="h")])
    config = CreditConfig(estimators=["anchored", "mask_prefix", "lag_decay"])
    found = estimates_of(batch, config, normalise=True)
    # Squares within groups 1.2 and 0.5, over 7 - 2: all groups differ.
    assert found.advantages is not None
    assert found.advantages.tolist() == pytest.approx(
        (anchored(batch).advantages / ((1.7 / 5) ** 0.5 + 1e-6)).tolist()
    )
    assert torch.equal(found.trained, mask_prefix(batch))
    assert found.weights is not None
    plain = estimates_of(batch, CreditConfig(estimators=["grpo"]), normalise=False)
    assert (plain.advantages, plain.weights) == (None, None)
    assert per_token(plain.group[batch.rollouts], batch.lengths).tolist() == pytest.approx(
        per_token(grpo(batch).advantages, batch.lengths).tolist()
    )


def test_groups_that_do_not_differ_make_no_advantage_larger():
    informative = [alone(1), alone(0)]
    same = [alone(1, group=f"g{number}") for number in range(20) for _ in range(2)]
    config = CreditConfig(estimators=["state_hash"])
    few, many = (estimates_of(batch_of([*informative, *more]), config, normalise=True) for more in ([], same))
    assert few.advantages is not None and many.advantages is not None
    assert few.advantages[:4].tolist() == pytest.approx(many.advantages[:4].tolist())


def test_rewards_that_are_all_equal_give_no_advantage_and_nothing_that_is_not_finite():
    rollouts = [alone(1), alone(1), fork(1, owner=True), fork(1), alone(0, group="h"), alone(0, group="h")]
    batch = batch_of(rollouts)
    for name in ("telescoped", "anchored", "anchored_shrunk", "state_hash"):
        found = estimates_of(batch, CreditConfig(estimators=[name]), normalise=True)
        assert found.advantages is not None
        assert found.advantages.tolist() == [0.0] * len(batch.rollouts)


def test_a_batch_without_a_token():
    for rollouts in ([], [Earned("g", 1.0, True, None, []), Earned("g", 0.0, False, None, [])]):
        batch = batch_of(rollouts)
        for estimator in (grpo, anchored, anchored_shrunk, telescoped, state_hash):
            assert estimator(batch).advantages.tolist() == []
