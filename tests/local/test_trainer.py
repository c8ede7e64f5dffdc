"""The trainer: its loss against numbers worked out by hand, and a step on slime's rollout data."""

import copy
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from midstream.conf.schema import ModelConfig, TrainerConfig
from midstream.local.loss import clipped_policy_loss
from midstream.local.model.checkpoint import build_hf_checkpoint, read_weights
from midstream.local.trainer import Trainer, TrainingDiverged

CONFIG = TrainerConfig(lr=1e-3, num_minibatches=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = ModelConfig(
        hidden_size=32, ffn_hidden_size=64, num_layers=1, num_attention_heads=2, num_query_groups=1
    )
    return build_hf_checkpoint(tmp_path_factory.mktemp("trainer") / "fresh", model)


@pytest.fixture
def data(checkpoint: Path) -> dict[str, Any]:
    """Four ragged samples, some of whose response tokens are the environment's; log-probs are fresh."""
    draw = torch.Generator().manual_seed(0)
    responses = [6, 9, 3, 5]
    tokens = [torch.randint(5, 128, (n + 2,), generator=draw).tolist() for n in responses]
    data = {
        "tokens": tokens,
        "total_lengths": [len(t) for t in tokens],
        "response_lengths": responses,
        "loss_masks": [[1, 1, 0] + [1] * (n - 3) for n in responses],
        "rewards": [1.0, -1.0, 0.5, 0.0],
    }
    data["rollout_log_probs"] = [t.tolist() for t in Trainer(CONFIG, checkpoint).log_probs(data)]
    return data


@pytest.mark.parametrize(
    ("old", "new", "advantage", "loss", "slope"),
    [
        # (probabilities) ratio 1.25 inside the clip: loss -ratio * A, slope -ratio * A
        (0.4, 0.5, 1.0, -1.25, -1.25),
        # ratio 1.5, better than wanted: clipped at 1.28, no gradient
        (0.4, 0.6, 1.0, -1.28, 0.0),
        # ratio 0.5, a good token that became rarer: not clipped
        (0.4, 0.2, 1.0, -0.5, -0.5),
        # ratio 0.5, a bad token that is rarer already: clipped at 0.8, no gradient
        (0.4, 0.2, -1.0, 0.8, 0.0),
        # ratio 1.5, a bad token that became likelier: not clipped
        (0.4, 0.6, -2.0, 3.0, 3.0),
    ],
)
def test_loss_of_two_tokens(old: float, new: float, advantage: float, loss: float, slope: float) -> None:
    log_probs = torch.tensor([math.log(new), math.log(0.9)], requires_grad=True)
    old_log_probs = torch.tensor([math.log(old), math.log(0.1)])
    mask = torch.tensor([1.0, 0.0])
    result = clipped_policy_loss(
        log_probs, old_log_probs, torch.full((2,), advantage), mask, eps_low=0.2, eps_high=0.28
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(loss)
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([slope, 0.0])
    assert result.clipped_tokens.item() == float(slope == 0.0)
    assert result.ratio_deviation.item() == pytest.approx(abs(new / old - 1.0))


def test_loss_is_divided_by_all_action_tokens(checkpoint: Path, data: dict[str, Any]) -> None:
    # Fresh log-probs: every ratio is 1. Action tokens: 5, 8, 2 and 4.
    metrics = Trainer(CONFIG, checkpoint).train(0, data)
    assert metrics["loss"] == pytest.approx(-(1.0 * 5 - 1.0 * 8 + 0.5 * 2) / 19, abs=1e-6)
    assert metrics["ratio_deviation"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == 0.0


def test_samples_without_advantage_weigh_in_the_denominator(checkpoint: Path, data: dict[str, Any]) -> None:
    with_all = Trainer(CONFIG, checkpoint).train(0, copy.deepcopy(data))
    without_last = {key: values[:3] for key, values in data.items()}
    with_three = Trainer(CONFIG, checkpoint).train(0, without_last)
    assert with_three["grad_norm"] / with_all["grad_norm"] == pytest.approx(19 / 15, rel=1e-4)


def test_a_step_favours_what_was_rewarded(checkpoint: Path, data: dict[str, Any]) -> None:
    trainer = Trainer(CONFIG, checkpoint)
    trainer.train(0, data)
    gains = [
        ((new - old) * torch.tensor(mask)).sum().item()
        for new, old, mask in zip(trainer.log_probs(data), data["log_probs"], data["loss_masks"], strict=True)
    ]
    assert gains[0] > 0 > gains[1]


def test_tokens_of_the_environment_do_not_teach(checkpoint: Path, data: dict[str, Any]) -> None:
    expected = Trainer(CONFIG, checkpoint).train(0, copy.deepcopy(data))
    for log_probs in data["rollout_log_probs"]:
        log_probs[2] = 0.0  # what the hook writes for a token that the model did not make
    assert Trainer(CONFIG, checkpoint).train(0, data) == expected


def test_log_probs_are_those_of_the_response(checkpoint: Path, data: dict[str, Any]) -> None:
    log_probs = Trainer(CONFIG, checkpoint).log_probs(data)
    assert [len(values) for values in log_probs] == data["response_lengths"]
    alone = Trainer(CONFIG, checkpoint).log_probs({key: values[2:3] for key, values in data.items()})
    assert torch.allclose(log_probs[2], alone[0], atol=1e-6)
    # The same tokens with one more of them counted as response: the earlier ones move by one place.
    longer = data | {"response_lengths": [n + 1 for n in data["response_lengths"]]}
    assert torch.equal(Trainer(CONFIG, checkpoint).log_probs(longer)[1][1:], log_probs[1])


def test_temperature_flattens_the_distribution(checkpoint: Path, data: dict[str, Any]) -> None:
    hot = Trainer(CONFIG, checkpoint, temperature=1e6).log_probs(data)
    assert all(torch.allclose(t, torch.full_like(t, -math.log(128)), atol=1e-4) for t in hot)


def test_training_is_reproducible(checkpoint: Path, data: dict[str, Any], tmp_path: Path) -> None:
    config = TrainerConfig(lr=1e-3, num_minibatches=2)
    metrics, weights = [], []
    for name in ("first", "second"):
        trainer = Trainer(config, checkpoint)
        metrics.append([trainer.train(step, copy.deepcopy(data)) for step in range(3)])
        weights.append(read_weights(trainer.export(tmp_path / name)))
    assert metrics[0] == metrics[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_load_goes_back_with_a_fresh_optimizer(checkpoint: Path, data: dict[str, Any]) -> None:
    trainer = Trainer(CONFIG, checkpoint)
    first = [trainer.train(step, copy.deepcopy(data)) for step in range(2)]
    assert first[0] != first[1]
    trainer.load(checkpoint)
    assert [trainer.train(step, copy.deepcopy(data)) for step in range(2)] == first


def test_the_postprocess_hook_sees_and_sets_advantages(checkpoint: Path, data: dict[str, Any]) -> None:
    seen = {}

    def mute(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        seen.update(rollout_data, args=args, rollout_id=rollout_id)
        rollout_data["advantages"] = [torch.zeros(n) for n in rollout_data["response_lengths"]]

    args = Namespace(custom="yes")
    metrics = Trainer(CONFIG, checkpoint, args=args, postprocess=mute).train(3, data)
    assert (seen["args"], seen["rollout_id"]) == (args, 3)
    assert seen["advantages"][1].tolist() == [-1.0] * 9
    assert [len(t) for t in seen["log_probs"]] == data["response_lengths"]
    assert metrics["optimizer_steps"] == 0


@pytest.mark.parametrize("key", ["loss_masks", "rollout_log_probs"])
def test_disagreeing_lengths_are_named(key: str, checkpoint: Path, data: dict[str, Any]) -> None:
    data[key][1] = data[key][1][:-1]
    with pytest.raises(ValueError, match=f"sample 1 has 8 {key} for 9 response tokens"):
        Trainer(CONFIG, checkpoint).train(0, data)


def test_a_gradient_that_is_not_finite_is_an_error(checkpoint: Path, data: dict[str, Any]) -> None:
    data["rollout_log_probs"][0][0] = math.nan
    with pytest.raises(TrainingDiverged, match="nan at rollout 5"):
        Trainer(CONFIG, checkpoint).train(5, data)
