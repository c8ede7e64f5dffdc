"""The prompts of the local job, in epochs, with slime's interface."""

import copy
import json
import random
from argparse import Namespace
from pathlib import Path

from midstream.conf.files import replace_file
from midstream.envs.tasks import load_tasks
from midstream.local.sample import Sample

_POSITION = ("epoch_id", "sample_offset", "sample_group_index")


class PromptsError(Exception):
    """The prompts' position is not there, or damaged."""


class Dataset:
    """The samples in the order of an epoch."""

    def __init__(self, samples: list[Sample], seed: int) -> None:
        self.samples = samples
        self._origin, self._seed = samples, seed

    def __len__(self) -> int:
        return len(self.samples)

    def shuffle(self, epoch: int) -> None:
        """Bring them into the order of an epoch, the same in every process."""
        order = list(range(len(self._origin)))
        random.Random(self._seed + epoch).shuffle(order)
        self.samples = [self._origin[index] for index in order]


class RolloutDataSource:
    """Hands out groups of ``args.n_samples_per_prompt`` samples; every epoch in an order of its own.

    ``sample_offset`` is the position in ``dataset.samples`` of the next one.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        samples = [
            Sample(prompt=task.prompt, label=task.label, metadata=dict(task.metadata))
            for task in load_tasks(Path(args.prompt_data))
        ]
        self.dataset = Dataset(samples, args.rollout_seed)
        self.epoch_id = 0
        self.sample_offset = 0
        self.sample_group_index = 0
        self._order()

    def __len__(self) -> int:
        return len(self.dataset)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next ``num_samples`` groups."""
        return [self._next_group() for _ in range(num_samples)]

    def _order(self) -> None:
        if self._args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)

    def _next_group(self) -> list[Sample]:
        if self.sample_offset >= len(self.dataset):
            self.epoch_id += 1
            self.sample_offset = 0
            self._order()
        size = self._args.n_samples_per_prompt
        group = [copy.deepcopy(self.dataset.samples[self.sample_offset]) for _ in range(size)]
        for member, sample in enumerate(group):
            sample.group_index = self.sample_group_index
            sample.index = self.sample_group_index * size + member
        self.sample_offset += 1
        self.sample_group_index += 1
        return group

    def save(self, rollout_id: int) -> None:
        """Save the position under ``args.save``."""
        if self._args.save is None:
            return
        path = _state_path(self._args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({name: getattr(self, name) for name in _POSITION}).encode())

    def load(self, rollout_id: int | None = None) -> None:
        """Go on from the position that ``save(rollout_id)`` left under ``args.load``.

        Raises:
            PromptsError: it cannot be read.
        """
        if self._args.load is None or rollout_id is None:
            return
        path = _state_path(self._args.load, rollout_id)
        try:
            position = json.loads(path.read_text())
            self.epoch_id, self.sample_offset, self.sample_group_index = (int(position[n]) for n in _POSITION)
            self._order()
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise PromptsError(
                f"{path}, the position of the prompts at checkpoint {rollout_id}, cannot be read "
                f"({type(error).__name__}: {error}): go on from another checkpoint"
            ) from error


def _state_path(folder: str, rollout_id: int) -> Path:
    return Path(folder) / "rollout" / f"prompts_{rollout_id}.json"
