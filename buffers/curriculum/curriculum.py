"""Which prompts of a dataset are played, from what became of those that were."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from midstream.buffers.curriculum.book import Book, Cost
from midstream.buffers.curriculum.choice import Belief, chance
from midstream.buffers.curriculum.drawing import Drawing, Prompts, split
from midstream.buffers.curriculum.filter import Filter, are_equal, successes
from midstream.buffers.curriculum.source import Source
from midstream.buffers.curriculum.tally import BINS, Calibration, StepTally
from midstream.conf.schema.curriculum import CurriculumConfig


@dataclass(frozen=True)
class Outcome:
    """What became of a group.

    Attributes:
        digest: of its prompt.
        rewards: of the members that count: those whose infrastructure failed do not, nor those that were given up.
        cost: of a rollout, on average.
        tokens_saved: what was not generated because the group was given up; None where it was not.
    """

    digest: int
    rewards: Sequence[float]
    cost: Cost
    tokens_saved: float | None = None


class Curriculum:
    """Chooses prompts, and remembers what came of them."""

    def __init__(
        self,
        config: CurriculumConfig,
        prompts: Prompts,
        *,
        group_size: int,
        groups_per_step: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        """`shuffle` False walks through the dataset in its order.

        Raises:
            ValueError: there are no prompts, or a source has no name.
        """
        if not len(prompts.digests):
            raise ValueError("the dataset has no prompts")
        if "" in prompts.names:
            raise ValueError("a source has no name: give it one")
        self.config = config
        self.group_size = group_size
        self.book = Book(prompts.digests)
        self.names = list(prompts.names)
        self.source_of_row = np.zeros(len(self.book), np.int32)
        self.source_of_row[self.book.rows_of(prompts.digests)] = prompts.sources
        self.sources = {name: Source() for name in self.names}
        self.calibrations = {name: Calibration() for name in self.names}
        self._step = {name: StepTally() for name in self.names}
        self.drawing = Drawing(
            prompts,
            self.book,
            size=group_size,
            seed=seed,
            shuffle=shuffle,
            believe=self._believe,
            tally=lambda row: self._step[self._name_of(row)],
        )
        self.filter = Filter(groups_per_step)

    def configure(self, config: CurriculumConfig) -> None:
        """Go on under other settings."""
        if config.sampler.weights != self.config.sampler.weights:
            self.drawing.turns.forget()
        self.config = config

    def advance(self, version: int) -> None:
        """The policy has come to this version."""
        for source in self.sources.values():
            source.advance(version, self.config.forget)

    def take(self, count: int) -> list[int]:
        """The positions of the prompts that are played next."""
        return [self.drawing.next(self.config) for _ in range(count)]

    def observe(self, outcome: Outcome) -> bool:
        """Learn from a group that has come to its end, trained on or not; False where its prompt is unknown."""
        row = self.book.row_of(outcome.digest)
        if row is None:
            return False
        name = self._name_of(row)
        source, tally = self.sources[name], self._step[name]
        tally.ended += 1
        self.drawing.ended(row)
        tally.stopped += outcome.tokens_saved is not None
        tally.tokens_saved += outcome.tokens_saved or 0.0
        if not outcome.rewards:
            tally.failed += 1
            return True
        informs = not are_equal(outcome.rewards, self.config)
        if self._by_group:
            passed, failed = float(informs), float(not informs)
        else:
            passed = float(successes(outcome.rewards, self.config))
            failed = len(outcome.rewards) - passed
            # Of rewards that differ on one side of the threshold.
            informs = informs and passed > 0 and failed > 0
        belief, known = self._believe(row), self._remembered(row)
        tally.informative += informs
        self.book.note(row, known[0] + passed, known[1] + failed, source.time, source.era)
        self.book.note_cost(row, outcome.cost)
        # A group is given up when its members agree: what is left of such groups is no fair sample of groups.
        if outcome.tokens_saved is None:
            self._compare(name, belief, known, passed, failed, informs=informs)
        return True

    def _compare(
        self,
        name: str,
        belief: Belief,
        known: tuple[float, float],
        passed: float,
        failed: float,
        *,
        informs: bool,
    ) -> None:
        """Hold what was believed of a prompt against what its group has shown."""
        size = passed + failed
        expected = chance(belief, round(size), by_group=self._by_group)
        if expected >= self.config.gate.min_informative:
            self.drawing.exploration.observe(expected, informs)
        for calibration in (self._step[name].calibration, self.calibrations[name]):
            calibration.add(belief.pass_rate, passed / size)
        self.calibrations[name].fade()
        if self.sources[name].observe(passed, failed, known, self.config.forget):
            self.drawing.exploration.begin_anew()

    def belief(self, digest: int) -> tuple[float, float]:
        """Beta(a, b) of a prompt's pass rate; that of a new prompt where it is not in the dataset."""
        row = self.book.row_of(digest)
        if row is None:
            return 1.0, 1.0
        belief = self._believe(row)
        return belief.a, belief.b

    def chance(self, position: int) -> float:
        """That a group of the prompt at a position of the dataset informs."""
        belief = self._believe(self.drawing.row_of(position))
        return chance(belief, self.group_size, by_group=self._by_group)

    @property
    def version(self) -> int | None:
        """The newest version that the policy has come to."""
        return next(iter(self.sources.values())).version

    def end_step(self) -> dict[str, StepTally]:
        """What the step did, by source; a new one begins."""
        step, self._step = self._step, {name: StepTally() for name in self.names}
        self.filter.begin_step()
        return step

    def pass_rates(self) -> dict[str, list[int]]:
        """By source: how many prompts of which anything is known are believed to have a pass rate in each tenth."""
        rates = self._rates()
        return {
            name: np.histogram(rates[number], bins=BINS, range=(0, 1))[0].tolist()
            for number, name in enumerate(self.names)
        }

    def sizes(self) -> dict[str, int]:
        """Prompts by source."""
        counts = np.bincount(self.source_of_row, minlength=len(self.names))
        return dict(zip(self.names, counts.tolist(), strict=True))

    def _rates(self) -> list[NDArray[np.float64]]:
        book, rates = self.book, []
        known = np.flatnonzero(book.successes + book.failures > 0)
        for name, mine in zip(
            self.names, split(known, self.source_of_row[known], len(self.names)), strict=True
        ):
            source = self.sources[name]
            a, b = source.prior.beta()
            passed, failed = source.remembered(
                book.successes[mine], book.failures[mine], book.noted_at[mine], book.era[mine]
            )
            rates.append(np.asarray((a + passed) / (a + b + passed + failed)))
        return rates

    def _name_of(self, row: int) -> str:
        return self.names[self.source_of_row[row]]

    @property
    def _by_group(self) -> bool:
        return self.config.outcome.by == "spread"

    def _remembered(self, row: int) -> tuple[float, float]:
        book, source = self.book, self.sources[self._name_of(row)]
        passed, failed = source.remembered(
            book.successes[row], book.failures[row], book.noted_at[row], book.era[row]
        )
        return float(passed), float(failed)

    def _believe(self, row: int) -> Belief:
        a, b = self.sources[self._name_of(row)].prior.beta()
        passed, failed = self._remembered(row)
        return Belief(a + passed, b + failed, passed + failed)
