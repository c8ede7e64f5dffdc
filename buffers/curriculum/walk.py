"""The order in which prompts of a source come up: each once, in a new order every time around."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Walk:
    """Around E entries, which are numbered as the caller likes.

    The order of a round depends on the seed, the name and the round alone, so a walk goes on from two numbers.
    """

    def __init__(
        self, entries: Sequence[int] | NDArray[np.int64], *, seed: int, name: str, shuffle: bool
    ) -> None:
        self._entries = np.asarray(entries, dtype=np.int32)
        self._seed, self._name, self._shuffle = seed, name, shuffle
        self.round = 0
        self.at = 0
        self._order = self._ordered()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_over(self) -> bool:
        """Whether the next entry begins a new round."""
        return self.at >= len(self._entries)

    def next(self) -> int:
        """The entry that comes up."""
        if self.is_over:
            self.go_to(self.round + 1, 0)
        entry = int(self._order[self.at])
        self.at += 1
        return entry

    def go_to(self, round_: int, at: int) -> None:
        """Go on from there."""
        if round_ != self.round:
            self.round = round_
            self._order = self._ordered()
        self.at = at

    def _ordered(self) -> NDArray[np.int32]:
        if not self._shuffle:
            return self._entries
        words = [abs(self._seed), self.round, *self._name.encode(errors="surrogatepass")]
        return np.random.default_rng(words).permutation(self._entries)
