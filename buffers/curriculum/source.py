"""A source of prompts: how much of its past counts, what is believed of a prompt of it, and how surprising it is."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.buffers.curriculum.posterior import log_likelihood
from midstream.buffers.curriculum.prior import Prior
from midstream.conf.schema.curriculum import ForgetConfig

Numbers = float | NDArray[Any]

# In nats: no single group says more than this, for a prompt may change alone.
_MOST = 2.0
# In nats: of what is older, less than a billionth counts. A clock that ran further would soon be too coarse.
_NOTHING_LEFT = 21.0
# Of a group's size, as much must be known of its prompt before anything of it can surprise.
_LEAST = 0.5


@dataclass
class Source:
    """Time is in nats of forgetting: what was noted a time t ago counts exp(-t), and nothing in a new era.

    Surprise is a cumulative sum (Page 1954) of the log-likelihood ratio of each group's rewards, between knowing
    nothing, Beta(1, 1), and what is believed of its prompt. Where it was last zero the change is most likely to have
    happened: `since` is of the groups after that, and becomes the prior of the new era.
    """

    prior: Prior = field(default_factory=Prior)
    since: Prior = field(default_factory=Prior)
    era: int = 0
    time: float = 0.0
    surprise: float = 0.0
    version: int | None = None

    def advance(self, version: int, forget: ForgetConfig) -> None:
        """Let the policy come to a version; going back is no time."""
        if self.version is not None and version > self.version and forget.half_life is not None:
            passed = min((version - self.version) * math.log(2) / forget.half_life, _NOTHING_LEFT)
            self.time += passed
            self.prior.scale(math.exp(-passed))
        self.version = version if self.version is None else max(self.version, version)

    def remembered(
        self, successes: Numbers, failures: Numbers, noted_at: Numbers, era: Numbers
    ) -> tuple[Numbers, Numbers]:
        """What counts of the successes and failures that were noted of a prompt, or of each of many."""
        kept = np.exp(noted_at - self.time) * (era == self.era)
        return successes * kept, failures * kept

    def observe(
        self, successes: float, failures: float, known: tuple[float, float], forget: ForgetConfig
    ) -> bool:
        """A group's outcome, and the successes and failures that were remembered of its prompt.

        Returns whether it was one surprise too many, so that most of what was known is forgotten.
        """
        size = successes + failures
        evidence = known[0] + known[1]
        self.prior.observe(successes / size, max(1, round(size)), size / (size + evidence))
        if forget.surprise is None or evidence < _LEAST * size:
            return False
        a, b = self.prior.beta()
        expected = log_likelihood(successes, failures, a + known[0], b + known[1])
        forgotten = log_likelihood(successes, failures, 1, 1)
        self.surprise = max(0.0, self.surprise + min(forgotten - expected, _MOST))
        if self.surprise == 0:
            self.since = Prior()
            return False
        self.since.observe(successes / size, max(1, round(size)), 1.0)
        if self.surprise <= forget.surprise:
            return False
        self.era += 1
        self.prior, self.since, self.surprise = self.since, Prior(), 0.0
        return True
