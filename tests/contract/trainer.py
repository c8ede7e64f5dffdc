"""The part of slime's trainer around midstream's hook, on data whose notes have crossed processes.

A script for the Python of the host's own environment: `python trainer.py DATA.pickle RESULT.json`. Each rank is a
process of its own; Megatron's groups, slime's slices, advantages, whitening and logging are the real ones. What is not
there is the model: its log-probs come with the data.

DATA: `args`, a dict of flags; `data`, slime's rollout data with whole responses; `ranks`, of context parallelism.
RESULT: by rank the advantages of each sample, and what slime logged.
"""

import json
import multiprocessing
import pickle
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

SLICED = ("log_probs", "rollout_log_probs")


def rank_of(rank: int, given: dict[str, Any], folder: Path, found: Any) -> None:
    import torch
    from megatron.core import mpu
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
    from slime.backends.megatron_utils.loss import compute_advantages_and_returns
    from slime.observability import train_metric_utils
    from slime.utils.misc import load_function

    size = given["ranks"]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=size
    )
    mpu.initialize_model_parallel(context_parallel_size=size, create_gloo_process_groups=True)
    args, data = Namespace(**given["args"]), given["data"]
    for key in SLICED:
        lengths = zip(data[key], data["total_lengths"], data["response_lengths"], strict=True)
        data[key] = [slice_log_prob_with_cp(torch.tensor(values), *each) for values, *each in lengths]
    data["loss_masks"] = [torch.tensor(mask, dtype=torch.int32) for mask in data["loss_masks"]]
    data["global_batch_sizes"] = [len(data["loss_masks"])]
    logged: dict[str, float] = {}
    train_metric_utils.logging_utils.log = lambda args, metrics, step_key: logged.update(metrics)

    # What slime's actor does between a step's log-probs and its loss.
    compute_advantages_and_returns(args, data)
    load_function(args.rollout_data_postprocess_path)(args, 0, data)
    train_metric_utils.log_rollout_data(0, args, data)

    found.put((rank, [values.tolist() for values in data["advantages"]], logged))
    torch.distributed.destroy_process_group()


def main() -> None:
    given = pickle.loads(Path(sys.argv[1]).read_bytes())
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    folder = Path(sys.argv[2]).parent
    ranks = [
        context.Process(target=rank_of, args=(rank, given, folder, found)) for rank in range(given["ranks"])
    ]
    for process in ranks:
        process.start()
    results = sorted(found.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join()
    logged = next(metrics for _, _, metrics in results if metrics)
    Path(sys.argv[2]).write_text(
        json.dumps({"advantages": [values for _, values, _ in results], "logged": logged})
    )


if __name__ == "__main__":
    main()
