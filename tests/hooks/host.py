"""What a job of slime's shape gives to its hooks."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from tests.hooks.scripted import WordTokenizer


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
