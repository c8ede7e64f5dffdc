"""``--data-source-path midstream.hooks.slime.data_source.DataSource``"""

import threading
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from midstream.buffers.holds import held_by
from midstream.buffers.ledger import BY_HOST
from midstream.buffers.policies.base import CutOff, Policy
from midstream.buffers.queue import Select, oldest_first
from midstream.buffers.rollout import PartialRollout
from midstream.buffers.waiting import Waiting
from midstream.conf.schema import LayerConfig
from midstream.envs.protocol import Snapshot
from midstream.hooks.slime.credit_flags import check_credit
from midstream.hooks.slime.host import load_function, running_host
from midstream.hooks.slime.members import (
    SampleMember,
    has_begun,
    members_of,
    recorded_snapshots,
    shared_snapshots,
)
from midstream.hooks.slime.prompts import HostPrompts
from midstream.hooks.slime.ratio import measurements_of
from midstream.hooks.slime.restart import adopt_snapshots, check_sizes, open_ledger, restored_groups
from midstream.hooks.slime.sample import Group, recorded_rollout, samples_of
from midstream.hooks.slime.settings import (
    abandoned_of,
    engine_of,
    environments_of,
    holds_of,
    host_keeps_groups,
    keep_ledger,
    policy_of,
    steering_of,
    tally_of,
)


class DataSource:
    """The host's prompts, and before them the groups that wait to go on.

    What becomes of a group that the host hands back unfinished, and of one that goes out again, is the
    resume policy's choice, within the bounds. The host's ``--buffer-filter-path`` chooses which waiting
    groups go first. Who owns a group is in the journal of the run directory, where ``save`` marks a checkpoint
    and ``load`` returns to it, so that a restart loses no prompt and trains on none twice. ``counters`` are
    those of the process. Threads may use it at once, as a host does that generates beside training.
    """

    def __init__(self, args: Namespace) -> None:
        """Open the journal.

        Raises:
            ValueError: flags of the host contradict the policy.
            JournalError: another job has the run directory, it cannot be written, or its journal is of
                another version.
        """
        self._args = args
        self._host = running_host(args)
        self._prompts = HostPrompts(args)
        policy = policy_of(args)
        _check_flags(args, policy)
        check_credit(args)
        self.counters = tally_of(args)
        # Before anything is written: another job may have the run directory.
        self._ledger = open_ledger(args)
        self._buffer: Waiting[Group] = Waiting(
            policy,
            steering_of(args).layer().bounds,
            members=self._members,
            begun=has_begun,
            select=self._select(),
            tally=self.counters,
            abandon=self._abandon,
            dropped=self._note_dropped,
            share=lambda snapshots: holds_of(args).share(snapshots),
            expect=lambda group, decide: measurements_of(args).expect(args, group, decide),
        )
        keep_ledger(args, self._ledger)
        self._has_begun = False
        self._undelivered: list[Group] = []  # prompts that the host has counted, and nobody got
        steering_of(args).subscribe(self._configure)
        self._asked_after: int | None = None  # hand-overs, when the engine was asked for its version
        # The prompts and the buffer have none of their own, and a checkpoint is of both at one moment.
        self._lock = threading.RLock()

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
        with self._lock:
            samples = [sample for group in self.waiting_groups for sample in samples_of(group)]
            return [rollout for sample in samples if (rollout := recorded_rollout(sample)) is not None]

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return ``num_samples`` groups: those that wait first, then new prompts.

        Raises:
            JournalError: the journal cannot be written, or a new group is there already. Nothing is lost then: the
                next call hands out the same groups.
        """
        with self._lock:
            self._begin()
            steering_of(self._args).poll(self._ledger.step)
            groups = self._buffer.take(num_samples, self._version())
            missing = num_samples - len(groups)
            drawn = max(0, missing - len(self._undelivered))
            if drawn:
                self._undelivered += self._prompts.draw(drawn)
            new = self._undelivered[:missing]
            try:
                self._ledger.check_new(new[len(new) - drawn :])
                self._ledger.taken(groups + new)
            except Exception:
                self._buffer.put_back(groups)
                raise
            del self._undelivered[:missing]
            return groups + new

    def add_samples(self, samples: list[Group]) -> None:
        """Take back groups that the host did not train on.

        Raises:
            ValueError: a group has not ``args.n_samples_per_prompt`` members.
            JournalError: the journal cannot be written.
        """
        for group in samples:
            if len(group) != self._args.n_samples_per_prompt:
                raise ValueError(
                    f"a group of {len(group)} came back, expected n_samples_per_prompt="
                    f"{self._args.n_samples_per_prompt}: hand back whole groups"
                )
        with self._lock:
            self._begin()
            self._ledger.check_in_flight(samples)
            waited = self._buffer.groups
            kept = self._buffer.add(samples)
            try:
                self._ledger.buffered(kept)
            except Exception:
                # They stay in flight, as the journal has them: they wait after a restart.
                self._buffer.groups = waited
                raise

    def drop_samples(self, samples: list[Group]) -> None:
        """Note that groups which were handed out are given up: neither trained on nor handed back.

        For rollout functions that keep groups from one step to the next and drop some; slime's own need not say it.

        Raises:
            JournalError: the journal cannot be written, or a group is not in flight.
        """
        with self._lock:
            self._ledger.check_in_flight(samples)
            for group in samples:
                self._ledger.dropped(group, BY_HOST)
                self._abandon(held_by(r for member in self._members(group) for r in member.rollouts))

    def save(self, rollout_id: int) -> None:
        """Save the host's state under ``args.save``, and mark the journal's as the one that belongs to it.

        Raises:
            JournalError: the journal cannot be written, or groups are finished of which nobody has said whether
                they were trained on.
        """
        with self._lock:
            self._begin()
            if self._undelivered:
                self._ledger.taken(self._undelivered)
                self._ledger.buffered(self._undelivered)
                self._buffer.put_back(self._undelivered)
                self._undelivered = []
            # First, so that a position never stands without the groups that were taken before it.
            self._ledger.checkpoint(rollout_id, engine_of(self._args).version)
            self._prompts.save(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        """Go on from what ``save(rollout_id)`` left: the host's state under ``args.load``, the buffer as it was.

        Raises:
            JournalError: the journal has no checkpoint of that name, but others.
            SnapshotMissing: not one of the snapshots that the buffer needs is in the store.
            StateError: what the curriculum knew cannot be read.
        """
        with self._lock:
            self._prompts.load(rollout_id)
            self._restore(rollout_id if self._args.load is not None else None)

    def close(self) -> None:
        """Let go of the run directory; the groups that wait stay in its journal."""
        steering_of(self._args).unsubscribe(self._configure)
        self._prompts.close()
        keep_ledger(self._args, None)
        self._ledger.close()

    def _begin(self) -> None:
        # A host that loads nothing begins with an empty buffer, whatever an earlier job left.
        if not self._has_begun:
            self._restore(None)

    def _restore(self, rollout_id: int | None) -> None:
        self._has_begun = True
        self._undelivered = []
        groups = restored_groups(self._ledger, rollout_id, self._host.load("samples", "Sample"))
        check_sizes(groups, self._args.n_samples_per_prompt)
        self._buffer.groups = groups
        holds_of(self._args).share(shared_snapshots(self._buffer.groups))
        adopt_snapshots(environments_of(self._args), self._ledger)
        referred = recorded_snapshots(groups)
        holds_of(self._args).inherit(self._ledger.snapshots_in_use().difference(referred))
        if self._ledger.version is not None:
            engine_of(self._args).go_on_after(self._ledger.version)
        self._prompts.begin(rollout_id)

    def _configure(self, layer: LayerConfig) -> None:
        self._buffer.bounds = layer.bounds
        self._prompts.configure(layer)

    def _version(self) -> int | None:
        """The policy's version, asked of the engine once a step where something waits.

        The engine's last answer is of the step before: the host takes first, and then generates.
        """
        engine = engine_of(self._args)
        if len(self._buffer) and self._asked_after != self._ledger.hand_overs:
            self._asked_after = self._ledger.hand_overs
            engine.ask_version()
        return engine.version

    def _abandon(self, snapshots: Iterable[Snapshot]) -> None:
        abandoned_of(self._args).extend(holds_of(self._args).release(snapshots))

    def _note_dropped(self, group: Group, reason: str) -> None:
        self._ledger.dropped(group, reason)

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
    """Raise ValueError where the host's flags would make the layer do something else than it says."""
    if args.custom_rollout_log_function_path is None:
        raise ValueError(
            "nothing would say which groups are trained on, which a restart has to know: add "
            "--custom-rollout-log-function-path midstream.hooks.slime.log.log_rollout, or a function of your own "
            "that calls it"
        )
    if host_keeps_groups(args):
        # It hands back what is unfinished whatever the flags say, and cuts nothing off to end a step.
        return
    setting = f"midstream.resume_policy={policy.name}"
    if policy.cut_off in (CutOff.EMPTIED, CutOff.KEPT) and not args.partial_rollout:
        raise ValueError(f"{setting} needs --partial-rollout: without it the host drops what is unfinished")
    if policy.cut_off is CutOff.NOTHING and args.over_sampling_batch_size > args.rollout_batch_size:
        raise ValueError(
            f"{setting} with --over-sampling-batch-size {args.over_sampling_batch_size} above --rollout-batch-size "
            f"{args.rollout_batch_size} would cut rollouts off: set them equal, or choose another policy"
        )
