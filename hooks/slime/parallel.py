"""How a host has spread a batch over the ranks of its trainer."""

import importlib
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from midstream.hooks.slime.host import running_host

# slime's own guard of its whitening.
_EPSILON = 1e-8


class Ranks:
    """One rank's view: which tokens it owns, and sums over others. Alone where Megatron is not set up."""

    def __init__(
        self, args: Namespace, total_lengths: Sequence[int], response_lengths: Sequence[int]
    ) -> None:
        """Lengths, in tokens, are of the samples of this rank; those of one context-parallel group are the same."""
        self._lengths = list(zip(total_lengths, response_lengths, strict=True))
        self._state: Any = importlib.import_module("megatron.core.parallel_state")
        self._is_spread = self._state.model_parallel_is_initialized()
        if self._is_spread and self._state.get_context_parallel_world_size() > 1:
            self._slice = running_host(args).load("slices", "slice_log_prob_with_cp")
        else:
            self._slice = None

    @property
    def data_parallel(self) -> int:
        """The number of the group of ranks that have these samples."""
        return int(self._state.get_data_parallel_rank()) if self._is_spread else 0

    @property
    def is_first(self) -> bool:
        """Whether it is the first of the ranks that have these samples."""
        ranks = (self._state.get_context_parallel_rank, self._state.get_tensor_model_parallel_rank)
        return not self._is_spread or not any(rank() for rank in ranks)

    def owned(self, values: Tensor) -> Tensor:
        """The entries of a tensor over the whole responses of all samples that this rank owns, in their order."""
        if self._slice is None:
            return values
        parts = values.split([response for _, response in self._lengths])
        return torch.cat(
            [self._slice(part, *lengths) for part, lengths in zip(parts, self._lengths, strict=True)]
        )

    def summed(self, values: Tensor) -> Tensor:
        """The sum over the ranks that own slices of the same samples."""
        if self._slice is not None:
            distributed.all_reduce(values, group=self._state.get_context_parallel_group())
        return values

    def whitened(self, values: Tensor, mask: Tensor) -> Tensor:
        """Mean 0 and variance 1 (with n - 1) over the masked tokens of all ranks, as slime whitens advantages.

        Raises:
            ValueError: no rank has a token in the loss.
        """
        masked = values.double() * mask
        sums = torch.stack([mask.sum().double(), masked.sum(), (masked * values).sum()])
        if self._is_spread:
            group = self._state.get_data_parallel_group(with_context_parallel=True)
            distributed.all_reduce(sums, group=group)
        count, total, squares = sums
        if not count:
            raise ValueError("no token of the batch is in the loss: there is nothing to whiten")
        mean = total / count
        variance = (squares / count - mean**2) * count / (count - 1).clamp(min=1)
        return ((values - mean) * torch.rsqrt(variance.clamp(min=0) + _EPSILON)).to(values.dtype)
