"""Which prompt is played next: the gate, the score, and the source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from midstream.buffers.curriculum.book import Cost
from midstream.buffers.curriculum.posterior import (
    deviation,
    informative,
    informative_at,
    informative_deviation,
    variance_of_rewards,
)
from midstream.conf.schema.curriculum import GateConfig, SamplerConfig


@dataclass(frozen=True)
class Belief:
    """Of a prompt: Beta(a, b), of which so many rollouts' worth is its own."""

    a: float
    b: float
    evidence: float

    @property
    def pass_rate(self) -> float:
        """Expected."""
        return self.a / (self.a + self.b)


def chance(belief: Belief, size: int, *, by_group: bool) -> float:
    """That a group of so many informs; `by_group` says that what is believed is of groups, not of rollouts."""
    return belief.pass_rate if by_group else informative(belief.a, belief.b, size)


def passes_gate(
    belief: Belief, size: int, gate: GateConfig, random: np.random.Generator, *, by_group: bool
) -> bool:
    """Whether a prompt is worth a group; of one of which less than a rollout is known the best is hoped."""
    if gate.min_informative <= 0:
        return True
    if gate.by == "thompson":
        p = float(random.beta(belief.a, belief.b))
        return (p if by_group else informative_at(p, size)) >= gate.min_informative
    hope = 0.0
    if belief.evidence < 1:
        hope = deviation(belief.a, belief.b) if by_group else informative_deviation(belief.a, belief.b, size)
    return chance(belief, size, by_group=by_group) + hope >= gate.min_informative


def scores(candidates: Sequence[tuple[Belief, Cost]], sampler: SamplerConfig) -> list[float]:
    """Of each prompt: the larger, the sooner it is played. One that never was is taken to cost what the others do."""
    if sampler.by == "target":
        return [-abs(belief.pass_rate - sampler.target) for belief, _ in candidates]
    prices = [_price(cost, sampler) for _, cost in candidates]
    paid = [price for price in prices if price > 0]
    usual = sum(paid) / len(paid) if paid else 1.0
    return [
        variance_of_rewards(belief.a, belief.b) / (price or usual)
        for (belief, _), price in zip(candidates, prices, strict=True)
    ]


def _price(cost: Cost, sampler: SamplerConfig) -> float:
    return (
        sampler.token_cost * cost.tokens + sampler.turn_cost * cost.turns + sampler.second_cost * cost.seconds
    )


# Of what groups fell short of, the weight of the newest; half of the groups may explore, and a shortfall that chance
# alone makes calls for none.
_NEWEST, _MOST, _BY_CHANCE, _SLOPE = 1 / 6, 0.5, 0.2, 2.0
# Groups that are owed while the gate passes over nothing; more are not saved up.
_OWED = 2.0


@dataclass
class Exploration:
    """When a group goes to a prompt that the gate passes over: more often while predictions do not come true."""

    shortfall: float = 0.0
    credit: float = 0.0

    def observe(self, expected: float, informs: bool) -> None:
        """A group that the gate let through informs, or not, after it was expected to with this probability."""
        self.shortfall += _NEWEST * (expected - informs - self.shortfall)

    def begin_anew(self) -> None:
        """What fell short was of beliefs that are forgotten."""
        self.shortfall = 0.0

    def is_due(self, floor: float) -> bool:
        """Whether the next group explores if it can; `floor` is the least share of groups that do."""
        if floor == 0:
            return False
        wanted = floor + max(0.0, _SLOPE * (self.shortfall - _BY_CHANCE))
        self.credit = min(self.credit, _OWED) + max(floor, min(_MOST, wanted))
        return self.credit >= 1

    def note_explored(self) -> None:
        """A group that was due has gone to a prompt that the gate passes over; until one does, it stays due."""
        self.credit -= 1


@dataclass
class Turns:
    """Whose turn it is: groups are given to sources in the shares of their weights (D'Hondt's method)."""

    given: dict[str, float] = field(default_factory=dict)

    def order(self, weights: Mapping[str, float]) -> list[str]:
        """The sources in the order in which they are asked for a prompt; the first has its turn, which counts.

        One that has nothing to offer leaves its turn to the others, who owe nothing for it. Sources without a weight
        above 0 are not asked.
        """
        ahead = {
            name: (self.given.get(name, 0.0) + 1) / weight for name, weight in weights.items() if weight > 0
        }
        asked = sorted(ahead, key=lambda name: (ahead[name], name))
        self.given[asked[0]] = self.given.get(asked[0], 0.0) + 1
        return asked

    def forget(self) -> None:
        """Begin anew, as when weights change: nobody has a debt to pay."""
        self.given.clear()
