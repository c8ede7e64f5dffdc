"""What a step did with the prompts of a source, and how well it was foreseen."""

from dataclasses import dataclass, field
from typing import Any

BINS = 10
# Of what predictions were worth, that much is left after each group.
_LEFT = 0.998


def bin_of(rate: float) -> int:
    """The tenth of [0, 1] that a rate is in."""
    return min(BINS - 1, int(rate * BINS))


@dataclass
class Calibration:
    """Predicted and observed pass rates, in tenths by what was predicted: sums, and how many groups."""

    predicted: list[float] = field(default_factory=lambda: [0.0] * BINS)
    observed: list[float] = field(default_factory=lambda: [0.0] * BINS)
    groups: list[float] = field(default_factory=lambda: [0.0] * BINS)

    def add(self, predicted: float, observed: float) -> None:
        """A group had this share of successes."""
        at = bin_of(predicted)
        self.predicted[at] += predicted
        self.observed[at] += observed
        self.groups[at] += 1

    def fade(self) -> None:
        """What is older counts less."""
        for sums in (self.predicted, self.observed, self.groups):
            sums[:] = [value * _LEFT for value in sums]

    def merge(self, other: "Calibration") -> None:
        """Add what another has seen."""
        for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True):
            mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]

    @property
    def error(self) -> float:
        """The expected calibration error: mean distance of predicted and observed rates, bins weighed by groups."""
        count = sum(self.groups)
        gaps = (abs(p - o) for p, o in zip(self.predicted, self.observed, strict=True))
        return sum(gaps) / count if count else 0.0

    @property
    def predicted_mean(self) -> float:
        """The mean pass rate that was predicted, 0 of nothing."""
        count = sum(self.groups)
        return sum(self.predicted) / count if count else 0.0

    def rows(self) -> list[list[float]]:
        """[predicted, observed, groups] of each bin."""
        return [list(row) for row in zip(self.predicted, self.observed, self.groups, strict=True)]


@dataclass
class StepTally:
    """Counts of one step, of one source.

    Attributes:
        played: groups that were begun.
        skipped: prompts that came up and were passed over.
        explored: groups of `played` that the gate would have passed over, played to look again.
        relaxed: groups of `played` for which the gate had to open.
        ended: groups that came to an end.
        informative: those of them whose rewards differ.
        failed: those of them in which no member counts.
        stopped: those of them that were given up.
        tokens_saved: what the given up would have cost beyond what they did.
        calibration: of `ended` less those that failed or were given up.
    """

    played: int = 0
    skipped: int = 0
    explored: int = 0
    relaxed: int = 0
    ended: int = 0
    informative: int = 0
    failed: int = 0
    stopped: int = 0
    tokens_saved: float = 0.0
    calibration: Calibration = field(default_factory=Calibration)

    def metrics(self, lasting: Calibration) -> dict[str, float]:
        """For the host's log, without the source; `lasting` is the calibration over many steps."""
        counted = self.ended - self.failed
        return {
            "played": float(self.played),
            "informative": self.informative / counted if counted else 0.0,
            "skipped": float(self.skipped),
            "explored": float(self.explored),
            "relaxed": float(self.relaxed),
            "stopped": float(self.stopped),
            "predicted_p": self.calibration.predicted_mean,
            "calibration_error": lasting.error,
            "tokens_saved": self.tokens_saved,
        }

    def to_json(self) -> dict[str, Any]:
        """For the history of a run."""
        return {
            "played": self.played,
            "ended": self.ended,
            "informative": self.informative,
            "skipped": self.skipped,
            "explored": self.explored,
            "relaxed": self.relaxed,
            "stopped": self.stopped,
            "tokens_saved": self.tokens_saved,
            "calibration": self.calibration.rows(),
        }
