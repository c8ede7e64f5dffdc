"""A host that takes, plays, cuts off, trains, filters, saves, dies and loads: nothing is lost or doubled."""

import copy
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from midstream.buffers.journal.status import status_of
from midstream.buffers.ledger import BY_HOST
from midstream.buffers.rollout import Span, Status
from midstream.conf.schema.policies import BUILT_IN
from midstream.envs.protocol import Change, Snapshot
from midstream.hooks.answers import Generation
from midstream.hooks.slime import settings
from midstream.hooks.slime.data_source import DataSource
from midstream.hooks.slime.log import log_rollout
from midstream.hooks.slime.payload import needed_snapshots
from midstream.hooks.slime.sample import (
    SampleSink,
    begin_rollout,
    recorded_rollout,
    samples_of,
    store,
    task_of,
)
from midstream.local.sample import Sample
from tests.hooks.host import host_args
from tests.hooks.scripted import IDS, NumberEnvironments, WordTokenizer

MEMBERS = 2
KEEP = 2
TASKS = 5
# `wait` cuts nothing off.
POLICIES = [name for name in BUILT_IN if name != "wait"]
OPEN = ("pending", "aborted")
ENDS = [Status.ABORTED, Status.ABORTED, Status.COMPLETED, Status.FAILED]

in_store: set[str] = set()
"""The ids of the snapshots that can be restored, as a store on disk would have them after a crash."""


class Environments(NumberEnvironments):
    def __init__(self, config: Any) -> None:
        super().__init__()

    def adopt(self, needed: Collection[str]) -> frozenset[str]:
        in_store.intersection_update(needed)
        return frozenset(needed) - in_store


class Checkpoint:
    """What a host's checkpoint has to bring back: the groups that are not done, by key, and the prompts' position."""

    def __init__(self, machine: "AnyHost") -> None:
        self.position = machine.position
        waiting = {key_of(group): [frozen(sample) for sample in group] for group in machine.waiting()}
        running = machine.running.items()
        self.groups = waiting | {key: as_restored(group, machine.as_taken[key]) for key, group in running}
        self.trained = set(machine.trained)
        self.dropped = set(machine.dropped)


class AnyHost(RuleBasedStateMachine):
    """Groups are ``running`` (in flight), ``trained`` or ``dropped`` (by the policy, or by the host); the data source
    has the others. A host that keeps groups says which it drops, one that does not has dropped all at a step's end."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="midstream-machine-"))
        self.source: DataSource | None = None

    def teardown(self) -> None:
        if self.source is not None:
            self.source.close()
        shutil.rmtree(self.folder)

    @initialize(
        policy=st.sampled_from(POLICIES),
        token=st.none() | st.integers(1, 4),
        beyond=st.sampled_from(["restart", "drop"]),
        keeps=st.booleans(),
    )
    def begin(self, policy: str, token: int | None, beyond: str, keeps: bool) -> None:
        in_store.clear()
        task = {"prompt": "7", "metadata": {"files": {}, "pre_commands": [], "eval_cmd": "true"}}
        self.args: Namespace = host_args(
            self.folder,
            [task] * TASKS,
            n_samples_per_prompt=MEMBERS,
            save=str(self.folder / "checkpoint"),
            load=str(self.folder / "checkpoint"),
            custom_rollout_log_function_path="midstream.hooks.slime.log.log_rollout",
            midstream={
                "run_dir": str(self.folder / "run"),
                "resume_policy": policy,
                "policies": {"rewind": {"max_lag": 2}},
                "bounds": {"token": token, "trajectory": None, "environment": None, "beyond": beyond},
                "journal": {"keep_checkpoints": KEEP, "host_keeps_groups": keeps},
                "environment": {"factory": f"{__name__}:Environments"},
            },
        )
        self.keeps = keeps
        self.checkpoints: dict[int, Checkpoint] = {}
        self.running: dict[str, list[Any]] = {}
        self.as_taken: dict[str, list[dict[str, Any]]] = {}
        self.trained: set[str] = set()
        self.dropped: set[str] = set()
        self.position = 0
        self.rollout_id = 0
        self.version = 1
        self.snapshots = 0
        self.source = DataSource(self.args)

    def waiting(self) -> list[list[Any]]:
        assert self.source is not None
        return self.source.waiting_groups

    @rule(count=st.integers(1, 3))
    def take(self, count: int) -> None:
        before = {key_of(group) for group in self.source.waiting_groups}
        groups = self.source.get_samples(count)
        assert len(groups) == count
        taken = {key_of(group): group for group in groups}
        assert len(taken) == count
        new = [key for key in taken if key not in before]
        assert new == [str(self.position + number) for number in range(len(new))]
        self.position += len(new)
        self.dropped |= before - set(taken) - {key_of(group) for group in self.source.waiting_groups}
        assert not taken.keys() & (self.running.keys() | self.trained)
        self.running |= taken
        self.as_taken |= {key: [frozen(sample) for sample in group] for key, group in taken.items()}
        self.give_up()

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        turns=st.integers(0, 2),
        ends=st.lists(st.sampled_from(ENDS), min_size=MEMBERS, max_size=MEMBERS),
    )
    def play(self, data: st.DataObject, turns: int, ends: list[Status]) -> None:
        """A play of all unfinished members of a group, to its end."""
        group = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        for sample, status in zip(group, ends, strict=True):
            if sample.status.value in OPEN:
                self.play_member(sample, turns, status)

    def play_member(self, sample: Sample, turns: int, status: Status) -> None:
        rollout = recorded_rollout(sample) or begin_rollout(sample, task_of(sample), WordTokenizer())
        sink = SampleSink(Namespace(), sample, WordTokenizer())
        if not rollout.turns:
            rollout.enter(self.snapshot(None))
        for _ in range(turns):
            rollout.begin_turn()
            span = (Span(self.version, 0, 2),)
            made = Generation([1, 0], [-0.5, -0.25], "add <end>", "stop", span, {"finish_reason": {}})
            rollout.append_action(made.tokens, made.log_probs, made.spans)
            sink.append_action(made)
            rollout.finish_action()
            rollout.append_observation([IDS["obs"]])
            sink.append_observation([IDS["obs"]], "obs")
            rollout.enter(self.snapshot(rollout.turns[-1].snapshot_before))
        rollout.status = status
        rollout.reward = 1.0 if status is Status.COMPLETED else None
        store(sample, rollout)
        if status.finished:
            self.delete(settings.holds_of(self.args).release(rollout.snapshots.values()))

    def snapshot(self, parent: str | None) -> Snapshot:
        self.snapshots += 1
        key = f"s{self.snapshots}"
        in_store.add(key)
        changes = () if parent is None else (Change("a", "modified", 1, "", key),)
        return Snapshot(key, key, parent, changes)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """A group comes back, as after an abort; members that have not begun are as they were handed out."""
        key = data.draw(st.sampled_from(sorted(self.running)))
        group = self.running.pop(key)
        self.source.add_samples([group])
        if not any(waiting is group for waiting in self.source.waiting_groups):
            self.dropped.add(key)
        self.give_up()

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Some finished groups are trained on; the others stay with a host that keeps them, and are lost by others."""
        finished = self.finished()
        trained = data.draw(st.sets(st.sampled_from(finished))) if finished else set()
        samples = [s for key in trained for s in samples_of(self.running[key])]
        log_rollout(self.rollout_id, self.args, samples, None, 1.0)
        for key in trained:
            del self.running[key]
        self.trained |= trained
        if not self.keeps:
            self.dropped |= self.running.keys()
            self.running = {}
        self.rollout_id += 1
        self.version += 1
        settings.engine_of(self.args).version = self.version
        self.give_up()

    @precondition(lambda self: self.keeps and self.finished())
    @rule(data=st.data())
    def filter(self, data: st.DataObject) -> None:
        """A host that keeps groups drops one, and says so."""
        key = data.draw(st.sampled_from(self.finished()))
        self.source.drop_samples([self.running.pop(key)])
        self.dropped.add(key)
        self.give_up()

    def finished(self) -> list[str]:
        return [key for key, group in self.running.items() if all(s.status.value not in OPEN for s in group)]

    @precondition(lambda self: self.rollout_id > max(self.checkpoints, default=-1) + 1)
    @rule()
    def save(self) -> None:
        self.source.save(self.rollout_id - 1)
        self.checkpoints[self.rollout_id - 1] = Checkpoint(self)
        for old in sorted(self.checkpoints)[:-KEEP]:
            del self.checkpoints[old]
        self.give_up()

    @rule(data=st.data())
    def die_and_load(self, data: st.DataObject) -> None:
        """The process is gone, with all it knew; another one loads one of the checkpoints, or none."""
        self.source.close()
        for cached in (
            settings._holds,
            settings._abandoned,
            settings._tally,
            settings._engine,
            settings._policy,
        ):
            cached.cache_clear()
        # Who would throw several checkpoints away is refused.
        from_nothing = [None] if len(self.checkpoints) < 2 else []
        chosen = data.draw(st.sampled_from([*from_nothing, *sorted(self.checkpoints)]))
        self.source = DataSource(self.args)
        if chosen is None:
            self.rollout_id = self.position = 0
            self.trained, self.dropped, expected = set(), set(), {}
        else:
            self.source.load(chosen)
            checkpoint = self.checkpoints[chosen]
            self.rollout_id, self.position = chosen + 1, checkpoint.position
            self.trained, self.dropped = set(checkpoint.trained), set(checkpoint.dropped)
            expected = checkpoint.groups
        self.checkpoints = {k: v for k, v in self.checkpoints.items() if chosen is not None and k <= chosen}
        self.running = {}
        found = {key_of(group): [frozen(sample) for sample in group] for group in self.source.waiting_groups}
        assert found == expected
        self.version += 1
        settings.engine_of(self.args).version = self.version

    def give_up(self) -> None:
        """What generate does with abandoned snapshots before it plays."""
        abandoned = settings.abandoned_of(self.args)
        self.delete(abandoned)
        abandoned.clear()

    def delete(self, snapshots: list[Snapshot]) -> None:
        in_store.difference_update(snapshot.id for snapshot in snapshots)

    @invariant()
    def every_prompt_is_in_one_place(self) -> None:
        if self.source is None:
            return
        waiting = [key_of(group) for group in self.source.waiting_groups]
        places = [waiting, self.running, self.trained, self.dropped]
        keys = [key for place in places for key in place]
        assert sorted(keys) == sorted(str(number) for number in range(self.position))

    @invariant()
    def the_journal_says_the_same(self) -> None:
        if self.source is None or not self.source._has_begun:
            return
        status = status_of(self.folder / "run" / "buffer")
        assert status.buffered.groups == self.source.get_buffer_length()
        assert status.taken.groups == len(self.running)
        assert set(status.dropped) <= {BY_HOST, "cut_off", "policy", "token_lag"}

    @invariant()
    def whoever_waits_can_go_on(self) -> None:
        if self.source is None:
            return
        goes_back = settings.policy_of(self.args).goes_back
        needed = {
            key for rollout in self.source.waiting() for key in needed_snapshots(rollout, goes_back=goes_back)
        }
        assert needed <= in_store
        assert self.source._ledger.snapshots_in_use() <= in_store


def key_of(group: list[Any]) -> str:
    return str(next(samples_of(group)).group_index)


def frozen(sample: Sample) -> dict[str, Any]:
    return copy.deepcopy(sample.to_dict())


def as_restored(group: list[Any], as_taken: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a restart makes of a group: members that have ended as they are, others as they were handed out last."""
    return [
        before if sample.status.value in OPEN else frozen(sample)
        for sample, before in zip(group, as_taken, strict=True)
    ]


TestAnyHost = AnyHost.TestCase
TestAnyHost.settings = hypothesis_settings(max_examples=40, stateful_step_count=40, deadline=None)
