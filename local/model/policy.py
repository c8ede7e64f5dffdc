"""The trainable policy: a Megatron model that is read from and written to Hugging Face checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from midstream.local.loss import next_token_log_probs
from midstream.local.model.checkpoint import export_weights, read_weights
from midstream.local.model.convert import hf_to_megatron, megatron_to_hf
from midstream.local.model.megatron import build_gpt_model
from midstream.local.model.shape import CheckpointError, ModelShape


class Policy:
    """One model in float32 on this process's CPU."""

    def __init__(self, hf_dir: Path) -> None:
        self.shape = ModelShape.read(hf_dir)
        self.model = build_gpt_model(self.shape)
        self._hf_dir = hf_dir
        self.load(hf_dir)

    def load(self, hf_dir: Path) -> None:
        """Take the weights of another checkpoint of the same shape; CheckpointError where it differs."""
        shape = ModelShape.read(hf_dir)
        if shape != self.shape:
            raise CheckpointError(f"{hf_dir} holds a model of shape {shape}; this policy has {self.shape}")
        try:
            self.load_state_dict(hf_to_megatron(read_weights(hf_dir), self.shape))
        except ValueError as error:
            raise CheckpointError(f"{hf_dir} does not fit the model: {error}") from None

    def state_dict(self) -> dict[str, Tensor]:
        """The weights by Megatron's names."""
        return {name: t.detach() for name, t in self.model.state_dict().items() if isinstance(t, Tensor)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take weights by Megatron's names. Raises ValueError where they are not those of this model."""
        missing, unexpected = self.model.load_state_dict(state, strict=False)
        missing = [name for name in missing if not name.endswith("_extra_state")]
        if missing or unexpected:
            raise ValueError(f"missing {missing}, unexpected {unexpected}")

    def export(self, directory: Path) -> Path:
        """Write the weights as a Hugging Face checkpoint; see `checkpoint.export_weights`."""
        return export_weights(directory, megatron_to_hf(self.state_dict(), self.shape), like=self._hf_dir)

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.model.parameters())

    def token_log_probs(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> Tensor:
        """Log-probabilities [B, S - 1] of the tokens of right-padded sequences; S is the longest's length.

        Entry [b, t] belongs to token t + 1 of sequence b; entries past a sequence's end mean nothing.
        """
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(s) for s in sequences], batch_first=True)
        positions = torch.arange(tokens.size(1)).expand_as(tokens)
        logits = self.model(tokens, positions, attention_mask=None)
        return next_token_log_probs(logits, tokens, temperature)
