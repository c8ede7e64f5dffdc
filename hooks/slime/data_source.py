"""``--data-source-path midstream.hooks.slime.data_source.DataSource``"""

import logging
import os
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

from midstream.buffers.policies.base import CutOff, Policy
from midstream.buffers.queue import Select, oldest_first
from midstream.buffers.rollout import PartialRollout
from midstream.buffers.waiting import Waiting
from midstream.hooks.slime.host import load_function, running_host
from midstream.hooks.slime.members import SampleMember, has_begun, members_of, shared_snapshots
from midstream.hooks.slime.ratio import measurements_of
from midstream.hooks.slime.sample import Group, recorded_rollout, samples_of
from midstream.hooks.slime.settings import abandoned_of, engine_of, holds_of, layer_of, policy_of, tally_of

_logger = logging.getLogger(__name__)


class DataSource:
    """The host's prompts, and before them the groups that wait to go on.

    What becomes of a group that the host hands back unfinished, and of one that goes out again, is the
    resume policy's choice, within the bounds. The host's ``--buffer-filter-path`` chooses which waiting
    groups go first. ``save`` keeps the waiting groups with the host's own state, so that a restart loses no
    prompt. ``counters`` are those of the process.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._host = running_host(args)
        self._prompts = self._host.load("prompts", "RolloutDataSource")(args)
        policy = policy_of(args)
        _check_flags(args, policy)
        self.counters = tally_of(args)
        self._buffer: Waiting[Group] = Waiting(
            policy,
            layer_of(args).bounds,
            members=self._members,
            begun=has_begun,
            select=self._select(),
            tally=self.counters,
            abandon=lambda snapshots: abandoned_of(args).extend(holds_of(args).release(snapshots)),
            share=lambda snapshots: holds_of(args).share(snapshots),
            expect=lambda group, decide: measurements_of(args).expect(args, group, decide),
        )

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
        """Return ``num_samples`` groups: those that wait first, then new prompts.

        The policy's version is that of the engine's last answer.
        """
        groups = self._buffer.take(num_samples, engine_of(self._args).version)
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
        holds_of(self._args).share(shared_snapshots(self._buffer.groups))

    def _members(self, group: Group) -> list[SampleMember]:
        return members_of(group, self._decode)

    def _decode(self, tokens: list[int]) -> str:
        # Asked for when it is needed: a host makes its tokenizer after its data source.
        tokenizer = self._host.generate_state(self._args).tokenizer
        text: str = tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def _select(self) -> Select[Group]:
        path = self._args.buffer_filter_path
        if path is None:
            return oldest_first
        chosen = load_function(path)
        # slime passes None for the rollout id, and its filters expect no more.
        return lambda groups, count: chosen(self._args, None, groups, count)


def _check_flags(args: Namespace, policy: Policy) -> None:
    """Raise ValueError where the host's flags would make the policy do something else than it says."""
    setting = f"midstream.resume_policy={policy.name}"
    if policy.cut_off in (CutOff.EMPTIED, CutOff.KEPT) and not args.partial_rollout:
        raise ValueError(f"{setting} needs --partial-rollout: without it the host drops what is unfinished")
    if policy.cut_off is CutOff.NOTHING and args.over_sampling_batch_size > args.rollout_batch_size:
        raise ValueError(
            f"{setting} with --over-sampling-batch-size {args.over_sampling_batch_size} above --rollout-batch-size "
            f"{args.rollout_batch_size} would cut rollouts off: set them equal, or choose another policy"
        )


def _mapped(group: Group, change: Any) -> Group:
    return [_mapped(member, change) if isinstance(member, list) else change(member) for member in group]


def _buffer_path(folder: str, rollout_id: int) -> Path:
    return Path(folder) / "rollout" / f"midstream_buffer_{rollout_id}.pkl"
