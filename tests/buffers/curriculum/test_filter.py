"""Which groups are trained on, and what gives way before a step would never end."""

import pytest

from midstream.buffers.curriculum.filter import Filter
from midstream.conf.schema.curriculum import CurriculumConfig


def config(**rules: object) -> CurriculumConfig:
    return CurriculumConfig.model_validate({"enabled": True, "filter": rules})


@pytest.mark.parametrize(
    ("rewards", "rules", "reason"),
    [
        ([1.0, 0.0], {}, None),
        ([1.0, 1.0], {}, "all_1"),
        ([0.25, 0.25], {}, "all_0.25"),
        ([], {}, "failed"),
        ([1.0, 1.0], {"zero_variance": "keep"}, None),
        ([], {"zero_variance": "keep"}, "failed"),
        ([1.0, 0.0, 0.0, 0.0], {"low": 0.25}, "below_band"),
        ([1.0, 1.0, 0.0, 0.0], {"low": 0.25}, None),
        ([1.0, 1.0, 1.0, 0.0], {"high": 0.75}, "above_band"),
        # Rewards of several values: what is above the threshold is a success, and all of them differ.
        ([0.1, 0.2], {}, None),
    ],
)
def test_groups_are_judged_by_their_rewards(
    rewards: list[float], rules: dict[str, object], reason: str | None
) -> None:
    verdict = Filter(4).judge(rewards, config(**rules))
    assert (verdict.keep, verdict.reason) == (reason is None, reason)


def test_a_step_gives_way_in_the_stated_order_and_the_next_is_strict_again() -> None:
    rules = config(low=0.5, relax_after=2)
    filter_ = Filter(groups_per_step=2)
    hard, equal = [1.0, 0.0, 0.0], [0.0, 0.0]
    assert [filter_.judge(hard, rules).keep for _ in range(5)] == [False] * 4 + [True]
    assert [filter_.judge(equal, rules).keep for _ in range(5)] == [False] * 4 + [True]
    assert not filter_.judge([], rules).keep
    filter_.begin_step()
    assert not filter_.judge(hard, rules).keep and not filter_.judge(equal, rules).keep


def test_groups_that_failed_give_no_reason_to_give_way() -> None:
    filter_ = Filter(groups_per_step=1)
    assert not any(filter_.judge([], config(relax_after=1)).keep for _ in range(20))
    assert filter_.relaxed(config(relax_after=1)) == 0
