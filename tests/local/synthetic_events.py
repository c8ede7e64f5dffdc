"""Writes the events of plausible runs, so that summary and report can be tested without training anything."""

import random
from pathlib import Path

from midstream.local.events import EVENTS_FOLDER, EventWriter

BATCH = 32
OVERSAMPLED = 48
TRAIN_S = 0.9
PUSH_S = 0.25
MACHINE = {
    "cpu": "Example CPU 3000",
    "cores": 2,
    "memory_bytes": 8 << 30,
    "gpus": [],
    "system": "Linux 6.1",
    "python": "3.11.7",
    "versions": {"midstream": "0.1.0", "sglang": "0.5.23", "megatron-core": "0.16.1", "torch": "2.13.0+cpu"},
}


class Rollout:
    def __init__(self, rng: random.Random, version: int) -> None:
        self.turns = min(12, 3 + int(rng.paretovariate(1.6)))
        self.tokens = 3 * self.turns + rng.randint(0, 3)
        self.seconds = 0.12 * self.turns + 0.25 * rng.paretovariate(1.5)
        self.done_s = 0.0
        self.version = version

    def done_tokens(self) -> int:
        return min(self.tokens, int(self.tokens * self.done_s / self.seconds))


def write_run(
    run_dir: Path, strategy: str, *, steps: int = 24, seed: int = 0, end: str | None = "ok"
) -> None:
    """One strategy's run; `end` is the status it records, None for a run that was killed."""
    rng = random.Random(f"{strategy}-{seed}")
    clock, version, skill = 0.4, 0, 0.22
    buffer: list[Rollout] = []
    with EventWriter(run_dir / strategy / EVENTS_FOLDER) as events:
        events.write(
            "run",
            strategy=strategy,
            seed=seed,
            start_unix=1_760_000_000.0,
            rollout_batch_size=8,
            n_samples_per_prompt=4,
            machine=MACHINE,
            command=["midstream", "compare", f"steps={steps}"],
        )
        for step in range(steps):
            wanted = BATCH if strategy == "wait" else OVERSAMPLED
            flying = buffer + [Rollout(rng, version) for _ in range(wanted - len(buffer))]
            buffer = []
            flying.sort(key=lambda rollout: rollout.seconds - rollout.done_s)
            trained, cut = flying[:BATCH], flying[BATCH:]
            seconds = trained[-1].seconds - trained[-1].done_s
            before = {id(rollout): rollout.done_tokens() for rollout in flying}
            resumes = sum(1 for rollout in flying if rollout.done_s > 0)
            occupancy = [
                [
                    round(clock + seconds * tick / 40, 3),
                    sum(1 for r in flying if r.seconds - r.done_s > seconds * tick / 40),
                ]
                for tick in range(40)
            ] + [[clock + seconds, 0]]
            for rollout in cut:
                rollout.done_s += seconds
            generated = sum(rollout.tokens - before[id(rollout)] for rollout in trained)
            generated += sum(rollout.done_tokens() - before[id(rollout)] for rollout in cut)
            wasted = 0
            if strategy == "continue":
                buffer = cut
            else:
                wasted = sum(rollout.done_tokens() for rollout in cut)
                if strategy == "restart":
                    for rollout in cut:
                        rollout.done_s, rollout.version = 0.0, version + 1
                    buffer = cut
            lags = [version - rollout.version for rollout in trained]
            token_lags: dict[int, int] = {}
            for rollout, lag in zip(trained, lags, strict=True):
                old = before[id(rollout)]
                token_lags[0] = token_lags.get(0, 0) + rollout.tokens - old
                if lag and old:
                    token_lags[lag] = token_lags.get(lag, 0) + old
            end_s = clock + seconds
            skill += (0.92 - skill) * (0.05 if strategy == "discard" else 0.075)
            events.write(
                "step",
                step=step,
                version=version,
                rollout_start=clock,
                rollout_end=end_s,
                train_start=end_s + 0.05,
                train_end=end_s + TRAIN_S,
                push_end=end_s + TRAIN_S + PUSH_S,
                reward_mean=sum(rng.random() < skill for _ in trained) / BATCH,
                trained_rollouts=BATCH,
                trained_tokens=sum(rollout.tokens for rollout in trained),
                generated_tokens=generated,
                wasted_tokens=wasted,
                buffered_rollouts=len(buffer),
                buffered_tokens=sum(rollout.done_tokens() for rollout in buffer),
                resumes=resumes if strategy == "continue" else 0,
                restores_checked=resumes if strategy == "continue" else 0,
                restores_bad=0,
                logprob_gap_fresh=rng.uniform(1e-6, 8e-6),
                response_tokens=[rollout.tokens for rollout in trained],
                turns=[rollout.turns for rollout in trained],
                lag_trajectory=lags,
                lag_token={str(lag): count for lag, count in token_lags.items()},
                informative_groups=6,
                groups=8,
                occupancy=occupancy,
                train={"loss": 0.01, "grad_norm": 0.5, "clip_fraction": 0.02},
            )
            if strategy == "restart" and step == steps // 2:
                events.write("alarm", t=end_s, message="the server died (signal 9) and was started again")
            clock = end_s + TRAIN_S + PUSH_S + 0.05
            version += 1
        if end is not None:
            events.write("end", wall_s=clock, status=end)
