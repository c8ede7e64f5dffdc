"""The slime hooks on the local job's samples: the same code that runs in slime and its fork."""

import json
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from midstream.buffers.rollout import PartialRollout, RecordError, Span, Status
from midstream.envs.protocol import Snapshot, Task
from midstream.hooks.answers import Generation
from midstream.hooks.credit.staleness import staleness_metrics
from midstream.hooks.slime.data_source import DataSource
from midstream.hooks.slime.filters import informative
from midstream.hooks.slime.host import host_of
from midstream.hooks.slime.log import rollout_metrics
from midstream.hooks.slime.payload import journaled, restored
from midstream.hooks.slime.rewards import post_process
from midstream.hooks.slime.sample import (
    SampleSink,
    begin_rollout,
    no_reward,
    recorded_rollout,
    store,
    task_of,
)
from midstream.local.sample import Sample
from tests.hooks.host import host_args, number_args
from tests.hooks.scripted import WordTokenizer

TASKS = 6


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    task = {"prompt": "7", "metadata": {"files": {}, "pre_commands": [], "eval_cmd": "true"}}
    return host_args(
        tmp_path,
        [task | {"label": str(number)} for number in range(TASKS)],
        midstream={"run_dir": str(tmp_path), "resume_policy": "continue"},
    )


def play(sample: Sample, status: Status = Status.ABORTED, reward: float | None = None) -> PartialRollout:
    """Let ``sample`` take a turn as ``generate`` would."""
    tokenizer = WordTokenizer()
    rollout = begin_rollout(sample, task_of(sample), tokenizer)
    sink = SampleSink(Namespace(), sample, tokenizer)
    rollout.enter(Snapshot(id="s0", digest="d0"))
    rollout.begin_turn()
    made = Generation(
        [1, 0], [-0.5, -0.25], "add <end>", "stop", (Span(3, 0, 2),), {"finish_reason": {"type": "stop"}}
    )
    rollout.append_action(made.tokens, made.log_probs, made.spans)
    sink.append_action(made)
    rollout.finish_action()
    rollout.append_observation([5, 7])
    sink.append_observation([5, 7], "obs 1")
    rollout.enter(Snapshot(id="s1", digest="d1"))
    rollout.status, rollout.reward = status, reward
    store(sample, rollout)
    return rollout


def test_a_sample_carries_its_rollout_through_pickle_and_dumps() -> None:
    sample = Sample(group_index=4, index=9, prompt="7")
    rollout = play(sample)
    assert (sample.tokens, sample.response_length) == ([13, 1, 0, 5, 7], 4)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 1, 0, 0], [-0.5, -0.25, 0.0, 0.0])
    assert recorded_rollout(pickle.loads(pickle.dumps(sample))) == rollout
    assert recorded_rollout(Sample.from_dict(json.loads(json.dumps(sample.to_dict())))) == rollout


def test_what_is_appended_to_a_record_stays_out_of_the_sample() -> None:
    sample = Sample(group_index=4, index=9, prompt="7")
    play(sample)
    rollout = recorded_rollout(sample)
    assert recorded_rollout(sample, shared=True) == rollout
    rollout.begin_turn()
    rollout.append_action([1], [-0.5], [Span(3, 0, 1)])
    assert (sample.tokens, sample.response_length) == ([13, 1, 0, 5, 7], 4)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 1, 0, 0], [-0.5, -0.25, 0.0, 0.0])


def test_the_record_is_no_part_of_the_task() -> None:
    sample = Sample(prompt="7", label="x", metadata={"files": {}})
    before = task_of(sample).key
    play(sample)
    sample.metadata["start_rollout_id"] = 3
    assert task_of(sample).key == before == Task("7", "x", {"files": {}}).key


def test_tokens_that_no_record_explains_are_refused() -> None:
    sample = Sample(index=1, prompt="7", tokens=[1, 2], response_length=1)
    with pytest.raises(RecordError, match="through midstream's generate"):
        begin_rollout(sample, task_of(sample), WordTokenizer())


def test_a_record_that_disagrees_with_its_sample_is_refused() -> None:
    sample = Sample(prompt="7")
    play(sample)
    sample.rollout_log_probs.pop()
    with pytest.raises(RecordError, match="log-probs"):
        recorded_rollout(sample)


def test_a_failed_rollout_is_out_of_the_loss() -> None:
    sample = Sample(prompt="7")
    play(sample, Status.FAILED)
    assert sample.remove_sample
    assert sample.status is Sample.Status.FAILED


def test_a_rollout_that_failed_before_its_first_token_has_log_probs() -> None:
    sample = Sample(prompt="7")
    rollout = begin_rollout(sample, task_of(sample), WordTokenizer())
    rollout.status = Status.FAILED
    store(sample, rollout)
    assert (sample.rollout_log_probs, sample.loss_mask, sample.remove_sample) == ([], [], True)


def test_a_failed_rollout_has_each_reward_that_a_host_asks_for() -> None:
    sample = Sample(prompt="7")
    rollout = begin_rollout(sample, task_of(sample), WordTokenizer())
    rollout.status = Status.FAILED
    store(sample, rollout, no_reward(Namespace(reward_key="score", eval_reward_key="accuracy")))
    assert sample.reward == {"score": 0.0, "accuracy": 0.0}
    again = restored(journaled(sample, goes_back=False).payload, Sample)
    assert again.reward == sample.reward, "after a restart, too"
    assert no_reward(Namespace(reward_key=None)) == 0.0


@pytest.mark.parametrize(
    ("policy", "flags", "words"),
    [
        ("continue", {"partial_rollout": False}, "needs --partial-rollout"),
        ("restart", {"partial_rollout": False}, "needs --partial-rollout"),
        ("wait", {"partial_rollout": False}, "would cut rollouts off"),
    ],
)
def test_flags_that_contradict_the_policy_are_refused(
    args: Namespace, policy: str, flags: dict[str, Any], words: str
) -> None:
    args.midstream["resume_policy"] = policy
    vars(args).update(flags)
    with pytest.raises(ValueError, match=f"resume_policy={policy}.*{words}"):
        DataSource(args)


def test_waiting_groups_go_before_new_prompts(args: Namespace) -> None:
    source = DataSource(args)
    first, second = source.get_samples(2)
    play(second[0])
    source.add_samples([second])
    assert source.get_buffer_length() == 1
    again, new = source.get_samples(2)
    assert again is second
    assert new[0].group_index == 2
    assert first[0].group_index == 0


def test_restart_drops_what_was_made_and_keeps_the_prompt(args: Namespace) -> None:
    args.midstream["resume_policy"] = "restart"
    source = DataSource(args)
    [group] = source.get_samples(1)
    play(group[0])
    play(group[1], Status.COMPLETED, reward=1.0)
    source.add_samples([group])
    [again] = source.get_samples(1)
    assert (again[0].tokens, again[0].response, again[0].response_length) == ([13], "", 0)
    assert again[0].status is Sample.Status.PENDING
    assert again[0].loss_mask is None and again[0].rollout_log_probs is None
    assert recorded_rollout(again[0]).discarded_tokens == 2
    assert (again[1].reward, again[1].response_length) == (1.0, 4), "a finished member was restarted"
    assert source.counters.discarded_tokens == {"cut_off": 2}


def test_discard_keeps_nothing(args: Namespace) -> None:
    args.midstream["resume_policy"] = "discard"
    source = DataSource(args)
    [group] = source.get_samples(1)
    play(group[0])
    source.add_samples([group])
    assert source.get_buffer_length() == 0
    assert (source.counters.dropped, source.counters.discarded_tokens) == (2, {"cut_off": 2})


def newest_first(args: Namespace, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    assert rollout_id is None, "slime passes None"
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def greedy(args: Namespace, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    return list(buffer)


def test_the_hosts_buffer_filter_chooses(args: Namespace) -> None:
    args.buffer_filter_path = f"{__name__}.newest_first"
    source = DataSource(args)
    groups = source.get_samples(3)
    source.add_samples(groups)
    assert source.get_samples(2) == [groups[2], groups[1]]


def test_a_buffer_filter_that_duplicates_groups_is_refused(args: Namespace) -> None:
    args.buffer_filter_path = f"{__name__}.greedy"
    source = DataSource(args)
    source.add_samples(source.get_samples(2))
    with pytest.raises(ValueError, match="remove exactly those"):
        source.get_samples(1)


def test_a_broken_group_is_refused(args: Namespace) -> None:
    source = DataSource(args)
    with pytest.raises(ValueError, match="n_samples_per_prompt=2"):
        source.add_samples([[Sample()]])


def test_epochs_hand_out_every_prompt_once(args: Namespace) -> None:
    args.rollout_shuffle = True
    source = DataSource(args)
    labels = [[group[0].label for group in source.get_samples(TASKS)] for _ in range(3)]
    assert all(sorted(epoch) == [str(number) for number in range(TASKS)] for epoch in labels)
    assert labels[0] != labels[1] or labels[1] != labels[2]


def rewarded(*rewards: float, removed: tuple[int, ...] = (), group: int = 0) -> list[Sample]:
    return [Sample(group_index=group, reward=r, remove_sample=i in removed) for i, r in enumerate(rewards)]


@pytest.mark.parametrize(
    ("group", "keep", "reason"),
    [
        (rewarded(0, 1), True, None),
        (rewarded(1, 1), False, "all_1"),
        (rewarded(0, 0), False, "all_0"),
        (rewarded(0, 1, 1, removed=(0,)), False, "all_1"),
        (rewarded(0, 0, removed=(0, 1)), False, "failed"),
        ([rewarded(0, 0), rewarded(1)], True, None),
    ],
)
def test_only_groups_whose_rewards_differ_inform(group: list[Any], keep: bool, reason: str | None) -> None:
    verdict = informative(Namespace(), group)
    assert (verdict.keep, verdict.reason) == (keep, reason)


def test_rewards_are_normalised_in_their_real_groups(tmp_path: Path) -> None:
    samples = rewarded(0, 1, group=0) + rewarded(1, 1, 0, 0, 9, removed=(4,), group=1)
    raw, rewards = post_process(number_args(tmp_path, {}, grpo_std_normalization=False), samples)
    assert raw == [0, 1, 1, 1, 0, 0, 9]
    assert rewards == [-0.5, 0.5, 0.5, 0.5, -0.5, -0.5, 0.0]
    _, scaled = post_process(number_args(tmp_path, {}, grpo_std_normalization=True), samples)
    # Deviation with n - 1: sqrt(0.5) for two, sqrt(1/3) for four.
    assert scaled == pytest.approx(
        [-(0.5**0.5), 0.5**0.5, *[0.75**0.5] * 2, *[-(0.75**0.5)] * 2, 0.0], abs=1e-5
    )


def test_a_group_of_one_has_no_advantage(tmp_path: Path) -> None:
    assert post_process(number_args(tmp_path, {}), rewarded(3.0))[1] == [0.0]


def test_staleness_counts_versions_per_rollout_and_per_token() -> None:
    fresh, stale = Sample(prompt="7"), Sample(prompt="7")
    play(fresh)
    play(stale)
    stale.metadata["midstream"]["resumes"] = 2
    samples = [fresh, stale, Sample(prompt="7")]
    rollouts = [recorded_rollout(sample) for sample in samples[:2]]
    assert staleness_metrics(rollouts, version=5, bound=1) == {
        "staleness/trajectory_mean": 2.0,
        "staleness/trajectory_max": 2.0,
        "staleness/token_mean": 2.0,
        "staleness/token_max": 2.0,
        "staleness/env_mean": 2.0,
        "staleness/env_max": 2.0,
        "staleness/env_share_beyond": 1.0,
        "staleness/from_the_future": 0.0,
    }
    early = staleness_metrics(rollouts, version=2, bound=None)
    assert early.pop("staleness/from_the_future") == 2.0
    assert set(early.values()) == {0.0}
    assert set(staleness_metrics([], version=5, bound=1).values()) == {0.0}
    assert rollout_metrics(samples, rollouts) == {
        "rollout/resumed": 1.0,
        "rollout/resumes": 2.0,
        "rollout/stopped": 0.0,
        "rollout/agent_faults": 0.0,
        "env/snapshot_wait_mean_s": 0.0,
        "env/failed_rollouts": 0.0,
    }
    assert set(rollout_metrics([], []).values()) == {0.0}


def test_a_sample_of_no_known_host_is_named() -> None:
    with pytest.raises(LookupError, match="builtins.dict is not a sample of"):
        host_of({})
