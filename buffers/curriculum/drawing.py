"""Which prompts come up, which of them are passed over, and which is played."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from midstream.buffers.curriculum.book import Book, Cost
from midstream.buffers.curriculum.choice import Belief, Exploration, Turns, passes_gate, scores
from midstream.buffers.curriculum.tally import StepTally
from midstream.buffers.curriculum.walk import Walk
from midstream.conf.schema.curriculum import CurriculumConfig, GateConfig

# So many prompts may come up in vain before the next source is asked, and after the last one the gate opens.
PATIENCE = 2_000
ALL = ""
"""The walk through the prompts of all sources."""


@dataclass(frozen=True)
class Prompts:
    """The prompts of a dataset by their positions in it.

    Attributes:
        digests: [E] uint64, equal for equal prompts.
        sources: [E] the position of each one's source in `names`.
        names: the sources.
    """

    digests: NDArray[np.uint64]
    sources: NDArray[np.int32]
    names: Sequence[str]


class Drawing:
    """Walks through the prompts, one through all of them, and one for each source where sources have weights.

    A prompt comes up once in each round of a walk, and a round takes at most as many groups as the walk has prompts.
    One that was not played for `gate.revisit_epochs` epochs, each as many groups as there are prompts, is played when
    it comes up again, whatever is believed of it; or for half of that time and more, so that not all are due at once.
    """

    def __init__(
        self,
        prompts: Prompts,
        book: Book,
        *,
        size: int,
        seed: int,
        shuffle: bool,
        believe: Callable[[int], Belief],
        tally: Callable[[int], StepTally],
    ) -> None:
        """`size` is that of a group; `believe` and `tally` are asked by the row of a prompt in the book."""
        self._book = book
        self._rows = book.rows_of(prompts.digests)
        self._size = size
        self._believe, self._tally = believe, tally
        # By digest: positions in a dataset may differ from one start to the next.
        entries = np.argsort(prompts.digests, kind="stable") if shuffle else np.arange(len(prompts.digests))
        parts = dict(
            zip(prompts.names, split(entries, prompts.sources[entries], len(prompts.names)), strict=True)
        )
        self.walks = {
            name: Walk(part, seed=seed, name=name, shuffle=shuffle)
            for name, part in {ALL: entries, **parts}.items()
        }
        self.turns = Turns()
        self.exploration = Exploration()
        self.begun = 0  # groups, of all prompts
        self.random = np.random.default_rng(abs(seed))

    def next(self, config: CurriculumConfig) -> int:
        """The position of the prompt that is played next."""
        explores = self.exploration.is_due(config.gate.explore)
        asked = self.turns.order(self._weights(config))
        for relaxed, gate in enumerate(_relaxing(config.gate)):
            for again in (False, True):
                for name in asked:
                    position = self._search(self.walks[name], gate, config, explores=explores, again=again)
                    if position is not None:
                        self._tally(self.row_of(position)).relaxed += relaxed > 0
                        return position
        raise AssertionError("an open gate lets everything pass")

    def row_of(self, position: int) -> int:
        """The row in the book of the prompt at a position of the dataset."""
        return int(self._rows[position])

    def _weights(self, config: CurriculumConfig) -> Mapping[str, float]:
        named = config.sampler.weights
        if not named:
            return {ALL: 1.0}
        weights = {
            name: named.get(name, 1.0) for name, walk in self.walks.items() if name != ALL and len(walk)
        }
        # Weights of sources that this dataset does not have must not stop it.
        return {name: weight for name, weight in weights.items() if weight > 0} or {ALL: 1.0}

    def _search(
        self, walk: Walk, gate: GateConfig, config: CurriculumConfig, *, explores: bool, again: bool
    ) -> int | None:
        """The best of the next candidates, None where no prompt passed the gate.

        Only `again` says that prompts are played of which a group is on its way.
        """
        wanted = 1 if config.sampler.by == "uniform" else config.sampler.candidates
        window: list[int] = []
        candidates: list[tuple[Belief, Cost]] = []
        for _ in range(min(len(walk), PATIENCE)):
            # In the next round the same prompts come up.
            if window and walk.is_over:
                break
            position = walk.next()
            row = self.row_of(position)
            if not again and self._is_on_its_way(row):
                continue
            is_due = self._is_due(row, gate.revisit_epochs)
            belief = self._believe(row)
            passes = passes_gate(
                belief, self._size, gate, self.random, by_group=config.outcome.by == "spread"
            )
            if is_due or (explores and not passes):
                self._tally(row).explored += not passes
                if explores and not passes:
                    self.exploration.note_explored()
                return self._played(position, window)
            if not passes:
                self._pass_over(row)
                continue
            window.append(position)
            candidates.append((belief, self._book.cost(row)))
            if len(window) == wanted:
                break
        if not window:
            return None
        # Of equals the one that was played longest ago.
        ages = [-int(self._book.played_at[self.row_of(position)]) for position in window]
        found = list(zip(scores(candidates, config.sampler), ages, strict=True))
        return self._played(window.pop(found.index(max(found))), window)

    def ended(self, row: int) -> None:
        """A group of a prompt has ended."""
        self._book.ended_at[row] = self.begun

    def _is_on_its_way(self, row: int) -> bool:
        played_at = int(self._book.played_at[row])
        # Some never come back, and nobody says so.
        return int(self._book.ended_at[row]) < played_at > self.begun - len(self._book)

    def _is_due(self, row: int, epochs: int) -> bool:
        played_at = int(self._book.played_at[row])
        # The same wherever it is asked, and another after each group.
        jitter = (hash((int(self._book.digests[row]), played_at)) & 0xFFFF) / 0x10000
        return self.begun - played_at >= epochs * len(self._book) * (1 + jitter) / 2

    def _played(self, position: int, others: Sequence[int]) -> int:
        row = self.row_of(position)
        # A prompt may stand in the dataset several times.
        for other in {self.row_of(other) for other in others} - {row}:
            self._pass_over(other)
        self.begun += 1
        self._book.played_at[row] = self.begun
        self._tally(row).played += 1
        return position

    def _pass_over(self, row: int) -> None:
        self._tally(row).skipped += 1


def split(values: NDArray[np.int64], numbers: NDArray[np.int32], count: int) -> Sequence[NDArray[np.int64]]:
    """The values in as many parts as there are sources, in their order; `numbers` has the source of each."""
    order = np.argsort(numbers, kind="stable")
    return np.split(values[order], np.searchsorted(numbers[order], np.arange(1, count)))


def _relaxing(gate: GateConfig) -> Iterator[GateConfig]:
    """As it is set, at half, and open: a run never ends for want of prompts."""
    for share in (1.0, 0.5, 0.0):
        yield gate.model_copy(update={"min_informative": share * gate.min_informative})
