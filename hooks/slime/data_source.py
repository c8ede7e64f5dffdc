"""``--data-source-path midstream.hooks.slime.data_source.DataSource``"""

import logging
import os
import pickle
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midstream.buffers.partial import PartialBuffer, oldest_first
from midstream.buffers.policies import Decision, ResumePolicy, resume_policy
from midstream.buffers.rollout import PartialRollout
from midstream.hooks.slime.host import load_function, running_host
from midstream.hooks.slime.sample import Group, recorded_rollout, rewrite, samples_of, store
from midstream.hooks.slime.settings import layer_of

_logger = logging.getLogger(__name__)


@dataclass
class BufferCounters:
    """What became of unfinished rollouts since the data source was made.

    ``discarded_tokens`` are the model's tokens that went with dropped and restarted rollouts.
    """

    buffered: int = 0
    restarted: int = 0
    dropped: int = 0
    discarded_tokens: int = 0


class DataSource:
    """The host's prompts, and before them the groups that wait to go on.

    What becomes of a group that the host hands back unfinished is the resume policy's choice. The
    host's ``--buffer-filter-path`` chooses which waiting groups go first. ``save`` keeps the waiting
    groups with the host's own state, so that a restart loses no prompt.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._host = running_host(args)
        self._prompts = self._host.load("prompts", "RolloutDataSource")(args)
        self._policy = resume_policy(layer_of(args).resume_policy)
        _check_flags(args, self._policy)
        self._buffer: PartialBuffer[Group] = PartialBuffer(self._select())
        self.counters = BufferCounters()

    @property
    def dataset(self) -> Any:
        """The host's dataset, for hosts that count its prompts."""
        return self._prompts.dataset

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)

    def get_buffer_length(self) -> int:
        """Number of groups that wait to go on."""
        return len(self._buffer)

    @property
    def waiting_groups(self) -> list[Group]:
        """The groups that wait to go on, oldest first; not to be changed."""
        return self._buffer.groups

    def waiting(self) -> list[PartialRollout]:
        """The rollouts that wait to go on, those that have begun."""
        samples = (sample for group in self.waiting_groups for sample in samples_of(group))
        return [rollout for sample in samples if (rollout := recorded_rollout(sample)) is not None]

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return ``num_samples`` groups: those that wait first, then new prompts."""
        groups = self._buffer.take(num_samples)
        if len(groups) < num_samples:
            groups += self._prompts.get_samples(num_samples - len(groups))
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        """Take back groups that the host did not train on.

        Raises:
            ValueError: a group has not ``args.n_samples_per_prompt`` members.
        """
        for group in samples:
            if len(group) != self._args.n_samples_per_prompt:
                raise ValueError(
                    f"a group of {len(group)} came back, expected n_samples_per_prompt="
                    f"{self._args.n_samples_per_prompt}: hand back whole groups"
                )
            if self._keep(group):
                self._buffer.add([group])

    def save(self, rollout_id: int) -> None:
        """Save the host's state and the waiting groups under ``args.save``."""
        if self._args.save is not None:
            self._save_groups(rollout_id)
        # Last, so that a position never stands without the groups that were taken before it.
        self._prompts.save(rollout_id)

    def _save_groups(self, rollout_id: int) -> None:
        path = _buffer_path(self._args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        groups = [_mapped(group, lambda sample: sample.to_dict()) for group in self._buffer.groups]
        with temporary.open("wb") as file:
            pickle.dump(groups, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def load(self, rollout_id: int | None = None) -> None:
        """Go on from what ``save(rollout_id)`` left under ``args.load``."""
        self._prompts.load(rollout_id)
        if self._args.load is None or rollout_id is None:
            return
        path = _buffer_path(self._args.load, rollout_id)
        if not path.exists():
            _logger.warning("%s does not exist: no group waits to go on", path)
            return
        sample_class = self._host.load("samples", "Sample")
        with path.open("rb") as file:
            groups = pickle.load(file)
        self._buffer.groups = [_mapped(group, sample_class.from_dict) for group in groups]

    def _keep(self, group: Group) -> bool:
        """Apply the policy to each member; whether the group waits."""
        begun = [
            (sample, rollout)
            for sample in samples_of(group)
            if (rollout := recorded_rollout(sample)) is not None
        ]
        decisions = [self._policy.decide(rollout) for _, rollout in begun]
        if Decision.DROP in decisions or self._policy.unfinished is Decision.DROP:
            self.counters.dropped += len(group)
            self.counters.discarded_tokens += sum(rollout.generated_tokens for _, rollout in begun)
            return False
        for (sample, rollout), decision in zip(begun, decisions, strict=True):
            if decision is Decision.RESTART:
                self.counters.restarted += 1
                self.counters.discarded_tokens += rollout.generated_tokens
                rollout.restart()
                rewrite(sample, rollout, response="")
                store(sample, rollout)
        self.counters.buffered += len(group)
        return True

    def _select(self) -> Any:
        path = self._args.buffer_filter_path
        if path is None:
            return oldest_first
        chosen = load_function(path)
        # slime passes None for the rollout id, and its filters expect no more.
        return lambda groups, count: chosen(self._args, None, groups, count)


def _check_flags(args: Namespace, policy: ResumePolicy) -> None:
    """Raise ValueError where the host's flags would make the policy do something else than it says."""
    setting = f"midstream.resume_policy={policy.name}"
    needs_rest = policy.unfinished is not Decision.DROP and not policy.waits
    if needs_rest and not args.partial_rollout:
        raise ValueError(f"{setting} needs --partial-rollout: without it the host drops what is unfinished")
    if policy.waits and args.over_sampling_batch_size > args.rollout_batch_size:
        raise ValueError(
            f"{setting} with --over-sampling-batch-size {args.over_sampling_batch_size} above --rollout-batch-size "
            f"{args.rollout_batch_size} would cut rollouts off: set them equal, or choose another policy"
        )


def _mapped(group: Group, change: Any) -> Group:
    return [_mapped(member, change) if isinstance(member, list) else change(member) for member in group]


def _buffer_path(folder: str, rollout_id: int) -> Path:
    return Path(folder) / "rollout" / f"midstream_buffer_{rollout_id}.pkl"
