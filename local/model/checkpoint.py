"""Checkpoints in Hugging Face layout: what the server loads and what the trainer exports.

A directory holds `config.json`, `model.safetensors` (float32) and the tokenizer. It appears by a rename, so
it is complete or absent; a newer export into the same directory replaces the weights by a rename too.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import Qwen3Config

from midstream.conf.schema import ModelConfig
from midstream.local.model.shape import CheckpointError, ModelShape
from midstream.local.model.tokenizer import END, PAD, TOKEN_ID, VOCABULARY, build_tokenizer

WEIGHTS_FILE = "model.safetensors"
MAX_POSITION_EMBEDDINGS = 4096  # longest prompt and response together, in tokens
INITIAL_STD = 0.02


def build_hf_checkpoint(directory: Path, model: ModelConfig) -> Path:
    """Write a randomly initialised Qwen3 with its tokenizer to `directory` and return it.

    The weights depend on `model.seed` only. Raises CheckpointError where the directory exists or cannot be
    written.
    """
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(VOCABULARY),
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        head_dim=model.kv_channels,
        rope_theta=float(model.rotary_base),
        tie_word_embeddings=False,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        bos_token_id=None,
        eos_token_id=TOKEN_ID[END],
        pad_token_id=TOKEN_ID[PAD],
        dtype="float32",
    )
    with _new_directory(directory) as staging:
        config.save_pretrained(staging)
        build_tokenizer().save_pretrained(staging)
        _write_weights(staging, _random_weights(ModelShape.read(staging), seed=model.seed))
    return directory


def _random_weights(shape: ModelShape, *, seed: int) -> dict[str, Tensor]:
    """Norms at 1, every matrix normal with INITIAL_STD."""
    hidden, ffn, head = shape.hidden_size, shape.ffn_hidden_size, shape.kv_channels
    query, key = shape.num_attention_heads * head, shape.num_query_groups * head
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (shape.vocab_size, hidden),
        "model.norm": (hidden,),
        "lm_head": (shape.vocab_size, hidden),
    }
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        sizes |= {
            f"{prefix}.input_layernorm": (hidden,),
            f"{prefix}.self_attn.q_proj": (query, hidden),
            f"{prefix}.self_attn.k_proj": (key, hidden),
            f"{prefix}.self_attn.v_proj": (key, hidden),
            f"{prefix}.self_attn.q_norm": (head,),
            f"{prefix}.self_attn.k_norm": (head,),
            f"{prefix}.self_attn.o_proj": (hidden, query),
            f"{prefix}.post_attention_layernorm": (hidden,),
            f"{prefix}.mlp.gate_proj": (ffn, hidden),
            f"{prefix}.mlp.up_proj": (ffn, hidden),
            f"{prefix}.mlp.down_proj": (hidden, ffn),
        }
    draw = torch.Generator().manual_seed(seed)
    return {
        f"{name}.weight": torch.ones(size)
        if len(size) == 1
        else torch.empty(size).normal_(std=INITIAL_STD, generator=draw)
        for name, size in sizes.items()
    }


def read_weights(hf_dir: Path) -> dict[str, Tensor]:
    """Return the checkpoint's tensors by their Hugging Face names."""
    path = hf_dir / WEIGHTS_FILE
    if not path.exists():
        raise CheckpointError(f"no checkpoint in {hf_dir}: {WEIGHTS_FILE} is missing")
    return load_file(path)


def export_weights(directory: Path, weights: Mapping[str, Tensor], *, like: Path) -> Path:
    """Write `weights` to `directory` beside the config and tokenizer of the checkpoint `like`.

    `directory` is either new or an earlier export, whose weights are replaced. A reader sees the old
    checkpoint or the new one. Raises CheckpointError when the file system refuses (a full disk, say); what
    was there before is then untouched and nothing half-written is left.
    """
    if directory.exists():
        with _refusal_named(directory, weights):
            _write_weights(directory, weights)
        return directory
    with _refusal_named(directory, weights), _new_directory(directory) as staging:
        for path in like.iterdir():
            if path.is_file() and path.name != WEIGHTS_FILE and not path.name.startswith("."):
                shutil.copyfile(path, staging / path.name)
        _write_weights(staging, weights)
    return directory


@contextmanager
def _new_directory(directory: Path) -> Iterator[Path]:
    """Yield a directory beside `directory` that takes its name when the block ends without an error."""
    if directory.exists():
        raise CheckpointError(f"{directory} exists already; remove it or choose another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        yield staging
        staging.chmod(0o755)
        staging.rename(directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _write_weights(directory: Path, weights: Mapping[str, Tensor]) -> None:
    payload = save({name: tensor.contiguous() for name, tensor in weights.items()}, metadata={"format": "pt"})
    temporary = directory / f".{WEIGHTS_FILE}-{os.getpid()}"
    try:
        temporary.write_bytes(payload)
        temporary.replace(directory / WEIGHTS_FILE)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _refusal_named(directory: Path, weights: Mapping[str, Tensor]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        needed_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        raise CheckpointError(
            f"cannot write the weights ({needed_bytes:,} bytes) to {directory}: {error.strerror}; "
            "free space there or set run_dir to another disk"
        ) from error
