"""The warm start: it leaves room to learn, GRPO uses that room, and the cache is whole or absent."""

import itertools
import statistics
from pathlib import Path
from typing import NoReturn

import pytest

from midstream.conf.schema import ModelConfig, TrainerConfig, WarmStartConfig
from midstream.local.model.tokenizer import TOKEN_ID
from midstream.local.tasks.chain_fix import chain_tasks
from midstream.local.trainer import Trainer
from midstream.local.warm_start import action_mask, warm_start
from tests.local.lockstep import Rollout, roll_out, rollout_data, success

TINY = ModelConfig(
    hidden_size=64, ffn_hidden_size=128, num_layers=2, num_attention_heads=2, num_query_groups=1
)
SHORT = WarmStartConfig(steps=2, batch_size=4, lr=1e-3)

GROUPS = 16
SAMPLES_PER_GROUP = 8


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = WarmStartConfig(steps=100, batch_size=32, lr=3e-3)
    return warm_start(TINY, config, cache=tmp_path_factory.mktemp("cache"))


def held_out_success(checkpoint: Path) -> float:
    tasks = chain_tasks(seed=0, difficulty=0.5, split="held_out")
    return success(roll_out(checkpoint, list(itertools.islice(tasks, 256)), seed=1))


def group_normalised(rollouts: list[Rollout]) -> list[float]:
    advantages: list[float] = []
    for start in range(0, len(rollouts), SAMPLES_PER_GROUP):
        group = rollouts[start : start + SAMPLES_PER_GROUP]
        rewards = [float(rollout.world.solved()) for rollout in group]
        mean, deviation = statistics.mean(rewards), statistics.pstdev(rewards)
        advantages += [(reward - mean) / (deviation + 1e-4) for reward in rewards]
    return advantages


def test_it_succeeds_sometimes_and_fails_often(warm: Path) -> None:
    assert 0.1 <= held_out_success(warm) <= 0.35


def test_grpo_learns_from_it(warm: Path, tmp_path: Path) -> None:
    trainer = Trainer(TrainerConfig(lr=3e-4), warm)
    tasks = chain_tasks(seed=0, difficulty=0.5)
    checkpoint, gaps = warm, []
    for step in range(10):
        group_tasks = list(itertools.islice(tasks, GROUPS))
        rollouts = roll_out(checkpoint, [t for t in group_tasks for _ in range(SAMPLES_PER_GROUP)], seed=step)
        data = rollout_data(rollouts, group_normalised(rollouts))
        trainer.train(step, data)
        gaps += [
            abs(ours - theirs)
            for log_probs, rollout in zip(data["log_probs"], rollouts, strict=True)
            for ours, theirs, own in zip(log_probs.tolist(), rollout.log_probs, rollout.mask, strict=True)
            if own
        ]
        checkpoint = trainer.export(tmp_path / "policy")
    assert max(gaps) <= 1e-4  # the trainer and the sampler agree on freshly sampled tokens
    assert held_out_success(checkpoint) >= held_out_success(warm) + 0.2


def test_the_second_call_finds_the_first_ones_result(tmp_path: Path) -> None:
    reported: list[tuple[int, int, float]] = []
    first = warm_start(TINY, SHORT, cache=tmp_path, progress=lambda *report: reported.append(report))
    assert [(done, total) for done, total, _ in reported] == [(1, 2), (2, 2)]
    assert warm_start(TINY, SHORT, cache=tmp_path, progress=refuse) == first
    assert list(tmp_path.iterdir()) == [first]


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (TINY.model_copy(update={"seed": 1}), SHORT),
        (TINY.model_copy(update={"rotary_base": 5000}), SHORT),
        (TINY, SHORT.model_copy(update={"seed": 1})),
        (TINY, SHORT.model_copy(update={"lr": 2e-3})),
    ],
)
def test_what_shapes_the_result_is_in_the_key(
    model: ModelConfig, config: WarmStartConfig, tmp_path: Path
) -> None:
    assert warm_start(TINY, SHORT, cache=tmp_path) != warm_start(model, config, cache=tmp_path)


def test_an_interrupted_warm_start_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        warm_start(TINY, SHORT, cache=tmp_path, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_no_steps_give_the_fresh_model(tmp_path: Path) -> None:
    untrained = warm_start(TINY, SHORT.model_copy(update={"steps": 0}), cache=tmp_path, progress=refuse)
    tasks = list(itertools.islice(chain_tasks(seed=0, difficulty=0.0), 16))
    assert success(roll_out(untrained, tasks, seed=0)) == 0.0


def test_only_the_models_own_words_are_learnt() -> None:
    transcript = "start f3 <act> cat f3 <end> <obs> ok end <act> submit <end>"
    words = transcript.split()
    mask = action_mask([TOKEN_ID[word] for word in words])
    learnt = [word for word, own in zip(words, mask, strict=True) if own]
    assert " ".join(learnt) == "cat f3 <end> submit <end>"


def refuse(*_: object) -> NoReturn:
    raise AssertionError("training ran although there was nothing to train")


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
