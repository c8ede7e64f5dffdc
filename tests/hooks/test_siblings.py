"""Groups that are given up while they are played: who is stopped, who is not, and what is left of them."""

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from midstream.buffers.rollout import PartialRollout, Status
from midstream.envs.store.store import SnapshotStore
from midstream.hooks.engine import Engine
from midstream.hooks.siblings import Siblings
from midstream.hooks.slime.data_source import DataSource
from midstream.hooks.slime.filters import informative
from midstream.hooks.slime.generate import generate
from midstream.hooks.slime.log import log_rollout
from midstream.hooks.slime.rewards import post_process
from midstream.hooks.slime.sample import recorded_rollout
from midstream.hooks.slime.settings import engine_of, environments_of, siblings_of, tally_of
from midstream.local.sample import Sample
from tests.hooks.host import file_args, number_args
from tests.hooks.scripted import NumberEnvironment, ScriptedEngine

MEMBERS = 4
# With nothing known before, three of four that agree leave a chance of 0.2, and two leave 0.4.
EARLY_STOP = {"enabled": True, "early_stop": {"min_informative": 0.3, "min_finished": 2}}
FAIL, SUCCEED, LONG = ["done <end>"], ["add <end>", "done <end>"], ["add <end>", "never"]
FILTER = "midstream.hooks.slime.filters.informative"
Group = list[Sample]


@dataclass
class HoldingEngine(ScriptedEngine):
    """Answers by the member that asks; one that is to be told `never` waits until it is aborted or its client gone."""

    holding: int = 0
    left_alone: int = 0
    aborting: bool = False
    words: dict[str, list[str]] = field(default_factory=dict)

    async def _generate(self, request: web.Request) -> web.Response:
        words = self.words[request.headers["X-SMG-Routing-Key"]]
        if words[0] != "never":
            self.answers.insert(0, (words.pop(0), "stop"))
            return await super()._generate(request)
        self.holding += 1
        while not self.aborting and request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.01)
        self.holding -= 1
        if not self.aborting:
            self.left_alone += 1
            return web.Response()
        self.answers.insert(0, ("", "abort"))
        return await super()._generate(request)


@dataclass
class Host:
    """Plays the members of a group as slime does, each by itself."""

    args: Namespace
    engine: HoldingEngine

    def play(self, sample: Sample, words: Sequence[str], **how: Any) -> asyncio.Task[Sample]:
        sample.session_id = sample.session_id or str(sample.index)
        self.engine.words[sample.session_id] = list(words)
        return asyncio.create_task(generate(self.args, sample, {"max_new_tokens": 60}, **how))

    async def held(self, count: int) -> None:
        """Return when so many calls are held by the engine."""
        async with asyncio.timeout(10):
            while self.engine.holding != count:
                await asyncio.sleep(0.01)

    async def cut_off(self, *playing: asyncio.Task[Sample]) -> None:
        """End the step."""
        self.args.generate_state.aborted = self.engine.aborting = True
        await asyncio.gather(*playing)
        self.args.generate_state.aborted = self.engine.aborting = False


@asynccontextmanager
async def hosting(args: Namespace) -> AsyncIterator[Host]:
    args.router_policy = "consistent_hashing"
    engine = HoldingEngine([])
    async with engine.serving() as url:
        client = engine_of(args)
        client.url = url
        try:
            yield Host(args, engine)
        finally:
            await client.close()


def running(scene: Callable[[Host, DataSource, Group], Any], args: Namespace) -> None:
    """Run a scene on the first group of a data source."""

    async def run() -> None:
        source = DataSource(args)
        try:
            async with hosting(args) as host:
                [group] = source.get_samples(1)
                await scene(host, source, group)
        finally:
            source.close()

    asyncio.run(run())


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    layer = {"resume_policy": "continue", "curriculum": EARLY_STOP}
    return number_args(tmp_path, layer, n_samples_per_prompt=MEMBERS, dynamic_sampling_filter_path=FILTER)


def was_stopped(sample: Sample) -> bool:
    rollout = recorded_rollout(sample)
    return (sample.status, sample.remove_sample, rollout.failure) == (Sample.Status.FAILED, True, "stopped")


def test_what_still_plays_is_stopped_when_its_group_is_given_up(args: Namespace) -> None:
    async def scene(host: Host, source: DataSource, group: Group) -> None:
        long = host.play(group[0], LONG)
        await host.held(1)
        for sample in group[1:]:
            await host.play(sample, SUCCEED)
        await asyncio.wait_for(long, timeout=5)
        await host.held(0)
        assert host.engine.left_alone == 1, "the engine still makes tokens that nobody wants"
        assert was_stopped(group[0])
        # What it had is whole: an action, its answer, and nothing of the action that was cancelled.
        assert (group[0].response_length, group[0].loss_mask) == (3, [1, 1, 0])
        assert group[0].rollout_log_probs == [-0.5, -0.5, 0.0]
        assert group[0].reward == 0.0, "slime asks every sample for a number"
        environments = environments_of(args)
        assert (environments.live, environments.resting) == (0, [])
        assert set(recorded_rollout(group[0]).snapshots) <= set(environments.forgotten)

        verdict = informative(args, group)
        assert (verdict.keep, verdict.reason) == (False, "stopped")
        siblings = siblings_of(args)
        assert (siblings.groups_stopped, siblings.members_stopped) == (1, 1)
        assert siblings.tokens_saved == 4 - 2
        assert tally_of(args).stuck == 0

    running(scene, args)


def test_who_comes_when_its_group_is_given_up_does_not_play(args: Namespace) -> None:
    async def scene(host: Host, source: DataSource, group: Group) -> None:
        for sample in group[:3]:
            await host.play(sample, FAIL)
        requests, starts = len(host.engine.requests), environments_of(args).starts
        await host.play(group[3], SUCCEED)
        assert was_stopped(group[3])
        assert (group[3].loss_mask, group[3].rollout_log_probs) == ([], [])
        assert (len(host.engine.requests), environments_of(args).starts) == (requests, starts)
        assert siblings_of(args).tokens_saved == 2.0

    running(scene, args)


def test_a_group_whose_rewards_differ_is_played_to_its_end(args: Namespace) -> None:
    async def scene(host: Host, source: DataSource, group: Group) -> None:
        for sample, words in zip(group, (SUCCEED, FAIL, FAIL, FAIL), strict=True):
            await host.play(sample, words)
        assert [sample.status for sample in group] == [Sample.Status.COMPLETED] * MEMBERS
        assert informative(args, group).keep
        assert siblings_of(args).groups_stopped == 0

    running(scene, args)


def test_members_that_rest_in_the_buffer_are_given_up_with_their_group(args: Namespace) -> None:
    async def scene(host: Host, source: DataSource, group: Group) -> None:
        first = [host.play(sample, LONG) for sample in group[2:]]
        await host.held(2)
        for sample in group[:2]:
            await host.play(sample, SUCCEED)
        await host.cut_off(*first)
        assert [sample.status for sample in group[2:]] == [Sample.Status.ABORTED] * 2
        source.add_samples([group])

        assert await asyncio.to_thread(source.get_samples, 1) == [group]
        long = host.play(group[3], ["never"])
        await host.held(1)
        await host.play(group[2], ["done <end>"])
        await asyncio.wait_for(long, timeout=5)
        assert [sample.reward for sample in group[:3]] == [1.0] * 3
        assert was_stopped(group[3])
        assert environments_of(args).live == 0
        assert recorded_rollout(group[3]).resumes == 1

        # Stopped before it could go on in the next step: its group waits, and comes back once more.
        ended = group[3].to_dict() | {"metadata": dict(group[3].metadata)}
        source.add_samples([group])
        assert await asyncio.to_thread(source.get_samples, 1) == [group]
        requests = len(host.engine.requests)
        await host.play(group[3], ["done <end>"])  # slime asks again for what has FAILED
        assert (group[3].to_dict(), len(host.engine.requests)) == (ended, requests)
        group[3].status = Sample.Status.ABORTED  # as slime says of one that waits for a slot at an abort
        await host.play(group[3], ["done <end>"])
        assert was_stopped(group[3]) and len(host.engine.requests) == requests

    running(scene, args)


def test_a_restarted_job_plays_on_what_it_does_not_know_to_be_given_up(args: Namespace) -> None:
    async def scene(host: Host, source: DataSource, group: Group) -> None:
        siblings = siblings_of(args)
        for sample in group[:3]:
            await host.play(sample, FAIL)
        args.midstream["max_attempts"] = 2  # a process of its own: other settings, other parts
        engine_of(args).url = host.engine.url
        assert siblings_of(args) is not siblings
        await host.play(group[3], SUCCEED)
        assert group[3].reward == 1.0
        await engine_of(args).close()

    running(scene, args)


def test_a_member_that_failed_counts_neither_as_ended_nor_as_left(args: Namespace) -> None:
    args.midstream["max_attempts"] = 1

    async def scene(host: Host, source: DataSource, group: Group) -> None:
        await host.play(group[0], FAIL)
        await host.play(group[1], FAIL)
        # Two of three leave a chance of 0.25.
        await host.play(group[2], ["break <end>"])
        assert recorded_rollout(group[2]).failure == "environment"
        await host.play(group[3], SUCCEED)
        assert was_stopped(group[3])
        metrics: dict[str, Any] = {}
        log_rollout(0, args, group, metrics, 1.0)
        assert (metrics["rollout/stopped"], metrics["env/failed_rollouts"]) == (1.0, 1.0)

    running(scene, args)


@pytest.mark.parametrize("why", ["evaluation", "group_rm", "no_reward", "off"])
def test_no_group_is_given_up(why: str, args: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    args.group_rm = why == "group_rm"
    if why == "off":
        args.midstream["curriculum"] = {"enabled": True}
    if why == "no_reward":

        async def unscored(self: NumberEnvironment) -> None:
            return None

        monkeypatch.setattr(NumberEnvironment, "score", unscored)

    async def scene(host: Host, source: DataSource, group: Group) -> None:
        for sample in group:
            await host.play(sample, FAIL, evaluation=why == "evaluation")
        assert [sample.status for sample in group] == [Sample.Status.COMPLETED] * MEMBERS

    running(scene, args)


def test_a_stopped_member_of_a_group_that_informs_is_out_of_its_statistics(args: Namespace) -> None:
    """One that ended at the moment at which its group was given up."""

    async def scene(host: Host, source: DataSource, group: Group) -> None:
        for sample in group[:3]:
            await host.play(sample, FAIL)
        await host.play(group[3], SUCCEED)
        group[2].reward = 1.0
        assert informative(args, group).keep
        raw, rewards = post_process(args, group)
        assert raw == [0.0, 0.0, 1.0, 0.0]
        assert rewards == pytest.approx([-(3**-0.5), -(3**-0.5), 2 * 3**-0.5, 0.0], abs=1e-5)

    running(scene, args)


def test_real_workspaces_are_given_up_with_their_snapshots(tmp_path: Path) -> None:
    # Three of six that agree leave a chance of 0.43.
    early_stop = {"min_informative": 0.5, "min_finished": 3}
    layer = {"resume_policy": "continue", "curriculum": {"enabled": True, "early_stop": early_stop}}
    args = file_args(tmp_path, layer, eval_cmd="true", members=MEMBERS + 2)
    args.dynamic_sampling_filter_path = FILTER

    async def scene(host: Host, source: DataSource, group: Group) -> None:
        environments = environments_of(args)
        started = tmp_path / "started"
        for sample in group:
            sample.metadata["files"][".bashrc"] += f"slow() {{ : >{started}; sleep 600; }}\n"
        store = SnapshotStore(tmp_path / "snapshots")
        try:
            first = [host.play(sample, ["add 2 <end>", "never"]) for sample in (group[0], group[2])]
            await host.held(2)
            await host.cut_off(*first)
            assert environments.metrics()["sandbox/hot"] == 2
            assert store.statistics().snapshots > 0

            thinks = host.play(group[0], ["add 3 <end>", "never"])
            acts = host.play(group[1], ["add 4 <end>", "slow <end>"])
            await host.held(1)
            async with asyncio.timeout(10):
                while not started.exists():
                    await asyncio.sleep(0.01)
            for sample in group[3:]:
                await host.play(sample, ["add 4 <end>", "done <end>"])
            await asyncio.wait_for(asyncio.gather(thinks, acts), timeout=10)
            rests = group[2]
            await host.play(rests, ["never"])
            assert all(map(was_stopped, group[:3]))
            metrics = environments.metrics()
            assert (metrics["sandbox/in_use"], metrics["sandbox/hot"]) == (0, 0)
            assert store.statistics().snapshots == 0
            assert store.pins() == {}
        finally:
            await environments.close()

    running(scene, args)


@dataclass
class Known:
    """A play as `Siblings` sees it."""

    rollout: PartialRollout
    engine: Engine = field(default_factory=lambda: Engine("http://127.0.0.1:9"))
    is_stopped: bool = False

    def stop(self) -> None:
        self.is_stopped = True


def ends(siblings: Siblings, group: str, member: int, reward: float = 1.0) -> Known:
    """A member plays and ends at once."""
    play = Known(PartialRollout("p", group))
    with siblings.playing(play, member, MEMBERS):
        play.rollout.status, play.rollout.reward = Status.COMPLETED, reward
    return play


def test_groups_of_which_nobody_hears_again_are_forgotten_and_those_that_play_are_not() -> None:
    siblings = Siblings(lambda prompt_key, rewards, size, version: len(rewards) == 3)
    with siblings.playing(long := Known(PartialRollout("p", "first")), 0, MEMBERS):
        for member in (1, 2):
            ends(siblings, "first", member)
        ends(siblings, "lost", 0)
        for number in range(5000):
            ends(siblings, str(number), 0)
        ends(siblings, "first", 3)
        assert long.is_stopped
    ends(siblings, "lost", 1)
    ends(siblings, "lost", 2)
    assert not ends(siblings, "lost", 3).is_stopped, "the first of them is forgotten"
    ends(siblings, "4999", 1)
    ends(siblings, "4999", 2)
    assert ends(siblings, "4999", 3).is_stopped


def test_a_member_that_begins_anew_has_no_reward_any_more() -> None:
    siblings = Siblings(lambda prompt_key, rewards, size, version: len(rewards) == 2)
    ends(siblings, "g", 0)
    ends(siblings, "g", 0)
    assert not ends(siblings, "g", 1).is_stopped
    assert ends(siblings, "g", 2).is_stopped
    # A bound on lag has taken away what it had, and with that why the group was given up.
    assert not ends(siblings, "g", 0, reward=0.0).is_stopped
