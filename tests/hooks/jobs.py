"""Jobs of a host of slime's shape, one after another on one run directory."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from midstream.hooks.slime.data_source import DataSource
from midstream.hooks.slime.log import log_rollout
from midstream.hooks.slime.sample import store
from midstream.local.sample import Sample
from tests.hooks.host import host_args
from tests.hooks.played import play
from tests.hooks.scripted import NumberEnvironments

TASKS = 6
MEMBERS = 2


class Environments(NumberEnvironments):
    """What the job's settings name, with a store that holds what a test says."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.needed: Collection[str] = ()
        self.missing: frozenset[str] = frozenset()

    def adopt(self, needed: Collection[str]) -> frozenset[str]:
        self.needed = needed
        return self.missing


class Jobs:
    """One job after another on one run directory."""

    def __init__(self, folder: Path) -> None:
        task = {"prompt": "7", "metadata": {"files": {}, "pre_commands": [], "eval_cmd": "true"}}
        self.run_dir = folder / "run"
        self.args = host_args(
            folder,
            [task | {"label": str(number)} for number in range(TASKS)],
            save=str(folder / "checkpoint"),
            load=str(folder / "checkpoint"),
            sglang_router_port=hash(folder) % 60_000,  # an engine of its own for each test
            midstream={
                "run_dir": str(self.run_dir),
                "resume_policy": "continue",
                "environment": {"factory": f"{__name__}:Environments"},
            },
        )
        self.source: DataSource | None = None

    def start(self, load: int | None = None) -> DataSource:
        """A job; the one before is dead."""
        self.end()
        self.source = DataSource(self.args)
        if load is not None:
            self.source.load(load)
        return self.source

    def end(self) -> None:
        if self.source is not None:
            self.source.close()

    def position(self, rollout_id: int, taken: int = 0) -> None:
        """A state of the host's own prompts, after so many groups."""
        path = Path(self.args.load) / "rollout" / f"prompts_{rollout_id}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        epoch, offset = divmod(taken, TASKS)
        position = {"epoch_id": epoch, "sample_offset": offset, "sample_group_index": taken}
        path.write_text(json.dumps(position))

    def train(self, rollout_id: int, *groups: list[Any]) -> None:
        """What the host says of the groups that it hands to its trainer."""
        samples = [
            s
            for group in groups
            for member in group
            for s in (member if isinstance(member, list) else [member])
        ]
        log_rollout(rollout_id, self.args, samples, None, 1.0)


def numbers(groups: list[list[Any]]) -> list[int]:
    """The host's numbers of groups."""
    return [next(iter(group)).group_index for group in groups]


def end(sample: Sample, reward: float = 1.0) -> None:
    """What our generate leaves of a rollout that has come to its end."""
    rollout = play(sample, (3, ""))
    rollout.status, rollout.reward = type(rollout.status).COMPLETED, reward
    store(sample, rollout)


def finish(*groups: list[Any]) -> None:
    """Have all members end."""
    for group in groups:
        for sample in group:
            end(sample)


def streamed(sample: Sample, status: Sample.Status = Sample.Status.ABORTED) -> None:
    """What a generate function of the host's own leaves: two tokens of the model around one of a tool."""
    sample.tokens = [13, 1, 9, 1]
    sample.response, sample.response_length = "add obs add", 3
    sample.loss_mask, sample.rollout_log_probs = [1, 0, 1], [-0.5, 0.0, -0.25]
    sample.weight_versions, sample.status = ["4"], status
