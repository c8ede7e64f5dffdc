"""What credit costs: the hook on the trainer's side, and the one that sees whole batches.

First the share of the trainer's hook in a real train step of the local job, whose model is far smaller than any that
users train, so that their share is far smaller too. Then both hooks on a million tokens, on one core, with three
estimators at once, among them the one that needs the trainer's log-probs.

    python benchmarks/credit.py [--json] [--quick]
"""

import copy
import pickle
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from result import publish, target
from rollouts import random_rollout
from rounds import parse_options

from midstream.buffers.rollout import Status
from midstream.conf.compose import compose
from midstream.hooks.slime.credit import apply_credit
from midstream.hooks.slime.rewards import post_process
from midstream.hooks.slime.sample import store
from midstream.local.batch import convert
from midstream.local.model.checkpoint import build_hf_checkpoint
from midstream.local.model.tokenizer import VOCABULARY
from midstream.local.sample import Sample
from midstream.local.trainer import Trainer

ESTIMATORS = ["anchored_shrunk", "lag_decay", "prefix_is"]
GROUP_SIZE = 8
TOP_SHARE, TOP_S = 0.01, 0.5


def main() -> None:
    options = parse_options(__doc__)
    # As long as an agent's rollouts are, and a million tokens in all.
    samples, tokens = (32, 4096) if options.quick else (64, 16_384)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="midstream-credit-") as scratch:
        steps = train_steps(Path(scratch), options.rounds)
        large = large_batches(Path(scratch), options.rounds, samples, tokens)
    per_million = 1e6 / (samples * tokens)
    publish(
        [
            target("hook / train step", [r["hook_s"] / r["step_s"] for r in steps], "share", "<=", TOP_SHARE),
            target(
                "trainer's hook",
                [r["trainer_s"] * per_million for r in large],
                "s per 1M tokens",
                "<=",
                TOP_S,
            ),
            target(
                "rewards hook", [r["rewards_s"] * per_million for r in large], "s per 1M tokens", "<=", TOP_S
            ),
        ],
        [*steps, *large],
        as_json=options.json,
    )


def train_steps(scratch: Path, rounds: int) -> list[dict[str, Any]]:
    """A row for each train step of the demo's model on a batch of the demo's size."""
    job = compose(["job=demo", f"run_dir={scratch}"])
    args = args_of(scratch)
    timed = Timed()
    trainer = Trainer(
        job.trainer, build_hf_checkpoint(scratch / "model", job.model), args=args, postprocess=timed.hook
    )
    count = job.rollout.rollout_batch_size * job.rollout.n_samples_per_prompt
    batch = samples_of(count, 96, prompt_tokens=16, turns=6, vocabulary=len(VOCABULARY))
    rows = []
    for number in range(rounds + 1):
        data = convert(args, copy.deepcopy(batch))
        started = time.perf_counter()
        trainer.train(number, data)
        rows.append(
            {
                "what": "train step",
                "samples": count,
                "step_s": time.perf_counter() - started,
                "hook_s": timed.last_s,
            }
        )
    return rows[1:]  # the first warms up


def large_batches(scratch: Path, rounds: int, count: int, tokens: int) -> list[dict[str, Any]]:
    """A row for each pass of one large batch through both hooks."""
    args = args_of(scratch)
    samples = samples_of(count, tokens)
    rows = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        post_process(args, samples)
        rewards_s = time.perf_counter() - started
        data: dict[str, Any] = {
            "round_number": pickle.loads(
                pickle.dumps([sample.metadata["round_number"] for sample in samples])
            ),
            "total_lengths": [len(sample.tokens) for sample in samples],
            "response_lengths": [sample.response_length for sample in samples],
            "loss_masks": [torch.tensor(sample.loss_mask, dtype=torch.int32) for sample in samples],
            "rollout_log_probs": [torch.tensor(sample.rollout_log_probs) for sample in samples],
            "advantages": [torch.ones(sample.response_length) for sample in samples],
        }
        data["log_probs"] = [values + 0.01 for values in data["rollout_log_probs"]]
        started = time.perf_counter()
        apply_credit(args, 0, data)
        trainer_s = time.perf_counter() - started
        rows.append(
            {
                "what": "large batch",
                "samples": count,
                "tokens": count * tokens,
                "rewards_s": rewards_s,
                "trainer_s": trainer_s,
            }
        )
    return rows[1:]


class Timed:
    """The hook, and how long its last call took."""

    def __init__(self) -> None:
        self.last_s = 0.0

    def hook(self, args: Namespace, rollout_id: int, data: dict[str, Any]) -> None:
        started = time.perf_counter()
        apply_credit(args, rollout_id, data)
        self.last_s = time.perf_counter() - started


def samples_of(count: int, tokens: int, **shape: int) -> list[Sample]:
    """Finished rollouts in groups, with rewards of 0 and 1."""
    samples = []
    for index in range(count):
        rollout = random_rollout(index, tokens, **shape)
        rollout.status, rollout.reward = Status.COMPLETED, float(index % 2)
        sample = Sample(
            group_index=index // GROUP_SIZE,
            index=index,
            tokens=rollout.prompt_tokens + rollout.tokens,
            response_length=len(rollout.tokens),
            loss_mask=list(rollout.loss_mask),
            rollout_log_probs=list(rollout.log_probs),
        )
        store(sample, rollout)
        samples.append(sample)
    return samples


def args_of(scratch: Path) -> Namespace:
    return Namespace(
        midstream={"run_dir": str(scratch), "resume_policy": "anchor", "credit": {"estimators": ESTIMATORS}},
        sglang_router_ip="127.0.0.1",
        sglang_router_port=1,
        custom_reward_post_process_path="midstream.hooks.slime.rewards.post_process",
        rollout_data_postprocess_path="midstream.hooks.slime.credit.apply_credit",
    )


if __name__ == "__main__":
    main()
