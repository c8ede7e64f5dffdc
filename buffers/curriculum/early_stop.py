"""When a group is given up: what its members that have ended leave of the chance that it informs."""

from collections.abc import Callable, Sequence

from midstream.buffers.curriculum.posterior import alike
from midstream.conf.schema.curriculum import CurriculumConfig

Belief = Callable[[str], tuple[float, float]]
"""Of a prompt's key, what is believed of its pass rate: the two parameters of a Beta distribution."""

Decide = Callable[[str, Sequence[float], int, int | None], bool]
"""Whether a group is given up: of its prompt's key, the rewards of its members that have ended, how many members have
ended or still may, and the policy version, None where no engine has said one."""


def nothing_known(prompt_key: str) -> tuple[float, float]:
    """Any pass rate is as likely as any other."""
    return 1.0, 1.0


def decider(curriculum: CurriculumConfig, belief: Belief = nothing_known) -> Decide | None:
    """The rule of ``curriculum.early_stop``, for rewards of two values; None where no group is given up."""
    rule = curriculum.early_stop
    if not curriculum.enabled or rule.min_informative == 0:
        return None

    def decide(prompt_key: str, rewards: Sequence[float], size: int, version: int | None) -> bool:
        if len(rewards) < rule.min_finished or max(rewards) - min(rewards) > curriculum.outcome.spread:
            return False
        successes = sum(reward > curriculum.outcome.threshold for reward in rewards)
        left = size - len(rewards)
        chance = chance_to_inform(belief(prompt_key), successes, len(rewards) - successes, left)
        return chance < rule.min_informative

    return decide


def chance_to_inform(belief: tuple[float, float], successes: int, failures: int, left: int) -> float:
    """The probability that a group has both successes and failures once its ``left`` members have ended, too.

    ``belief`` are a and b of the prompt's Beta distribution before any of this group's members ended. Of what has
    ended, s successes and f failures, it learns: the rest all succeed with probability
    prod_{i < left} (a + s + i) / (a + b + s + f + i), the beta-binomial at its end, and all fail likewise.
    """
    a, b = belief[0] + successes, belief[1] + failures
    all_succeed, all_fail = alike(a, b, left)
    # A group of nobody is alike in both ways.
    return max(0.0, 1.0 - ((failures == 0) * all_succeed + (successes == 0) * all_fail))


def tokens_saved(ended: Sequence[int], stopped: Sequence[int]) -> float:
    """An estimate of what a group would have cost beyond what it did, had it not been given up.

    Of the tokens of its members that ended, and of those that were stopped: each of these is taken to have needed as
    many as the others on average, or what it had made already where that is more.
    """
    if not ended:
        return 0.0
    mean = sum(ended) / len(ended)
    return sum(max(0.0, mean - tokens) for tokens in stopped)
