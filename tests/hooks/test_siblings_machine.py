"""Groups whose members end, are stopped, cut off, cancelled and resumed in any order: nothing is left of them."""

import asyncio
import itertools
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from midstream.buffers.curriculum.early_stop import chance_to_inform, decider
from midstream.buffers.rollout import PartialRollout, Span
from midstream.envs.protocol import Snapshot, Step, Task
from midstream.hooks import patience
from midstream.hooks.answers import Generation
from midstream.hooks.slime.filters import informative
from midstream.hooks.slime.generate import generate
from midstream.hooks.slime.sample import recorded_rollout, was_stopped
from midstream.hooks.slime.settings import engine_of, environments_of, layer_of, siblings_of
from midstream.local.sample import Sample
from tests.hooks.host import host_args
from tests.hooks.scripted import IDS, NumberEnvironment, NumberEnvironments

MEMBERS = 4
GROUPS = 2
# With nothing known before: three of four that agree leave a chance of 0.2; two of three, one having failed, 0.25.
MIN_INFORMATIVE, MIN_FINISHED = 0.3, 2
ABORTED = Generation([], [], "", "abort", (), {})
POLL_S = 0.001
ports = itertools.count(20_000)  # an engine, and with it all that a process has, for each example

UNFINISHED = (Sample.Status.PENDING, Sample.Status.ABORTED)
HAS_RESULT = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
# Of a member: the engine's answer, by the environment's step that it leads to. Of the host: what it does to it.
ANSWERS = {"end": "done <end>", "act": "add <end>", "wait": "slow <end>", "break": "break <end>"}
ACTIONS = st.tuples(
    st.sampled_from([*ANSWERS, *["end"] * 6, "let on", "cancel", "end the step"]), st.integers(0, 7)
)


class Environments(NumberEnvironments):
    """Every snapshot is kept until it is forgotten, and a slow step waits until it is let on."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.kept: dict[str, int] = {}
        self.waiting: list[asyncio.Event] = []

    async def start(self, task: Task) -> "KeptEnvironment":
        return KeptEnvironment(self, 0)

    async def resume(self, task: Task, snapshot: Snapshot) -> "KeptEnvironment":
        return KeptEnvironment(self, self.kept[snapshot.id])

    async def forget(self, snapshots: list[Snapshot]) -> None:
        for snapshot in snapshots:
            del self.kept[snapshot.id]


class KeptEnvironment(NumberEnvironment):
    ids = itertools.count()

    async def step(self, action: str) -> Step:
        if action == "slow":
            let_on = asyncio.Event()
            self._owner.waiting.append(let_on)
            try:
                await let_on.wait()
            finally:
                self._owner.waiting.remove(let_on)
        return await super().step(action)

    async def snapshot(self) -> Snapshot:
        key = f"s{next(self.ids)}"
        self._owner.kept[key] = self.number
        return Snapshot(key, key)


class AnyGroups(RuleBasedStateMachine):
    """A host that has slots: it starts members one by one, and may end its step, or be cancelled, at any time.

    Whenever a rule begins, all who play wait: for the engine, or for a step of their environment.
    """

    @initialize(max_attempts=st.integers(1, 2))
    def begin(self, max_attempts: int) -> None:
        self.polls = patch.object(patience, "ABORT_POLL_S", POLL_S)
        self.polls.start()
        self.folder = tempfile.TemporaryDirectory(prefix="midstream-siblings-")
        early_stop = {"min_informative": MIN_INFORMATIVE, "min_finished": MIN_FINISHED}
        self.args: Namespace = host_args(
            Path(self.folder.name),
            [],
            n_samples_per_prompt=MEMBERS,
            sglang_router_port=next(ports),
            midstream={
                "run_dir": self.folder.name,
                "resume_policy": "continue",
                "max_attempts": max_attempts,
                "turns": {"abort_grace_s": 0.0, "max_turns": 4},
                "environment": {"factory": f"{__name__}:Environments"},
                "curriculum": {"enabled": True, "early_stop": early_stop},
            },
        )
        siblings_of(self.args).decide = decider(layer_of(self.args).curriculum)
        self.loop = asyncio.new_event_loop()
        self.state = self.args.generate_state
        self.environments: Environments = environments_of(self.args)
        self.asked: dict[asyncio.Task[Any], asyncio.Future[Generation]] = {}
        engine_of(self.args).generate = self.generate
        self.samples = [
            Sample(group_index=index // MEMBERS, index=index, prompt="7") for index in range(GROUPS * MEMBERS)
        ]
        self.playing: dict[int, asyncio.Task[Any]] = {}
        self.results: dict[int, tuple[Sample.Status, float | None]] = {}

    async def generate(self, input_tokens: list[int], params: Any, **_: Any) -> Generation:
        if self.state.aborted:
            return ABORTED
        me = asyncio.current_task()
        assert me is not None
        self.asked[me] = self.loop.create_future()
        try:
            return await self.asked[me]
        finally:
            del self.asked[me]

    def groups(self) -> Iterator[list[Sample]]:
        for number in range(GROUPS):
            yield self.samples[number * MEMBERS : (number + 1) * MEMBERS]

    def idle(self) -> list[Sample]:
        """Those that a host of slime's kind calls generate for: what has FAILED, too."""
        return [s for s in self.samples if s.index not in self.playing and s.status not in HAS_RESULT]

    @precondition(lambda self: self.idle())
    @rule(numbers=st.lists(st.integers(0, 7), min_size=1, max_size=4))
    def start(self, numbers: list[int]) -> None:
        for number in numbers:
            if idle := self.idle():
                self.play(idle[number % len(idle)])

    def play(self, sample: Sample) -> None:
        given_up = is_given_up(self.group_of(sample))
        self.playing[sample.index] = self.loop.create_task(
            generate(self.args, sample, {"max_new_tokens": 100})
        )
        self.settle()
        assert sample.index not in self.playing or not given_up, "a member of a group that is given up plays"

    @rule(actions=st.lists(ACTIONS, min_size=1, max_size=3))
    def act(self, actions: list[tuple[str, int]]) -> None:
        """All of it happens before anybody has noticed any of it."""
        for kind, number in actions:
            self.take(kind, number)
        self.settle()
        if self.state.aborted:
            assert not self.playing
            self.state.aborted = False
            for sample in self.samples:  # slime does not call generate for who waits for a slot
                if sample.status is Sample.Status.PENDING:
                    sample.status = Sample.Status.ABORTED

    def take(self, kind: str, number: int) -> None:
        asked = [future for future in self.asked.values() if not future.done()]
        waiting = [let_on for let_on in self.environments.waiting if not let_on.is_set()]
        if kind == "end the step":
            self.state.aborted = True
            for future in asked:
                future.set_result(ABORTED)
        elif kind == "let on" and waiting:
            waiting[number % len(waiting)].set()
        elif kind == "cancel" and self.playing:
            list(self.playing.values())[number % len(self.playing)].cancel()
        elif kind in ANSWERS and asked:
            tokens = [IDS[word] for word in ANSWERS[kind].split()]
            made = Generation(tokens, [-0.5, -0.25], ANSWERS[kind], "stop", (Span(1, 0, 2),), {})
            asked[number % len(asked)].set_result(made)

    def settle(self) -> None:
        """Run until everybody waits, and whoever has to notice something has."""
        self.loop.run_until_complete(self.until_all_wait())
        for index, task in list(self.playing.items()):
            if task.done():
                del self.playing[index]
                if not task.cancelled():
                    task.result()

    async def until_all_wait(self) -> None:
        async with asyncio.timeout(20):
            while not await self.all_wait():
                pass

    async def all_wait(self) -> bool:
        """Whether nobody moves for a few turns of the loop, in which a step of an environment is polled twice."""
        for _ in range(5):
            await asyncio.sleep(0)
            moving = [task for task in self.playing.values() if not task.done() and task not in self.asked]
            waiting = [let_on for let_on in self.environments.waiting if not let_on.is_set()]
            if len(moving) != len(waiting):
                return False
            if waiting:
                await asyncio.sleep(POLL_S)
        return True

    def group_of(self, sample: Sample) -> list[Sample]:
        return next(group for group in self.groups() if sample in group)

    @invariant()
    def nobody_plays_in_a_group_that_is_given_up(self) -> None:
        for group in self.groups() if hasattr(self, "loop") else ():
            assert not (is_given_up(group) and any(sample.index in self.playing for sample in group))

    @invariant()
    def who_was_stopped_had_siblings_that_agree(self) -> None:
        for group in self.groups() if hasattr(self, "loop") else ():
            if any(map(was_stopped, group)):
                assert len(rewards_of(group)) >= MIN_FINISHED

    @invariant()
    def every_sample_is_as_its_host_needs_it(self) -> None:
        for sample in self.samples if hasattr(self, "loop") else ():
            if sample.index in self.playing:
                continue
            rollout = record_of(sample)
            assert sample.remove_sample == (rollout.failure is not None)
            if sample.status not in UNFINISHED:
                assert sample.reward is not None
                assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
                assert self.results.setdefault(sample.index, (sample.status, sample.reward)) == (
                    sample.status,
                    sample.reward,
                ), "a result was lost"

    @invariant()
    def environments_are_of_those_who_play_and_snapshots_of_the_unfinished(self) -> None:
        if not hasattr(self, "loop"):
            return
        assert self.environments.live <= len(self.playing)
        if not self.playing:
            unfinished = [record_of(sample) for sample in self.samples if sample.status in UNFINISHED]
            assert self.environments.kept.keys() == {key for r in unfinished for key in r.snapshots}

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        while self.playing or any(sample.status in UNFINISHED for sample in self.samples):
            for sample in self.samples:
                if sample.status in UNFINISHED and sample.index not in self.playing:
                    self.play(sample)
            self.act([("let on", 0)] * len(self.environments.waiting) + [("end", 0)] * len(self.asked))
        assert self.environments.live == 0
        assert self.environments.kept == {}
        siblings = siblings_of(self.args)
        assert siblings._groups == {}
        assert siblings.members_stopped == sum(map(was_stopped, self.samples))
        for group in self.groups():
            verdict = informative(self.args, group)
            assert verdict.keep == (len(set(rewards_of(group))) > 1)
        self.loop.close()
        self.folder.cleanup()
        self.polls.stop()


def record_of(sample: Sample) -> PartialRollout:
    return recorded_rollout(sample) or PartialRollout("", "")


def rewards_of(group: list[Sample]) -> list[float]:
    return [sample.reward for sample in group if sample.status in HAS_RESULT]


def is_given_up(group: list[Sample]) -> bool:
    """Whether those that have ended leave too little of a chance, whatever has been decided."""
    rewards = rewards_of(group)
    if len(rewards) < MIN_FINISHED or len(set(rewards)) > 1:
        return False
    failed = sum(sample.remove_sample and not was_stopped(sample) for sample in group)
    successes = sum(reward > 0.5 for reward in rewards)
    left = MEMBERS - failed - len(rewards)
    chance = chance_to_inform((1.0, 1.0), successes, len(rewards) - successes, left)
    return left > 0 and chance < MIN_INFORMATIVE


TestAnyGroups = AnyGroups.TestCase
TestAnyGroups.settings = hypothesis_settings(max_examples=40, stateful_step_count=30, deadline=None)
