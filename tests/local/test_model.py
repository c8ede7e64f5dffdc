"""The small model: its tokenizer, its checkpoint, and that Megatron-core and Hugging Face agree on it."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from midstream.conf.schema import ModelConfig
from midstream.local.model.checkpoint import build_hf_checkpoint, read_weights
from midstream.local.model.convert import hf_to_megatron, megatron_to_hf
from midstream.local.model.policy import Policy
from midstream.local.model.shape import CheckpointError, ModelShape
from tests.local.lockstep import hugging_face_model

# Three heads to a group, and heads that are not hidden_size / heads wide: layouts that a wrong mapping of the
# fused projections cannot survive.
MODEL = ModelConfig(
    hidden_size=64,
    ffn_hidden_size=96,
    num_layers=2,
    num_attention_heads=6,
    num_query_groups=2,
    kv_channels=16,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose matrices are large enough for its predictions to differ from token to token."""
    directory = build_hf_checkpoint(tmp_path_factory.mktemp("model") / "fresh", MODEL)
    weights = read_weights(directory)
    draw = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        scale = 0.2 if weight.dim() == 2 else 0.5
        weights[name] = weight + scale * torch.randn(weight.shape, generator=draw)
    policy = Policy(directory)
    policy.model.load_state_dict(hf_to_megatron(weights, policy.shape), strict=False)
    return policy.export(directory.parent / "random")


@pytest.fixture
def sequences() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(5, 128, (length,), generator=draw).tolist() for length in (40, 33, 7, 2)]


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Files cannot grow past 64 KiB, as on a disk that is nearly full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def reference_log_probs(hf_dir: Path, sequence: list[int]) -> Tensor:
    with torch.no_grad():
        logits = hugging_face_model(hf_dir)(torch.tensor([sequence])).logits[0, :-1]
    return logits.log_softmax(-1)[torch.arange(len(sequence) - 1), sequence[1:]]


def worst_gap(policy: Policy, hf_dir: Path, sequences: list[list[int]]) -> float:
    """Largest difference in nats between a policy and Hugging Face's reading of a checkpoint."""
    with torch.no_grad():
        ours = policy.token_log_probs(sequences)
    gaps = [
        (ours[row, : len(s) - 1] - reference_log_probs(hf_dir, s)).abs().max().item()
        for row, s in enumerate(sequences)
    ]
    return max(gaps)


def test_tokenizer_reads_and_writes_words(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokens = tokenizer.encode("start f3 <act>\n cat   f3 <end>")
    assert len(tokens) == 6
    assert tokens[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(tokens) == "start f3 <act> cat f3 <end>"
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "start f3 cat f3"


def test_words_outside_the_vocabulary_are_unknown(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.encode("Traceback: ok") == [tokenizer.unk_token_id, tokenizer.encode("ok")[0]]


def test_megatron_agrees_with_hugging_face(checkpoint: Path, sequences: list[list[int]]) -> None:
    assert worst_gap(Policy(checkpoint), checkpoint, sequences) <= 1e-5


def swap_gate_and_up(weights: dict[str, Tensor]) -> None:
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    weights[gate], weights[up] = weights[up], weights[gate]


def swap_query_groups(weights: dict[str, Tensor]) -> None:
    query = "model.layers.0.self_attn.q_proj.weight"
    weights[query] = weights[query].roll(MODEL.kv_channels * 3, dims=0)


def swap_query_and_key_norm(weights: dict[str, Tensor]) -> None:
    query, key = (f"model.layers.0.self_attn.{name}_norm.weight" for name in "qk")
    weights[query], weights[key] = weights[key], torch.ones_like(weights[query])


@pytest.mark.parametrize("mistake", [swap_gate_and_up, swap_query_groups, swap_query_and_key_norm])
def test_a_wrong_mapping_would_be_noticed(mistake, checkpoint: Path, sequences: list[list[int]]) -> None:
    policy, weights = Policy(checkpoint), read_weights(checkpoint)
    mistake(weights)
    policy.model.load_state_dict(hf_to_megatron(weights, policy.shape), strict=False)
    assert worst_gap(policy, checkpoint, sequences) > 0.01


def test_mapping_back_restores_every_tensor(checkpoint: Path) -> None:
    weights, shape = read_weights(checkpoint), ModelShape.read(checkpoint)
    restored = megatron_to_hf(hf_to_megatron(weights, shape), shape)
    assert restored.keys() == weights.keys()
    assert all(torch.equal(restored[name], weights[name]) for name in weights)


def test_export_is_what_the_policy_computes(
    checkpoint: Path, sequences: list[list[int]], tmp_path: Path
) -> None:
    policy = Policy(checkpoint)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01)
    exported = policy.export(tmp_path / "exported")
    assert worst_gap(policy, exported, sequences) <= 1e-5
    assert AutoTokenizer.from_pretrained(exported).eos_token == "<end>"


def test_a_second_export_replaces_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    policy = Policy(checkpoint)
    exported = policy.export(tmp_path / "exported")
    files = sorted(path.name for path in exported.iterdir())
    with torch.no_grad():
        policy.parameters()[0].zero_()
    policy.export(exported)
    assert not read_weights(exported)["model.embed_tokens.weight"].any()
    assert sorted(path.name for path in exported.iterdir()) == files


@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_leaves_no_new_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write the weights.*free space"):
        Policy(checkpoint).export(tmp_path / "exported")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_checkpoint(
    checkpoint: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    policy = Policy(checkpoint)
    exported = policy.export(tmp_path / "exported")
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    request.getfixturevalue("small_disk")
    with pytest.raises(CheckpointError):
        policy.export(exported)
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before


def test_the_seed_fixes_the_weights(tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> Tensor:
        model = MODEL.model_copy(update={"seed": seed})
        return read_weights(build_hf_checkpoint(tmp_path / name, model))["lm_head.weight"]

    first = weights("first", 7)
    assert torch.equal(first, weights("again", 7))
    assert not torch.equal(first, weights("other", 8))


def test_a_checkpoint_of_another_shape_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    deeper = MODEL.model_copy(update={"num_layers": 3})
    with pytest.raises(CheckpointError, match="num_layers=3"):
        Policy(checkpoint).load(build_hf_checkpoint(tmp_path / "deeper", deeper))


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path}"):
        Policy(tmp_path)
