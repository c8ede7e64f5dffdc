"""The numbers that fix a Qwen3's architecture, read from a checkpoint's `config.json`."""

import json
from dataclasses import dataclass
from pathlib import Path


class CheckpointError(Exception):
    """A checkpoint directory is missing, incomplete, of another architecture, or cannot be written."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Qwen3: RMSNorm with query and key norm, RoPE, SwiGLU, grouped-query attention, no biases."""

    vocab_size: int
    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    rotary_base: float
    max_position_embeddings: int
    layernorm_epsilon: float
    tied_embeddings: bool

    @classmethod
    def read(cls, hf_dir: Path) -> "ModelShape":
        """Read `hf_dir/config.json`; raises CheckpointError where there is none or it is not a Qwen3's."""
        path = hf_dir / "config.json"
        try:
            config = json.loads(path.read_text())
        except FileNotFoundError:
            raise CheckpointError(f"no checkpoint in {hf_dir}: config.json is missing") from None
        if config.get("model_type") != "qwen3":
            raise CheckpointError(
                f"{path} describes model_type {config.get('model_type')!r}; this trainer maps 'qwen3' only"
            )
        rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], "rope_type": "default"}
        if rope["rope_type"] != "default":
            raise CheckpointError(f"{path} scales RoPE ({rope['rope_type']!r}); only 'default' is mapped")
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            ffn_hidden_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_query_groups=config["num_key_value_heads"],
            kv_channels=config["head_dim"],
            rotary_base=rope["rope_theta"],
            max_position_embeddings=config["max_position_embeddings"],
            layernorm_epsilon=config["rms_norm_eps"],
            tied_embeddings=config["tie_word_embeddings"],
        )
