"""The command line of a host's training job, read by the host's own parser."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

# A host takes a rollout's GPUs from its placement group and starts an engine on each, except where they
# are placeholders. That leaves the engine to us, and everything else to the host.
_ONE_ENGINE_ELSEWHERE = {
    "sglang": [{"name": "default", "server_groups": [{"worker_type": "placeholder", "num_gpus": 1}]}]
}


def parse_host_args(
    host: str,
    checkpoint: Path,
    router: tuple[str, int],
    flags: Mapping[str, Any],
    layer: Mapping[str, Any],
    run_dir: Path,
) -> Namespace:
    """Return what `host` makes of `flags` (names without dashes) and of the layer's settings.

    The model's flags come from the checkpoint's `config.json`, since a host compares the two.
    """
    ip, port = router
    own = {
        "hf_checkpoint": checkpoint,
        "sglang_router_ip": ip,
        "sglang_router_port": port,
        "sglang_config": _write(run_dir / "sglang.yaml", _ONE_ENGINE_ELSEWHERE),
        "custom_config_path": _write(run_dir / "custom.yaml", {"midstream": dict(layer)}),
        "save_debug_rollout_data": run_dir / "samples" / "{rollout_id}.pt",
        "save": run_dir / "checkpoints",
        "save_interval": 1,
        "num_gpus_per_node": 1,
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 1,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "micro_batch_size": 1,
    }
    sys.argv = ["train.py", *_command_line(_model_flags(checkpoint) | own | dict(flags))]
    return import_module(f"{host}.utils.arguments").parse_args()


def _model_flags(checkpoint: Path) -> dict[str, Any]:
    config = json.loads((checkpoint / "config.json").read_text())
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "group_query_attention": True,
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config["head_dim"],
        "vocab_size": config["vocab_size"],
        "rotary_base": int(config["rope_parameters"]["rope_theta"]),
        "norm_epsilon": config["rms_norm_eps"],
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        "seq_length": config["max_position_embeddings"],
        "max_position_embeddings": config["max_position_embeddings"],
    }


def _command_line(flags: Mapping[str, Any]) -> Iterator[str]:
    for name, value in flags.items():
        if value is False or value is None:
            continue
        yield f"--{name.replace('_', '-')}"
        if value is not True:
            yield str(value)


def _write(path: Path, content: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))  # JSON is YAML
    return path
