"""A Qwen3 as Megatron-core's `GPTModel` on a CPU: float32, one rank, no fused kernels.

Two parts of Megatron-core insist on CUDA and are replaced here: the core attention, and the move of the
rotary frequencies to the GPU. Weights are loaded by `convert`, never initialised here.
"""

import math
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

from midstream.local.model.shape import ModelShape

with warnings.catch_warnings():
    # Importing it warns once for every GPU library that it finds missing.
    warnings.simplefilter("ignore", UserWarning)
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType


class CausalAttention(nn.Module):
    """Scaled dot-product attention over right-padded sequences, in the place of `DotProductAttention`.

    Causal masking alone is enough: padding lies after every token that counts.
    """

    def __init__(self, config: TransformerConfig, attn_mask_type: AttnMaskType, **_: object) -> None:
        super().__init__()
        if attn_mask_type is not AttnMaskType.causal:
            raise ValueError(f"attention mask {attn_mask_type} is not supported; only causal is")
        self.scale = 1.0 / math.sqrt(config.kv_channels)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        """query [S, B, heads, D]; key and value [S, B, groups, D]; returns [S, B, heads * D]."""
        query, key, value = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        context = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=True
        )
        return context.permute(2, 0, 1, 3).flatten(2)


def init_single_rank() -> None:
    """Set up gloo and Megatron's process groups for this process alone; opens no port, safe to repeat.

    Torch gets one thread in this process. The models are too small to gain much from a second one, and where
    another process wants the core, threads that wait for each other make a step several times slower.
    """
    torch.set_num_threads(1)
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


def build_gpt_model(shape: ModelShape) -> GPTModel:
    """Return a model with arbitrary weights; load them with `convert.hf_to_megatron`."""
    init_single_rank()
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    model = GPTModel(
        config=_transformer_config(shape),
        transformer_layer_spec=spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        parallel_output=False,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rotary_base,
    )
    _keep_rotary_on_cpu(model)
    return model


def _transformer_config(shape: ModelShape) -> TransformerConfig:
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=shape.layernorm_epsilon,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=torch.float32,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],
    )


def _keep_rotary_on_cpu(model: GPTModel) -> None:
    """Replace `get_emb`, which moves the frequencies to `torch.cuda.current_device()`."""
    rotary = model.rotary_pos_emb

    def rotary_angles(max_seq_len: int, offset: int = 0) -> Tensor:
        angles = rotary.get_freqs_non_repeated(max_seq_len, offset)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]

    rotary.get_emb = rotary_angles
