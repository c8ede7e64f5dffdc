"""Checkpoints of a run: what a resumed one needs to go on as if nothing had happened.

`<folder>/<step>/trainer.pt` holds the trainer after that step, and what the data source saves lies beside it.
A file, named as Megatron names it, says which checkpoint is the newest. It is written last: before that, what is
new does not count.
"""

import io
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from midstream.conf.files import replace_file
from midstream.envs.store.packs import sync_directory
from midstream.local.model.shape import CheckpointError
from midstream.local.trainer import Trainer

KEPT = 2
LATEST_FILE = "latest_checkpointed_iteration.txt"

_TRAINER_FILE = "trainer.pt"


class Checkpoints:
    """The checkpoints of one run, one after every `every` steps; None: never.

    A kill, or a power cut, at any moment leaves the last one whole.
    """

    def __init__(self, folder: Path, every: int | None) -> None:
        self._folder = folder
        self._every = every

    def is_due(self, step: int) -> bool:
        """Whether step number `step`, from 0, is followed by a checkpoint."""
        return self._every is not None and (step + 1) % self._every == 0

    def latest(self) -> int | None:
        """The step of the newest checkpoint. Raises CheckpointError where the file that says so is damaged."""
        path = self._folder / LATEST_FILE
        try:
            text = path.read_text()
            return int(text)
        except FileNotFoundError:
            return None
        except ValueError:
            raise CheckpointError(
                f"{path} holds {text!r}: write the step of a checkpoint into it, the name of a folder beside it"
            ) from None

    def save(self, step: int, trainer: Trainer, data_source: Any) -> None:
        """Write the checkpoint of `step`; older ones than the last KEPT go.

        Raises CheckpointError where the disk refuses; the one before is then still the newest.
        """
        with self._refusal_named():
            self._save_trainer(step, trainer)
            data_source.save(step)
            replace_file(self._folder / LATEST_FILE, str(step).encode())
            self._remove_others(step)

    def load(self, trainer: Trainer, data_source: Any) -> int:
        """Take up the newest checkpoint and return the step that comes next; 0 where there is none.

        Raises CheckpointError where it cannot be read.
        """
        step = self.latest()
        if step is not None:
            path = self._folder / str(step) / _TRAINER_FILE
            try:
                trainer.load_state_dict(torch.load(path, weights_only=True))
            except (OSError, EOFError, RuntimeError, KeyError, ValueError, pickle.UnpicklingError) as error:
                # What PyTorch says of a damaged file is about security, and long.
                raise CheckpointError(
                    f"{path} cannot be read, or is of another model ({type(error).__name__}): write the step of an "
                    f"older checkpoint into {self._folder / LATEST_FILE}, or remove that file to begin at step 0"
                ) from error
        data_source.load(step)
        return 0 if step is None else step + 1

    def _save_trainer(self, step: int, trainer: Trainer) -> None:
        content = io.BytesIO()
        torch.save(trainer.state_dict(), content)
        staging, directory = self._folder / f".{step}", self._folder / str(step)
        # Both are of a run that was killed, and was taken back to before this step.
        for left in (staging, directory):
            shutil.rmtree(left, ignore_errors=True)
        staging.mkdir(parents=True)
        replace_file(staging / _TRAINER_FILE, content.getvalue())
        staging.rename(directory)
        sync_directory(self._folder)

    def _remove_others(self, step: int) -> None:
        steps = sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdecimal())
        kept = [earlier for earlier in steps if earlier <= step][-KEPT:]
        for other in set(steps).difference(kept):
            shutil.rmtree(self._folder / str(other))

    @contextmanager
    def _refusal_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"cannot write a checkpoint to {self._folder}: {error.strerror}; free space there or set run_dir to "
                "another disk"
            ) from error
