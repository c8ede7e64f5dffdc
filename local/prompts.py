"""The prompts of the local job, in epochs, with slime's interface."""

import copy
import json
import random
from argparse import Namespace
from pathlib import Path

from midstream.envs.durable import replace_file
from midstream.envs.tasks import load_tasks
from midstream.local.sample import Sample


class PromptsError(Exception):
    """The prompts' position is not there, or damaged."""


class RolloutDataSource:
    """Hands out groups of ``args.n_samples_per_prompt`` samples; every epoch in an order of its own."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self.dataset = [
            Sample(prompt=task.prompt, label=task.label, metadata=dict(task.metadata))
            for task in load_tasks(Path(args.prompt_data))
        ]
        self._taken = 0  # prompts handed out since the run began

    def __len__(self) -> int:
        return len(self.dataset)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next ``num_samples`` groups."""
        return [self._next_group() for _ in range(num_samples)]

    def _next_group(self) -> list[Sample]:
        epoch, position = divmod(self._taken, len(self.dataset))
        order = list(range(len(self.dataset)))
        if self._args.rollout_shuffle:
            random.Random(self._args.rollout_seed + epoch).shuffle(order)
        size = self._args.n_samples_per_prompt
        group = [copy.deepcopy(self.dataset[order[position]]) for _ in range(size)]
        for member, sample in enumerate(group):
            sample.group_index = self._taken
            sample.index = self._taken * size + member
        self._taken += 1
        return group

    def save(self, rollout_id: int) -> None:
        """Save the position under ``args.save``."""
        if self._args.save is None:
            return
        path = _state_path(self._args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({"taken": self._taken}).encode())

    def load(self, rollout_id: int | None = None) -> None:
        """Go on from the position that ``save(rollout_id)`` left under ``args.load``.

        Raises:
            PromptsError: it cannot be read.
        """
        if self._args.load is None or rollout_id is None:
            return
        path = _state_path(self._args.load, rollout_id)
        try:
            self._taken = json.loads(path.read_text())["taken"]
        except (OSError, ValueError, LookupError) as error:
            raise PromptsError(
                f"{path}, the position of the prompts at checkpoint {rollout_id}, cannot be read "
                f"({type(error).__name__}: {error}): go on from another checkpoint"
            ) from error


def _state_path(folder: str, rollout_id: int) -> Path:
    return Path(folder) / "rollout" / f"prompts_{rollout_id}.json"
