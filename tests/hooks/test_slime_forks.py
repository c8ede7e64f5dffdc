"""Forks in a host's samples: what becomes of the arrays and names that are a sample's own, and of shared snapshots."""

from argparse import Namespace
from pathlib import Path

import pytest

from midstream.buffers.rollout import Span, Status
from midstream.envs.protocol import Snapshot
from midstream.hooks.answers import Generation
from midstream.hooks.slime.data_source import DataSource
from midstream.hooks.slime.members import shared_snapshots
from midstream.hooks.slime.sample import SampleSink, begin_rollout, recorded_rollout, store, task_of
from midstream.hooks.slime.settings import abandoned_of, engine_of, holds_of
from midstream.local.measure import rollout_fields
from midstream.local.sample import Sample
from tests.hooks.host import number_args
from tests.hooks.scripted import WordTokenizer


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    checkpoint = str(tmp_path / "checkpoint")
    layer = {"resume_policy": "anchor"}
    return number_args(tmp_path, layer, n_samples_per_prompt=3, save=checkpoint, load=checkpoint)


def play(sample: Sample, name: str, turns: int) -> None:
    tokenizer = WordTokenizer()
    rollout = begin_rollout(sample, task_of(sample), tokenizer)
    sink = SampleSink(Namespace(), sample, tokenizer)
    rollout.enter(Snapshot(f"{name}0", "d"))
    for number in range(1, turns + 1):
        rollout.begin_turn()
        meta_info = {"finish_reason": {}, "weight_version": "3"}
        made = Generation([1, 0], [-0.5, -0.25], "add <end>", "stop", (Span(3, 0, 2),), meta_info)
        rollout.append_action(made.tokens, made.log_probs, made.spans)
        sink.append_action(made)
        rollout.finish_action()
        rollout.append_observation([5])
        sink.append_observation([5], "obs")
        rollout.enter(Snapshot(f"{name}{number}", "d", f"{name}{number - 1}"))
    rollout.status = Status.ABORTED
    store(sample, rollout)


def forked(args: Namespace) -> tuple[DataSource, list[Sample]]:
    """The first member came two turns far, the second one, the third has not begun."""
    source = DataSource(args)
    [group] = source.get_samples(1)
    play(group[0], "a", 2)
    play(group[1], "b", 1)
    for sample, name in zip(group, "abc", strict=True):
        sample.session_id = f"session {name}"
    # What newer hosts keep beside the tokens: one set of ids per response token, experts per token but the first.
    group[0].rollout_top_p_token_ids, group[0].rollout_top_p_token_offsets = (
        list(range(12)),
        [*range(0, 14, 2)],
    )
    group[0].rollout_routed_experts = [[layer] for layer in range(6)]
    source.add_samples([group])
    engine_of(args).version = 4
    assert source.get_samples(1) == [group]
    return source, group


def test_a_forked_sample_has_the_tokens_of_its_sibling_and_its_own_name(args: Namespace) -> None:
    _, group = forked(args)
    for number, sample in enumerate(group):
        assert (sample.tokens, sample.response_length) == ([13, 1, 0, 5, 1, 0, 5], 6)
        assert sample.response == "add <end> obs add <end> obs" if number else "add <end>obsadd <end>obs"
        assert sample.rollout_log_probs == [-0.5, -0.25, 0.0] * 2
        assert sample.rollout_top_p_token_ids == list(range(12))
        assert sample.rollout_top_p_token_offsets == [0, 2, 4, 6, 8, 10, 12]
        assert sample.rollout_routed_experts == [[layer] for layer in range(6)]
        assert sample.weight_versions == ["3", "3"]
        assert (sample.index, sample.session_id) == (number, f"session {'abc'[number]}")
        assert sample.status is Sample.Status.ABORTED
        assert recorded_rollout(sample).snapshot == "a2"
    assert [sample.loss_mask for sample in group] == [[1, 1, 0] * 2, [0] * 6, [0] * 6]
    assert [snapshot.id for snapshot in abandoned_of(args)] == ["b0", "b1"]


def test_tokens_of_a_forked_group_are_trained_and_buffered_once(args: Namespace) -> None:
    source, group = forked(args)
    source.add_samples([group])
    assert [rollout.own_tokens for rollout in source.waiting()] == [4, 0, 0]
    fields = rollout_fields(source.waiting(), 4)
    assert fields["trained_tokens"] == 4
    assert fields["response_tokens"] == [4, 4, 4]
    assert fields["lag_token"] == {"1": 4}


def test_what_forks_share_outlasts_a_restart_of_the_job(args: Namespace) -> None:
    source, group = forked(args)
    source.add_samples([group])
    source.save(3)
    source.close()
    args.midstream["max_attempts"] = 2  # a process of its own: other settings, other parts
    restarted = DataSource(args)
    restarted.load(3)
    [again] = restarted.waiting_groups
    assert list(shared_snapshots([again])) == ["a0", "a1", "a2"] * 2
    freed = [holds_of(args).release(recorded_rollout(sample).snapshots.values()) for sample in again]
    assert [[snapshot.id for snapshot in each] for each in freed] == [[], [], ["a0", "a1"]]
    assert holds_of(args).in_use("a2"), "the checkpoint still needs it"
