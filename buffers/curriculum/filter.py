"""After the rollout: whether a group is trained on, and what gives way before a step would never end."""

from collections.abc import Sequence
from dataclasses import dataclass

from midstream.conf.schema.curriculum import CurriculumConfig


@dataclass(frozen=True)
class Verdict:
    """Whether a group is trained on; if not, why, in a word for a metric's name."""

    keep: bool
    reason: str | None = None


class Filter:
    """Of one step: how many groups were kept and dropped in it.

    What gives way, in this order, each after `relax_after` dropped groups for each that the step needs: the band of
    pass rates opens until only equal rewards are dropped; then these are kept as well.
    """

    def __init__(self, groups_per_step: int) -> None:
        """`groups_per_step` is how many groups a step trains on."""
        self._needed = groups_per_step
        self.dropped = 0

    def begin_step(self) -> None:
        """Everything is as strict as it is set."""
        self.dropped = 0

    def relaxed(self, config: CurriculumConfig) -> int:
        """How many things have given way."""
        return min(2, self.dropped // (config.filter.relax_after * self._needed))

    def keeps_equal(self, config: CurriculumConfig) -> bool:
        """Whether groups are trained on though their rewards are all equal."""
        return config.filter.zero_variance == "keep" or self.relaxed(config) >= 2

    def judge(self, rewards: Sequence[float], config: CurriculumConfig, *, stopped: bool = False) -> Verdict:
        """Of the rewards of those members that count, which may be none; `stopped` says that the rest was given up."""
        verdict = self._judged(rewards, config, stopped=stopped)
        # Of infrastructure that fails no setting can give way.
        self.dropped += bool(rewards) and not verdict.keep
        return verdict

    def _judged(self, rewards: Sequence[float], config: CurriculumConfig, *, stopped: bool) -> Verdict:
        # Nothing of a group that failed can be trained on.
        if not rewards:
            return Verdict(False, "failed")
        relaxed, rules = self.relaxed(config), config.filter
        if are_equal(rewards, config):
            if stopped:
                return Verdict(False, "stopped")
            keep = self.keeps_equal(config)
            return Verdict(keep, None if keep else f"all_{rewards[0]:g}")
        if relaxed >= 1 or (rules.low == 0 and rules.high == 1):
            return Verdict(True)
        rate = pass_rate(rewards, config)
        if rate <= rules.low:
            return Verdict(False, "below_band")
        if rate >= rules.high:
            return Verdict(False, "above_band")
        return Verdict(True)


def are_equal(rewards: Sequence[float], config: CurriculumConfig) -> bool:
    """Whether rewards of a group are all equal, so that it has no advantages."""
    return max(rewards) - min(rewards) <= config.outcome.spread


def successes(rewards: Sequence[float], config: CurriculumConfig) -> int:
    """How many rewards are successes."""
    return sum(reward > config.outcome.threshold for reward in rewards)


def pass_rate(rewards: Sequence[float], config: CurriculumConfig) -> float:
    """The share of rewards that are successes."""
    return successes(rewards, config) / len(rewards)
