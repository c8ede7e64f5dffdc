"""Prompts whose pass rates drift, and three ways of choosing among them."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from midstream.buffers.curriculum.book import Cost
from midstream.buffers.curriculum.curriculum import Curriculum, Outcome
from midstream.buffers.curriculum.drawing import Prompts
from midstream.buffers.curriculum.tally import Calibration
from midstream.conf.schema.curriculum import CurriculumConfig

GROUP, GROUPS_PER_STEP, SOURCES = 8, 32, 4
# For each policy version: of the pass rates between, in logits; and prompts that change places.
DRIFT, SWAPPED = 0.05, 0.001


@dataclass(frozen=True)
class Mix:
    """Shares of prompts that are always and never solved; the others' pass rates are even between two bounds."""

    solved: float
    hopeless: float
    low: float
    high: float


MIXES: Mapping[str, Mix] = {
    "55 % solved": Mix(0.55, 0.0, 0.1, 0.9),
    "30 % solved": Mix(0.30, 0.0, 0.1, 0.9),
    "15 % solved, 15 % hopeless": Mix(0.15, 0.15, 0.1, 0.9),
    "all inform": Mix(0.0, 0.0, 0.3, 0.7),
}


class World:
    """Pass rates of prompts, by policy version. A source says nothing of a prompt's, unless `by_source`."""

    def __init__(self, mix: Mix, prompts: int, seed: int, *, by_source: bool = False) -> None:
        self._random = np.random.default_rng([seed, 1])
        self._mix = mix
        self.sources = self._random.integers(SOURCES, size=prompts).astype(np.int32)
        drawn = self._random.random(prompts)
        self.rates = self._random.uniform(mix.low, mix.high, prompts)
        if by_source:
            self.rates[self.sources < SOURCES // 2] = 1.0
        else:
            self.rates[drawn < mix.solved] = 1.0
            self.rates[(drawn >= mix.solved) & (drawn < mix.solved + mix.hopeless)] = 0.0

    def prompts(self) -> Prompts:
        """The dataset."""
        names = [f"source {number}" for number in range(SOURCES)]
        return Prompts(np.arange(len(self.rates), dtype=np.uint64), self.sources, names)

    def advance(self) -> None:
        """To the next policy version."""
        between = (self.rates > 0) & (self.rates < 1)
        rates = self.rates[between]
        logits = np.log(rates / (1 - rates)) + self._random.normal(0, DRIFT, len(rates))
        self.rates[between] = np.clip(1 / (1 + np.exp(-logits)), 0.02, 0.98)
        for _ in range(self._random.binomial(len(self.rates) // 2, SWAPPED)):
            one, other = self._random.integers(len(self.rates), size=2)
            self.rates[[one, other]] = self.rates[[other, one]]

    def change(self) -> None:
        """What is always solved is no more, and all else is from now on."""
        solved = self.rates == 1
        fresh = self._random.uniform(self._mix.low, self._mix.high, len(self.rates))
        self.rates: NDArray[np.float64] = np.where(solved, fresh, 1.0)


@dataclass
class Result:
    """What a way of choosing paid: whether each group informed, in order."""

    informs: list[bool] = field(default_factory=list)
    calibration: Calibration = field(default_factory=Calibration)

    @property
    def rollouts_per_informative_group(self) -> float:
        """Of all groups that were played."""
        return GROUP * len(self.informs) / sum(self.informs)


def play(
    how: str,
    world: World,
    seed: int,
    *,
    until: int,
    config: CurriculumConfig | None = None,
    in_flight: int = GROUPS_PER_STEP,
    change_at: int = -1,
) -> Result:
    """Play groups until so many have informed; `how` is uniform, dapo or curriculum.

    So many are in flight at any time: chosen, and not known yet what they come to.

    A step, and with it a policy version, is over after so many groups (uniform), or so many that inform.
    """
    random, result = np.random.default_rng([seed, 2]), Result()
    curriculum = _curriculum(world, seed, config) if how == "curriculum" else None
    order = _epochs(len(world.rates), random)
    flying: deque[int] = deque()
    version = found = 0
    while found < until:
        if curriculum is not None:
            curriculum.advance(version)
        in_step = 0
        while in_step < GROUPS_PER_STEP:
            while len(flying) < in_flight:
                flying.append(next(order) if curriculum is None else curriculum.take(1)[0])
            position = flying.popleft()
            solved = int(random.binomial(GROUP, world.rates[position]))
            informs = 0 < solved < GROUP
            if curriculum is not None:
                rewards = [1.0] * solved + [0.0] * (GROUP - solved)
                curriculum.observe(Outcome(position, rewards, Cost(tokens=1.0)))
            result.informs.append(informs)
            found += informs
            in_step += 1 if how == "uniform" else informs
        version += 1
        world.advance()
        if version == change_at:
            world.change()
        if curriculum is not None:
            for tally in curriculum.end_step().values():
                result.calibration.merge(tally.calibration)
    return result


def _curriculum(world: World, seed: int, config: CurriculumConfig | None) -> Curriculum:
    return Curriculum(
        config or CurriculumConfig(enabled=True),
        world.prompts(),
        group_size=GROUP,
        groups_per_step=GROUPS_PER_STEP,
        seed=seed,
        shuffle=True,
    )


def _epochs(prompts: int, random: np.random.Generator) -> Iterator[int]:
    while True:
        yield from random.permutation(prompts).tolist()
