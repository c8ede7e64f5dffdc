"""The shape of a turn, and what a rollout needs of a host's tokenizer and sample."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from midstream.buffers.rollout import PartialRollout
from midstream.hooks.answers import Generation


class Tokenizer(Protocol):
    """The two calls that a rollout needs of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class TokenSink(Protocol):
    """Where tokens go besides the rollout's own record: the host's sample."""

    def append_action(self, generation: Generation) -> None: ...

    def append_observation(self, tokens: list[int], text: str) -> None: ...

    def rewrite(self, rollout: PartialRollout) -> None:
        """Make the host's sample equal to a rollout that has lost tokens."""


@dataclass(frozen=True)
class TurnRules:
    """The shape of a turn.

    ``observation_template`` wraps an environment's answer into what the model reads next;
    ``action_pattern`` finds the action in what the model wrote (its one group; all of it where None).
    """

    max_turns: int = 12
    max_tokens_per_turn: int | None = None
    observation_template: str = "{observation}"
    action_pattern: re.Pattern[str] | None = None
    abort_grace_s: float = 1.0
    max_attempts: int = 3

    def action(self, text: str) -> str:
        """Return the action in a model's text, empty where the pattern finds none."""
        if self.action_pattern is None:
            return text.strip()
        found = self.action_pattern.search(text)
        return (found.group(1) or "").strip() if found else ""
