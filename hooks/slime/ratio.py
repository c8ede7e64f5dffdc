"""The log-ratio of groups that are on their way, measured when the first of their members arrives."""

import functools
import logging
from argparse import Namespace
from typing import Any

from midstream.buffers.policies.base import Policy, goes_on
from midstream.buffers.waiting import Decide
from midstream.hooks.engine import EngineRejected, EngineUnavailable
from midstream.hooks.ratio import Shared, mean_squared_log_ratio
from midstream.hooks.slime.host import host_of
from midstream.hooks.slime.sample import Group, recorded_rollout, routing_key, samples_of
from midstream.hooks.slime.settings import engine_of, policy_of

_logger = logging.getLogger(__name__)


def measurements_of(args: Namespace) -> "Measurements":
    """What is to be measured in this process, under this job's policy."""
    return _measurements(policy_of(args))


class Measurements:
    """Groups whose log-ratio decides, each before the first of its members plays on.

    The members that arrive later wait for that, each in the slot that it has: the measurement needs none.
    """

    def __init__(self) -> None:
        self._groups: dict[Any, tuple[Group, Decide, Shared]] = {}

    def expect(self, args: Namespace, group: Group, decide: Decide | None) -> None:
        """The group is on its way; ``decide`` takes its log-ratio, None where nobody asks for it."""
        key = _key(group)
        self._groups.pop(key, None)
        if decide is None:
            return
        temperature = getattr(args, "rollout_temperature", 1.0)
        if temperature != 1:
            _say_that_temperature_differs(temperature)
            return
        self._groups[key] = (group, decide, Shared(functools.partial(self._measure, args, key)))

    async def settle(self, sample: Any) -> None:
        """Return when nothing is left to be decided about the group of ``sample``."""
        group, _, shared = self._groups.get(sample.group_index, ([], None, None))
        if shared is not None and any(member is sample for member in samples_of(group)):
            await shared.done()

    async def _measure(self, args: Namespace, key: Any) -> None:
        group, decide, _ = self._groups[key]
        samples = list(samples_of(group))
        state = host_of(samples[0]).generate_state(args)
        known = [(sample, recorded_rollout(sample)) for sample in samples]
        open_ = [(sample, rollout) for sample, rollout in known if rollout is not None and goes_on(rollout)]
        try:
            log_ratio = await mean_squared_log_ratio(
                engine_of(args),
                [rollout for _, rollout in open_],
                [routing_key(args, sample) for sample, _ in open_],
                lambda: state.aborted,
            )
        except (EngineUnavailable, EngineRejected) as error:
            _logger.warning("group %s goes on by its lag alone, its log-ratio is unknown: %s", key, error)
            log_ratio = None
        else:
            if log_ratio is None and not state.aborted:
                _logger.warning("group %s goes on by its lag alone: its measurement was aborted", key)
        if log_ratio is not None:
            decide(log_ratio)
        self._groups.pop(key, None)


def _key(group: Group) -> Any:
    return next(samples_of(group)).group_index


@functools.cache
def _say_that_temperature_differs(temperature: float) -> None:
    _logger.warning(
        "--rollout-temperature is %g, and the engine measures log-ratios at 1: midstream.policies.ladder.max_log_ratio"
        " is ignored, groups go on by their lag alone",
        temperature,
    )


@functools.cache
def _measurements(policy: Policy) -> Measurements:
    return Measurements()
