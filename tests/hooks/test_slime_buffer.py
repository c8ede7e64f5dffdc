"""Groups through slime's buffer and back: samples and records change together, and snapshots are given up."""

import asyncio
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from midstream.buffers.policies.base import DROP, RESUME, Choice, Policy
from midstream.buffers.rollout import PartialRollout
from midstream.hooks.slime.data_source import DataSource
from midstream.hooks.slime.generate import generate
from midstream.hooks.slime.log import log_rollout
from midstream.hooks.slime.sample import recorded_rollout
from midstream.hooks.slime.settings import abandoned_of, engine_of, environments_of, tally_of
from midstream.local.sample import Sample
from tests.hooks.host import number_args
from tests.hooks.played import play
from tests.hooks.scripted import IDS, ScriptedEngine


class DropLong(Policy):
    def __init__(self, longest: int) -> None:
        self.longest = longest

    def choose(self, rollout: PartialRollout, version: int) -> Choice:
        return DROP if rollout.generated_tokens > self.longest else RESUME


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    return number_args(tmp_path, {"resume_policy": "rewind", "policies": {"rewind": {"max_lag": 2}}})


def waiting(args: Namespace, *turns: tuple[int, str], version: int) -> tuple[DataSource, list[Sample]]:
    """A data source in which one group waits; the first of its members has taken these turns."""
    source = DataSource(args)
    [group] = source.get_samples(1)
    play(group[0], *turns)
    source.add_samples([group])
    engine_of(args).version = version
    return source, group


def test_a_rewound_sample_and_its_record_agree(args: Namespace) -> None:
    source, group = waiting(args, (0, ""), (1, "b"), (4, "c"), version=4)
    assert source.get_samples(1) == [group]
    sample = group[0]
    assert (sample.tokens, sample.response_length) == ([13, 1, 0, IDS["obs"]], 3)
    assert sample.response == "add <end> obs"
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 1, 0], [-0.5, -0.25, 0.0])
    assert sample.status is Sample.Status.ABORTED
    rollout = recorded_rollout(sample)
    assert (len(rollout.turns), rollout.snapshot, list(rollout.snapshots)) == (1, "s1", ["s0", "s1"])
    assert (source.counters.rewound, source.counters.discarded_tokens) == (1, {"policy": 4})
    assert {snapshot.id for snapshot in abandoned_of(args)} == {"s2", "s3"}


def test_what_is_beyond_a_bound_starts_anew(args: Namespace) -> None:
    args.midstream["bounds"] = {"token": 3}
    source, group = waiting(args, (0, ""), (4, ""), version=4)
    source.get_samples(1)
    assert (group[0].tokens, group[0].response, group[0].response_length) == ([13], "", 0)
    assert group[0].status is Sample.Status.PENDING
    assert source.counters.discarded_tokens == {"token_lag": 4}


def test_a_dropped_group_is_replaced_by_a_new_prompt(args: Namespace) -> None:
    args.midstream["bounds"] = {"token": 3, "beyond": "drop"}
    source, group = waiting(args, (0, ""), version=4)
    [other] = source.get_samples(1)
    assert other[0].group_index == group[0].group_index + 1
    assert (source.counters.dropped, source.get_buffer_length()) == (2, 0)
    assert {snapshot.id for snapshot in abandoned_of(args)} == {"s0", "s1"}


def test_before_the_engine_has_answered_nothing_is_too_old(args: Namespace) -> None:
    source, group = waiting(args, (0, "b"), version=99)
    engine_of(args).version = None
    before = recorded_rollout(group[0])
    source.get_samples(1)
    assert recorded_rollout(group[0]) == before


def test_a_policy_of_the_users_own_decides(args: Namespace) -> None:
    args.midstream |= {"resume_policy": f"{__name__}:DropLong", "policies": {"custom": {"longest": 2}}}
    source, group = waiting(args, (4, ""), version=4)
    assert source.get_samples(1) == [group]
    play(group[0], (4, ""))
    source.add_samples([group])
    assert source.get_samples(1) != [group]
    assert source.counters.discarded_tokens == {"policy": 4}


def test_samples_of_one_rollout_start_anew_as_one(args: Namespace) -> None:
    source = DataSource(args)
    [group] = source.get_samples(1)
    play(group[0], (0, ""))
    split = Sample.from_dict(json.loads(json.dumps(group[0].to_dict())))
    group[0] = [group[0], split]
    source.add_samples([group])
    engine_of(args).version = 4
    source.get_samples(1)
    assert [sample.response_length for sample in group[0]] == [3, 3], "within the bounds they go on together"

    source.add_samples([group])
    engine_of(args).version = 40
    assert source.get_samples(1) == [group]
    assert isinstance(group[0], Sample)
    assert (group[0].response_length, source.counters.restarted) == (0, 1)


def generate_all(args: Namespace, engine: ScriptedEngine, *samples: Sample) -> None:
    async def play_them() -> None:
        async with engine.serving() as url:
            client = engine_of(args)
            client.url = url
            try:
                for sample in samples:
                    await generate(args, sample, {"max_new_tokens": 20})
            finally:
                await client.close()

    asyncio.run(play_them())


def test_generate_gives_up_what_a_rewind_left_behind_before_it_plays(args: Namespace) -> None:
    source, _ = waiting(args, (0, "b"), version=4)
    [[first, second]] = source.get_samples(1)
    assert recorded_rollout(first).snapshot == "s0"
    # The scripted environments read their state off a snapshot's id.
    record = first.metadata["midstream"]
    record["snapshots"], record["snapshot"] = {"0": record["snapshots"]["s0"] | {"id": "0"}}, "0"
    generate_all(args, ScriptedEngine([("done <end>", "stop")] * 2, version=4), first, second)
    assert environments_of(args).forgotten[:2] == ["s1", "0"]
    assert environments_of(args).resumed_from == ["0"]
    assert abandoned_of(args) == []
    assert [sample.status for sample in (first, second)] == [Sample.Status.COMPLETED] * 2
    assert recorded_rollout(first).resumes == 0, "nothing of the model's was left to go on from"


def test_a_rollout_that_outlasts_its_deadline_is_counted(args: Namespace) -> None:
    args.midstream["environment"] |= {"step_timeout_s": 0.1, "eval_timeout_s": 0.1}
    args.midstream["bounds"] = {"deadline_s": 0.3}
    args.reward_key = "score"
    [[sample, _]] = DataSource(args).get_samples(1)
    environments_of(args).slow_s = 30.0
    generate_all(args, ScriptedEngine([("slow <end>", "stop")]), sample)
    assert (sample.status, sample.remove_sample) == (Sample.Status.FAILED, True)
    assert sample.reward == {"score": 0.0}, "a host asks every sample for its reward by that name"
    assert tally_of(args).stuck == 1


def test_the_buffer_is_logged_zeros_included(args: Namespace) -> None:
    waiting(args, (0, "b"), version=4)
    metrics: dict[str, Any] = {}
    assert log_rollout(0, args, [], metrics, 1.0) is False
    assert metrics["buffer/groups"] == 1.0
    assert metrics["buffer/stuck"] == metrics["buffer/discarded_tokens/token_lag"] == 0.0
