"""Rollouts of chain-fix in one process: Hugging Face's model samples, the Python rules answer.

Every rollout takes one token at each time step, forced (prompt or observation) or sampled, so that all of
them share their positions and need no padding.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from midstream.local.engine.shims import declare_torchvision_operators
from midstream.local.model.tokenizer import END, SPECIAL_WORDS, TOKEN_ID, VOCABULARY
from midstream.local.tasks.chain_fix import SUBMIT, ChainTask
from midstream.local.tasks.chain_world import ChainWorld

MAX_TURNS = 12
MAX_TURN_TOKENS = 16


@dataclass
class Rollout:
    """One episode in the making; log-probs and mask are over the response."""

    task: ChainTask
    tokens: list[int]
    log_probs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    turns: int = 0
    done: bool = False

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self.forced = self.tokens[1:]
        self.tokens = self.tokens[:1]
        self.world = ChainWorld(self.task)

    def take(self, sampled: int, log_prob: float) -> None:
        """Append the next token; a sampled one may end the turn, and with it the episode."""
        in_response = len(self.tokens) >= self.prompt_tokens
        own = not self.forced
        self.tokens.append(sampled if own else self.forced.pop(0))
        if in_response:
            self.log_probs.append(log_prob if own else 0.0)
            self.mask.append(int(own))
        if own:
            self.turn.append(sampled)
            if sampled == TOKEN_ID[END] or len(self.turn) == MAX_TURN_TOKENS:
                self._act()

    def _act(self) -> None:
        words = (VOCABULARY[token] for token in self.turn)
        action = " ".join(word for word in words if word not in SPECIAL_WORDS)
        observation = self.world.step(action)
        self.turn, self.turns = [], self.turns + 1
        self.done = action == SUBMIT or self.turns == MAX_TURNS
        self.forced = [] if self.done else _ids(f"<obs> {observation} <act>")


def hugging_face_model(hf_dir: Path) -> Any:
    """The checkpoint as transformers loads it, in float32, for inference."""
    declare_torchvision_operators()
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(hf_dir, dtype=torch.float32).eval()


@torch.no_grad()
def roll_out(hf_dir: Path, tasks: list[ChainTask], *, seed: int) -> list[Rollout]:
    """Play every task once at temperature 1."""
    from transformers.cache_utils import DynamicCache

    model, cache = hugging_face_model(hf_dir), DynamicCache()
    draw = torch.Generator().manual_seed(seed)
    rollouts = [Rollout(task, _ids(task.prompt)) for task in tasks]
    live = rollouts
    while live:
        last = torch.tensor([[rollout.tokens[-1]] for rollout in live])
        logits: Tensor = model(last, past_key_values=cache, use_cache=True).logits[:, -1]
        log_probs = torch.log_softmax(logits, dim=-1)
        sampled = torch.multinomial(log_probs.exp(), 1, generator=draw)
        for rollout, token, log_prob in zip(live, sampled, log_probs.gather(1, sampled), strict=True):
            rollout.take(int(token), float(log_prob))
        going = [row for row, rollout in enumerate(live) if not rollout.done]
        if len(going) < len(live):
            live = [live[row] for row in going]
            cache.batch_select_indices(torch.tensor(going, dtype=torch.long))
    return rollouts


def success(rollouts: list[Rollout]) -> float:
    return sum(rollout.world.solved() for rollout in rollouts) / len(rollouts)


def rollout_data(rollouts: list[Rollout], rewards: list[float]) -> dict[str, Any]:
    """What the trainer takes, with `rewards` as the normalised ones."""
    return {
        "tokens": [rollout.tokens for rollout in rollouts],
        "total_lengths": [len(rollout.tokens) for rollout in rollouts],
        "response_lengths": [len(rollout.mask) for rollout in rollouts],
        "loss_masks": [rollout.mask for rollout in rollouts],
        "rewards": rewards,
        "rollout_log_probs": [rollout.log_probs for rollout in rollouts],
    }


def _ids(text: str) -> list[int]:
    return [TOKEN_ID[word] for word in text.split()]
