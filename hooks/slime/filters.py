"""Which groups are trained on, and what is learnt from all of them.

``--dynamic-sampling-filter-path midstream.hooks.slime.filters.informative``
``--rollout-all-samples-process-path midstream.hooks.slime.filters.observe_all``
"""

from argparse import Namespace
from typing import Any

from midstream.hooks.slime.host import host_of
from midstream.hooks.slime.outcomes import rewards_of
from midstream.hooks.slime.sample import Group, samples_of
from midstream.hooks.slime.settings import curriculum_of

_EQUAL = 1e-8


def informative(args: Namespace, group: Group, **_: Any) -> Any:
    """Keep a group whose rewards are not all equal: only such a group has advantages (DAPO).

    Members that failed for reasons of infrastructure do not count, nor do those that were stopped when their group
    was given up; a group of nothing else is dropped. With a curriculum, what it is set to keep is kept, and it learns
    from every group.
    """
    output = host_of(next(samples_of(group))).load("filters", "DynamicFilterOutput")
    curriculum = curriculum_of(args)
    if curriculum is not None:
        curriculum.observe(group)
        verdict = curriculum.judge(group)
        return output(keep=verdict.keep, reason=verdict.reason)
    rewards = rewards_of(args, group)
    if not rewards:
        return output(keep=False, reason="failed")
    if max(rewards) - min(rewards) > _EQUAL:
        return output(keep=True)
    return output(keep=False, reason=f"all_{rewards[0]:g}")


def observe_all(args: Namespace, groups: list[Group], data_source: Any) -> None:
    """Let the curriculum learn from all groups that ended in a step, whatever filter a job has."""
    curriculum = curriculum_of(args)
    if curriculum is not None:
        for group in groups:
            curriculum.observe(group)
