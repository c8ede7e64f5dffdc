"""``--dynamic-sampling-filter-path midstream.hooks.slime.filters.informative``"""

from argparse import Namespace
from typing import Any

from midstream.hooks.slime.host import host_of
from midstream.hooks.slime.sample import Group, samples_of, was_stopped

_EQUAL = 1e-8


def informative(args: Namespace, group: Group, **_: Any) -> Any:
    """Keep a group whose rewards are not all equal: only such a group has advantages (DAPO).

    Members that failed for reasons of infrastructure do not count, nor do those that were stopped when their group
    was given up; a group of nothing else is dropped.
    """
    members = list(samples_of(group))
    rewards = [sample.get_reward_value(args) for sample in members if not sample.remove_sample]
    output = host_of(members[0]).load("filters", "DynamicFilterOutput")
    if not rewards:
        return output(keep=False, reason="failed")
    if max(rewards) - min(rewards) > _EQUAL:
        return output(keep=True)
    return output(keep=False, reason="stopped" if any(map(was_stopped, members)) else f"all_{rewards[0]:g}")
