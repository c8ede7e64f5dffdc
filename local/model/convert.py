"""Weight names and layouts: Hugging Face's Qwen3 to Megatron-core's `GPTModel` and back.

Megatron fuses what Hugging Face keeps apart. `linear_qkv` holds, for each key-value group, its query heads,
then its key, then its value; `linear_fc1` holds the gate above the up projection.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from midstream.local.model.shape import ModelShape

# Hugging Face name -> Megatron name, for tensors that are the same on both sides.
_PER_LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.down_proj": "mlp.linear_fc2",
}


def hf_to_megatron(weights: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Return the Megatron state of a Hugging Face one; KeyError where a tensor is missing."""
    state = {theirs: weights[ours] for ours, theirs in _plain_names(shape).items()}
    for layer in range(shape.num_layers):
        source, target = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        qkv = [weights[f"{source}self_attn.{name}_proj.weight"] for name in "qkv"]
        state[target + "self_attention.linear_qkv.weight"] = _fuse_qkv(qkv, shape)
        state[target + "mlp.linear_fc1.weight"] = torch.cat(
            [weights[source + "mlp.gate_proj.weight"], weights[source + "mlp.up_proj.weight"]]
        )
    return state


def megatron_to_hf(state: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Return the Hugging Face weights of a Megatron state; its `_extra_state` entries are ignored."""
    weights = {ours: state[theirs] for ours, theirs in _plain_names(shape).items()}
    for layer in range(shape.num_layers):
        source, target = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        qkv = _split_qkv(state[source + "self_attention.linear_qkv.weight"], shape)
        for name, projection in zip("qkv", qkv, strict=True):
            weights[f"{target}self_attn.{name}_proj.weight"] = projection
        gate, up = state[source + "mlp.linear_fc1.weight"].chunk(2)
        weights[target + "mlp.gate_proj.weight"] = gate
        weights[target + "mlp.up_proj.weight"] = up
    return weights


def _plain_names(shape: ModelShape) -> dict[str, str]:
    names = {
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "model.norm.weight": "decoder.final_layernorm.weight",
    }
    if not shape.tied_embeddings:
        names["lm_head.weight"] = "output_layer.weight"
    for layer in range(shape.num_layers):
        for ours, theirs in _PER_LAYER.items():
            names[f"model.layers.{layer}.{ours}.weight"] = f"decoder.layers.{layer}.{theirs}.weight"
    return names


def _fuse_qkv(projections: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """q [heads * D, H], k and v [groups * D, H] -> [groups * (heads / groups + 2) * D, H]."""
    by_group = [part.view(shape.num_query_groups, -1, shape.hidden_size) for part in projections]
    return torch.cat(by_group, dim=1).view(-1, shape.hidden_size)


def _split_qkv(qkv: Tensor, shape: ModelShape) -> list[Tensor]:
    heads_per_group = shape.num_attention_heads // shape.num_query_groups
    rows = [heads_per_group * shape.kv_channels, shape.kv_channels, shape.kv_channels]
    by_group = qkv.view(shape.num_query_groups, sum(rows), shape.hidden_size)
    return [part.reshape(-1, shape.hidden_size) for part in by_group.split(rows, dim=1)]
