"""What is believed of a prompt of a source before anything of it is known."""

from dataclasses import dataclass

# From the start as much counts as so many groups of prompts whose pass rates are spread evenly.
_ASSUMED_GROUPS = 0.5
# A source may be nearly all of one kind, and never quite.
_MEAN = (0.02, 0.98)
# Of rates that are spread evenly.
_ASSUMED_CORRELATION = 1 / 3
# Of the intraclass correlation 1 / (1 + a + b). No prior weighs more than two rollouts: among prompts that are alike
# there may be some that are not, and these must be believed when they show it.
_CORRELATION = (_ASSUMED_CORRELATION, 0.95)


@dataclass
class Prior:
    """Beta(a, b) by moments of the pass rates of groups, which count less the more was known of their prompts.

    With m and v the mean and variance of the share of successes in groups of n, v = m (1 - m) (1 + (n - 1) r) / n
    with r = 1 / (1 + a + b), as of any beta-binomial. Sums are in any unit of weight, and lose it together, so that
    the order of groups does not matter.
    """

    weight: float = 0.0
    rate: float = 0.0
    square: float = 0.0
    inverse: float = 0.0  # of group sizes

    def observe(self, rate: float, size: int, weight: float) -> None:
        """A group of `size` had this share of successes; `weight` is 1 where nothing was known of its prompt."""
        self.weight += weight
        self.rate += weight * rate
        self.square += weight * rate**2
        self.inverse += weight / size

    def scale(self, factor: float) -> None:
        """Forget all but this share."""
        self.weight *= factor
        self.rate *= factor
        self.square *= factor
        self.inverse *= factor

    def beta(self) -> tuple[float, float]:
        """The parameters a and b."""
        known = self.weight
        weight = known + _ASSUMED_GROUPS
        inverse = self.inverse / known if known > 0 else 0.125
        mean = (self.rate + _ASSUMED_GROUPS * 0.5) / weight
        # The mean square of a rate that is as above.
        assumed = 0.25 + 0.25 * (inverse + (1 - inverse) * _ASSUMED_CORRELATION)
        variance = (self.square + _ASSUMED_GROUPS * assumed) / weight - mean**2
        mean = min(max(mean, _MEAN[0]), _MEAN[1])
        # v / (m (1 - m)) = 1 / n + (1 - 1 / n) r
        share = variance / (mean * (1 - mean))
        # Groups of one say nothing of it.
        correlation = (share - inverse) / (1 - inverse) if inverse < 1 else _ASSUMED_CORRELATION
        correlation = min(max(correlation, _CORRELATION[0]), _CORRELATION[1])
        strength = 1 / correlation - 1
        return mean * strength, (1 - mean) * strength
