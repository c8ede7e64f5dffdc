"""What a sample carries to the trainer: plain numbers for each of its segments."""

from collections.abc import Sequence
from dataclasses import dataclass


class NoteError(ValueError):
    """A note does not fit the tokens that it came with."""


@dataclass(frozen=True)
class Note:
    """Credit of one sample, a number for each of its segments; picklable.

    Attributes:
        key: names the rollout: its group and the sample's index.
        version: the policy version that trains on it.
        lengths: tokens of each segment; they tile the response.
        versions: the policy version of each, NONE for the environment's.
        at_snapshot: for each whether a turn begins with it, in a state that has a snapshot.
        spread: what the host spreads over all tokens: the reward, mostly after a normalisation in its group.
        advantages: what takes its place, None where it stays.
        weights: what advantages are multiplied with, None where nothing changes.
    """

    key: str
    version: int
    lengths: Sequence[int]
    versions: Sequence[int]
    at_snapshot: Sequence[bool]
    spread: float
    advantages: Sequence[float] | None = None
    weights: Sequence[float] | None = None

    def check(self, response_length: int) -> None:
        """Raise NoteError unless the segments tile a response of so many tokens."""
        if sum(self.lengths) != response_length:
            raise NoteError(
                f"sample {self.key}: its segments have {sum(self.lengths)} tokens, its response {response_length}: "
                "nothing may change a response after midstream's reward post-process hook; a convert function of "
                "your own must keep tokens and metadata of a sample together"
            )
