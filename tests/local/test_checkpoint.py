"""Checkpoints of a run: whole or absent, and a trainer that goes on from one as if it had never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch

from midstream.conf.schema import ModelConfig, TrainerConfig
from midstream.local.checkpoint import LATEST_FILE, Checkpoints
from midstream.local.model.checkpoint import build_hf_checkpoint, read_weights
from midstream.local.model.shape import CheckpointError
from midstream.local.trainer import Trainer

CONFIG = TrainerConfig(lr=1e-3, num_minibatches=1)


class Killed(Exception):
    """Stands for a kill: nothing after it happens."""


class Source:
    """A data source that notes what it is asked for, and may be killed in a save."""

    def __init__(self, dies_in: int | None = None) -> None:
        self.saved: list[int] = []
        self.loaded: list[int | None] = []
        self._dies_in = dies_in

    def save(self, rollout_id: int) -> None:
        if rollout_id == self._dies_in:
            raise Killed
        self.saved.append(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        self.loaded.append(rollout_id)


def fresh_model(directory: Path, hidden_size: int = 32) -> Path:
    model = ModelConfig(
        hidden_size=hidden_size, ffn_hidden_size=64, num_layers=1, num_attention_heads=2, num_query_groups=1
    )
    return build_hf_checkpoint(directory, model)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fresh_model(tmp_path_factory.mktemp("model") / "fresh")


@pytest.fixture
def trainer(fresh: Path) -> Trainer:
    return Trainer(CONFIG, fresh)


def batch(step: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(step)
    return {
        "tokens": [torch.randint(5, 128, (10,), generator=draw).tolist() for _ in range(4)],
        "total_lengths": [10] * 4,
        "response_lengths": [8] * 4,
        "loss_masks": [[1] * 8] * 4,
        "rewards": [1.0, -1.0, 0.5, -0.5],
        "rollout_log_probs": [[-4.0] * 8] * 4,
    }


def weights(trainer: Trainer, directory: Path) -> dict[str, torch.Tensor]:
    return read_weights(trainer.export(directory))


def test_a_resumed_trainer_takes_the_same_steps(trainer: Trainer, fresh: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=1)
    trainer.train(0, batch(0))
    checkpoints.save(0, trainer, Source())
    drawn = torch.rand(3)
    trainer.train(1, batch(1))

    resumed, source = Trainer(CONFIG, fresh), Source()
    assert checkpoints.load(resumed, source) == 1
    assert torch.equal(torch.rand(3), drawn)
    resumed.train(1, batch(1))
    assert source.loaded == [0]
    expected = weights(trainer, tmp_path / "uninterrupted")
    found = weights(resumed, tmp_path / "resumed")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_without_a_checkpoint_a_run_begins_at_step_0(trainer: Trainer, tmp_path: Path) -> None:
    source = Source()
    assert Checkpoints(tmp_path / "checkpoints", every=1).load(trainer, source) == 0
    assert source.loaded == [None]


@pytest.mark.parametrize(("every", "due"), [(None, []), (1, [0, 1, 2, 3, 4]), (2, [1, 3])])
def test_checkpoints_are_due_after_every_so_many_steps(
    every: int | None, due: list[int], tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, every)
    assert [step for step in range(5) if checkpoints.is_due(step)] == due


def test_a_checkpoint_counts_when_the_data_source_is_saved_too(trainer: Trainer, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, every=1)
    checkpoints.save(0, trainer, Source())
    with pytest.raises(Killed):
        checkpoints.save(1, trainer, Source(dies_in=1))
    assert checkpoints.latest() == 0
    assert Checkpoints(tmp_path, every=1).load(trainer, Source()) == 1


def test_the_last_two_are_kept_and_none_of_a_history_that_was_taken_back(
    trainer: Trainer, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, every=1)
    for step in range(5):
        checkpoints.save(step, trainer, Source())
    (tmp_path / LATEST_FILE).write_text("3")
    checkpoints.save(2, trainer, Source())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", LATEST_FILE]
    checkpoints.save(3, trainer, Source())
    checkpoints.save(4, trainer, Source())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4", LATEST_FILE]


def test_what_a_kill_left_half_written_is_replaced(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / ".0").mkdir()
    (tmp_path / ".0" / "trainer.pt").write_bytes(b"half")
    Checkpoints(tmp_path, every=1).save(0, trainer, Source())
    assert Checkpoints(tmp_path, every=1).load(trainer, Source()) == 1


@pytest.mark.parametrize("content", [b"", b"no checkpoint", None])
def test_a_damaged_checkpoint_is_named_with_what_to_do(
    content: bytes | None, trainer: Trainer, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, every=1)
    checkpoints.save(0, trainer, Source())
    path = tmp_path / "0" / "trainer.pt"
    path.write_bytes(content) if content is not None else path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path} cannot be read.*{LATEST_FILE}"):
        checkpoints.load(trainer, Source())


def test_a_checkpoint_of_another_model_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    other = Trainer(CONFIG, fresh_model(tmp_path / "other", hidden_size=64))
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=1)
    checkpoints.save(0, other, Source())
    with pytest.raises(CheckpointError, match="of another model"):
        checkpoints.load(trainer, Source())


def test_a_damaged_mark_of_the_newest_is_named(tmp_path: Path) -> None:
    (tmp_path / LATEST_FILE).write_text("seven")
    with pytest.raises(CheckpointError, match=rf"{LATEST_FILE} holds 'seven': write"):
        Checkpoints(tmp_path, every=1).latest()


def test_a_folder_that_cannot_be_written_is_named(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints", every=1)
    with pytest.raises(CheckpointError, match="cannot write a checkpoint to .*set run_dir"):
        checkpoints.save(0, trainer, Source())
