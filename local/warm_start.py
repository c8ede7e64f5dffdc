"""The warm start: a short supervised pass on demonstrations that slip, so that a fresh model succeeds
sometimes and fails often. It is computed once and cached.
"""

import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from midstream.conf.schema import ModelConfig, WarmStartConfig
from midstream.local.model.checkpoint import build_hf_checkpoint
from midstream.local.model.policy import Policy
from midstream.local.model.tokenizer import ACTION, END, TOKEN_ID, VOCABULARY
from midstream.local.tasks.demonstrations import demonstrations

RECIPE = 1  # part of the cache's key: raise it when this module's training changes
ADAM_BETAS = (0.9, 0.98)
CLIP_GRAD = 1.0

Progress = Callable[[int, int, float], None]  # (steps done, steps in all, loss in nats per token)


def cache_directory() -> Path:
    """$MIDSTREAM_CACHE, or `midstream` in $XDG_CACHE_HOME, or in ~/.cache."""
    if chosen := os.environ.get("MIDSTREAM_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "midstream"


def warm_start(
    model: ModelConfig,
    config: WarmStartConfig,
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the warm-started model's checkpoint in Hugging Face layout, trained now or found in the cache.

    The same model, configuration, vocabulary and demonstrations give the same checkpoint, which must not be
    written to. Safe against a second process that does the same, and against a kill at any moment.
    """
    shown = list(itertools.islice(demonstrations(seed=config.seed), config.steps * config.batch_size))
    directory = (cache or cache_directory()) / f"warm-start-{_key(model, config, shown)}"
    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".warm-start-", dir=directory.parent) as scratch:
        fresh = build_hf_checkpoint(Path(scratch) / "fresh", model)
        policy = Policy(fresh)
        _train(policy, config, shown, progress or (lambda *_: None))
        trained = policy.export(Path(scratch) / "trained")
        _publish(trained, directory)
    return directory


def _key(model: ModelConfig, config: WarmStartConfig, shown: list[str]) -> str:
    shaping = [RECIPE, torch.__version__, model.model_dump(), config.model_dump(), VOCABULARY, shown]
    return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:16]


def _publish(trained: Path, directory: Path) -> None:
    try:
        trained.rename(directory)
    except OSError:
        # Another process was faster, and its checkpoint is the same as ours.
        if not directory.exists():
            raise
        shutil.rmtree(trained)


def _train(policy: Policy, config: WarmStartConfig, shown: list[str], progress: Progress) -> None:
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, betas=ADAM_BETAS, weight_decay=0.0)
    sequences = [[TOKEN_ID[word] for word in transcript.split()] for transcript in shown]
    for step in range(config.steps):
        batch = sequences[step * config.batch_size : (step + 1) * config.batch_size]
        loss = _mean_action_loss(policy, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIP_GRAD)
        optimizer.step()
        progress(step + 1, config.steps, loss.item())


def _mean_action_loss(policy: Policy, sequences: list[list[int]]) -> torch.Tensor:
    """Mean negative log-likelihood of the action tokens, in nats."""
    log_probs = policy.token_log_probs(sequences)
    mask = torch.zeros_like(log_probs)
    for row, sequence in enumerate(sequences):
        mask[row, : len(sequence) - 1] = torch.tensor(action_mask(sequence)[1:])
    return -(log_probs * mask).sum() / mask.sum()


def action_mask(tokens: list[int]) -> list[float]:
    """1.0 on the tokens that the model writes: after `<act>` up to and with `<end>`."""
    mask, in_action = [], False
    for token in tokens:
        mask.append(float(in_action))
        in_action = token == TOKEN_ID[ACTION] or (in_action and token != TOKEN_ID[END])
    return mask
