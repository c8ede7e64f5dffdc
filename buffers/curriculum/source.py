"""A source of prompts: how much of its past counts, what is believed of a prompt of it, and how surprising it is."""

import math
from dataclasses import dataclass, field

from midstream.buffers.curriculum.posterior import log_likelihood
from midstream.buffers.curriculum.prior import Prior
from midstream.conf.schema.curriculum import ForgetConfig

# After a surprise that much of what was known counts.
_LEFT = 1 / 16
# In nats: no single group says more than this, for a prompt may change alone.
_MOST = 2.0


@dataclass
class Source:
    """Time is in nats of forgetting: what was noted a time t ago counts exp(-t).

    Surprise is a cumulative sum (Page 1954) of the log-likelihood ratio of each group's rewards, between what was
    known of its prompt when all but a little is forgotten, its source included, and what is known. Where it was last
    zero the change is most likely to have happened: `since` is of the groups after that, and becomes the prior.
    """

    prior: Prior = field(default_factory=Prior)
    since: Prior = field(default_factory=Prior)
    time: float = 0.0
    surprise: float = 0.0
    version: int | None = None

    def advance(self, version: int, forget: ForgetConfig) -> None:
        """Let the policy come to a version; going back is no time."""
        if self.version is not None and version > self.version and forget.half_life is not None:
            self._pass_time((version - self.version) * math.log(2) / forget.half_life)
        self.version = version if self.version is None else max(self.version, version)

    def kept(self, noted_at: float) -> float:
        """The share that counts of what was noted then."""
        return math.exp(noted_at - self.time)

    def observe(
        self, successes: float, failures: float, known: tuple[float, float], forget: ForgetConfig
    ) -> bool:
        """A group's outcome, and the successes and failures that were remembered of its prompt.

        Returns whether it was one surprise too many, so that most of what was known is forgotten.
        """
        size = successes + failures
        evidence = known[0] + known[1]
        self.prior.observe(successes / size, max(1, round(size)), size / (size + evidence))
        if forget.surprise is None or evidence < size:
            return False
        a, b = self.prior.beta()
        expected = log_likelihood(successes, failures, a + known[0], b + known[1])
        forgotten = log_likelihood(successes, failures, 1 + known[0] * _LEFT, 1 + known[1] * _LEFT)
        self.surprise = max(0.0, self.surprise + min(forgotten - expected, _MOST))
        if self.surprise == 0:
            self.since = Prior()
            return False
        self.since.observe(successes / size, max(1, round(size)), 1.0)
        if self.surprise <= forget.surprise:
            return False
        self._pass_time(-math.log(_LEFT))
        self.prior, self.since, self.surprise = self.since, Prior(), 0.0
        return True

    def _pass_time(self, time: float) -> None:
        self.time += time
        self.prior.scale(math.exp(-time))
