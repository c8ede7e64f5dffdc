"""The trainer of the one-machine job: GRPO's loss on a Megatron model, one process, one CPU.

A step takes slime's rollout data, a mapping from keys to one entry per sample:

`tokens` prompt and response ids; `total_lengths`; `response_lengths`; `loss_masks` 1 on the model's own
tokens, over the response; `rewards` normalised by the caller; `rollout_log_probs` as the generator reported
them, over the response.
"""

import itertools
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from midstream.conf.schema import TrainerConfig
from midstream.local.loss import clipped_policy_loss
from midstream.local.model.policy import Policy

RolloutData = dict[str, Any]
PostprocessHook = Callable[[Namespace, int, RolloutData], None]

# Padded tokens of one forward pass: large enough to fill a core, small enough to pad little, since the
# sequences of a pass are neighbours in length.
MICRO_BATCH_TOKENS = 1024


class TrainingDiverged(Exception):
    """The gradient is not finite."""


class Trainer:
    """Trains the policy in `hf_dir` and exports it.

    `temperature` is the sampler's. `postprocess` is slime's `--rollout-data-postprocess-path` hook, called
    with `args` after advantages are set.
    """

    def __init__(
        self,
        config: TrainerConfig,
        hf_dir: Path,
        *,
        temperature: float = 1.0,
        args: Namespace | None = None,
        postprocess: PostprocessHook | None = None,
    ) -> None:
        self._config = config
        self._temperature = temperature
        self._args = args if args is not None else Namespace()
        self._postprocess = postprocess
        self._policy = Policy(hf_dir)
        self._optimizer = self._fresh_optimizer()

    def load(self, hf_dir: Path) -> None:
        """Start again from a checkpoint of the same shape, with a fresh optimizer."""
        self._policy.load(hf_dir)
        self._optimizer = self._fresh_optimizer()

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer and PyTorch's random state: all that `load_state_dict` needs to go on from here."""
        return {
            "policy": self._policy.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "torch_rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Raises KeyError, RuntimeError or ValueError where that was of another model or optimizer.
        """
        self._policy.load_state_dict(state["policy"])
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch_rng"])

    def export(self, directory: Path) -> Path:
        """Write the weights in Hugging Face layout; see `checkpoint.export_weights`."""
        return self._policy.export(directory)

    def log_probs(self, rollout_data: RolloutData) -> list[Tensor]:
        """Log-probabilities of every response token under the current weights, each [response_len]."""
        lengths = rollout_data["response_lengths"]
        result: list[Tensor] = [torch.empty(0)] * len(lengths)
        with torch.no_grad():
            for indices, batch in self._micro_batches(rollout_data, range(len(lengths))):
                for row, i in enumerate(indices):
                    end = len(rollout_data["tokens"][i]) - 1
                    result[i] = batch[row, end - lengths[i] : end].clone()
        return result

    def train(self, rollout_id: int, rollout_data: RolloutData) -> dict[str, float]:
        """One step on the data, in slime's order; adds `log_probs`, `advantages` and `returns` to it.

        Like slime's trainer it turns `loss_masks` and `rollout_log_probs` into tensors before the hook sees them.
        The advantage of a sample's tokens is its reward. The generator's log-probs are the old policy of the
        ratio. The data are split in order into minibatches, each one AdamW step, and every loss is divided
        by the action tokens of the whole batch, so that samples without advantage weigh too. Returns the
        means `loss`, `grad_norm`, `clip_fraction`, `ratio_deviation` and the count `optimizer_steps`.
        Raises ValueError where lengths disagree and TrainingDiverged on a gradient that is not finite.
        """
        _check_lengths(rollout_data)
        for key, dtype in (("loss_masks", torch.int32), ("rollout_log_probs", torch.float32)):
            rollout_data[key] = [torch.as_tensor(values, dtype=dtype) for values in rollout_data[key]]
        rollout_data["log_probs"] = self.log_probs(rollout_data)
        rollout_data["advantages"] = [
            torch.full((length,), float(reward))
            for reward, length in zip(rollout_data["rewards"], rollout_data["response_lengths"], strict=True)
        ]
        rollout_data["returns"] = rollout_data["advantages"]
        if self._postprocess is not None:
            self._postprocess(self._args, rollout_id, rollout_data)

        totals = _Totals(action_tokens=int(torch.cat(rollout_data["loss_masks"]).sum()))
        grad_norms = []
        for minibatch in _split(range(len(rollout_data["tokens"])), self._config.num_minibatches):
            teaching = [i for i in minibatch if _has_advantage(rollout_data, i)]
            if teaching:
                grad_norms.append(self._optimizer_step(rollout_id, rollout_data, teaching, totals))
        return {
            "loss": totals.loss,
            "grad_norm": sum(grad_norms) / max(len(grad_norms), 1),
            "clip_fraction": totals.clipped_tokens / max(totals.taught_tokens, 1),
            "ratio_deviation": totals.ratio_deviation / max(totals.taught_tokens, 1),
            "optimizer_steps": len(grad_norms),
        }

    def _optimizer_step(
        self, rollout_id: int, rollout_data: RolloutData, samples: Sequence[int], totals: "_Totals"
    ) -> float:
        """Step on `samples`, add to `totals`, and return the gradient's norm before clipping."""
        self._optimizer.zero_grad(set_to_none=True)
        for indices, log_probs in self._micro_batches(rollout_data, samples):
            old, advantages, mask = (
                _align(rollout_data, key, indices, log_probs.size(1))
                for key in ("rollout_log_probs", "advantages", "loss_masks")
            )
            part = clipped_policy_loss(
                log_probs, old, advantages, mask,
                eps_low=self._config.eps_clip, eps_high=self._config.eps_clip_high,
            )  # fmt: skip
            loss = part.loss / totals.action_tokens
            loss.backward()
            totals.loss += loss.item()
            totals.clipped_tokens += part.clipped_tokens.item()
            totals.ratio_deviation += part.ratio_deviation.item()
            totals.taught_tokens += mask.sum().item()
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._config.clip_grad).item()
        if not math.isfinite(norm):
            raise TrainingDiverged(
                f"the gradient's norm is {norm} at rollout {rollout_id}; lower trainer.lr={self._config.lr} "
                "or look for log-probs that are not finite in the rollout data"
            )
        self._optimizer.step()
        return norm

    def _micro_batches(
        self, rollout_data: RolloutData, samples: Sequence[int]
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Yield indices of samples of like length with their log-probs [B, S - 1], until all are through."""
        tokens = rollout_data["tokens"]
        for indices in length_buckets([len(tokens[i]) for i in samples], MICRO_BATCH_TOKENS):
            chosen = [samples[k] for k in indices]
            sequences = [tokens[i] for i in chosen]
            yield chosen, self._policy.token_log_probs(sequences, temperature=self._temperature)

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        config = self._config
        return torch.optim.AdamW(
            self._policy.parameters(),
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
        )


@dataclass
class _Totals:
    """Sums over a step. `taught_tokens` are the action tokens that went through the loss."""

    action_tokens: int
    taught_tokens: float = 0.0
    loss: float = 0.0
    clipped_tokens: float = 0.0
    ratio_deviation: float = 0.0


def length_buckets(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Group indices by length so that no group's padded size passes the budget (one item always fits)."""
    buckets: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda k: -lengths[k]):
        if not buckets or (len(buckets[-1]) + 1) * lengths[buckets[-1][0]] > budget_tokens:
            buckets.append([])
        buckets[-1].append(i)
    return buckets


def _split(indices: range, parts: int) -> list[range]:
    """Cut into `parts` runs of nearly equal length."""
    bounds = [len(indices) * k // parts for k in range(parts + 1)]
    return [indices[start:end] for start, end in itertools.pairwise(bounds)]


def _has_advantage(rollout_data: RolloutData, i: int) -> bool:
    """Whether the sample has a gradient at all: without advantage its clipped loss is constant."""
    return bool((_float(rollout_data["advantages"][i]) * _float(rollout_data["loss_masks"][i])).any())


def _align(rollout_data: RolloutData, key: str, indices: Sequence[int], width: int) -> Tensor:
    """Lay values over responses into the [B, S - 1] grid of log-probs; 0 outside the responses."""
    grid = torch.zeros(len(indices), width)
    for row, i in enumerate(indices):
        end = len(rollout_data["tokens"][i]) - 1
        grid[row, end - rollout_data["response_lengths"][i] : end] = _float(rollout_data[key][i])
    return grid


def _float(values: Sequence[float] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float32)


def _check_lengths(rollout_data: RolloutData) -> None:
    lengths = rollout_data["response_lengths"]
    for key in ("tokens", "total_lengths", "loss_masks", "rewards", "rollout_log_probs"):
        if len(rollout_data[key]) != len(lengths):
            raise ValueError(f"rollout data: {len(rollout_data[key])} {key} for {len(lengths)} samples")
    for i, length in enumerate(lengths):
        total = len(rollout_data["tokens"][i])
        if total != rollout_data["total_lengths"][i] or not 0 <= length < total:
            raise ValueError(
                f"rollout data: sample {i} has {total} tokens, total_length "
                f"{rollout_data['total_lengths'][i]} and response_length {length}"
            )
        for key in ("loss_masks", "rollout_log_probs"):
            values = len(rollout_data[key][i])
            if values != length:
                raise ValueError(f"rollout data: sample {i} has {values} {key} for {length} response tokens")
