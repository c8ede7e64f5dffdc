"""What a job of slime's shape gives to its hooks."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from tests.hooks.scripted import NumberEnvironments, WordTokenizer


def host_args(folder: Path, tasks: list[dict[str, Any]], **settings: Any) -> Namespace:
    """The host's arguments over these tasks, which are written to the folder; groups of two unless told otherwise."""
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    defaults = {
        "prompt_data": str(path),
        "rollout_shuffle": False,
        "rollout_seed": 0,
        "n_samples_per_prompt": 2,
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 4,
        "partial_rollout": True,
        "buffer_filter_path": None,
        "custom_rollout_log_function_path": "midstream.hooks.slime.log.log_rollout",
        "rollout_function_path": "midstream.local.rollout.generate_rollout",
        "save": None,
        "load": None,
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 9,
        "generate_state": Namespace(tokenizer=WordTokenizer(), aborted=False),
    }
    return Namespace(**defaults | settings)


NUMBER_TASK = {"prompt": "7", "label": "1", "metadata": {"files": {}, "pre_commands": [], "eval_cmd": "true"}}


class Environments(NumberEnvironments):
    """What a job's settings name: made from the layer's configuration."""

    def __init__(self, config: Any) -> None:
        super().__init__()


def number_args(folder: Path, layer: dict[str, Any], **settings: Any) -> Namespace:
    """Arguments of a job over four tasks in ``Environments``, with an engine of its own for each test."""
    environment = {"factory": f"{__name__}:Environments"}
    midstream = {"run_dir": str(folder), "environment": environment, **layer}
    port = hash(folder) % 60_000
    return host_args(folder, [NUMBER_TASK] * 4, sglang_router_port=port, midstream=midstream, **settings)


# `add 2` writes a file of that name, `obs` lists them; the words are all that the scripted engine knows.
_SHELL = 'add() { echo more >> "$1"; }\nobs() { ls; }\n'


def file_args(folder: Path, layer: dict[str, Any], *, eval_cmd: str, members: int) -> Namespace:
    """Arguments of a job over one task in a real workspace, in which a file is there at the start."""
    files = {".bashrc": _SHELL, "1": "first\n"}
    midstream = {
        "run_dir": str(folder),
        "environment": {"backend": "store", "isolation": "none"},
        "turns": {"observation_template": "obs {observation}"},
        **layer,
    }
    return host_args(
        folder,
        [{"prompt": "7", "label": "", "metadata": {"files": files, "eval_cmd": eval_cmd}}],
        n_samples_per_prompt=members,
        rollout_batch_size=1,
        over_sampling_batch_size=1,
        midstream=midstream,
    )
