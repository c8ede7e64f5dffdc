"""Our hooks in the real rollout path of slime and of its fork, on a real engine."""

import re
from math import exp
from statistics import fmean, stdev
from typing import Any

import pytest

from midstream.buffers.rollout import PartialRollout, Phase
from midstream.local.model.tokenizer import VOCABULARY
from tests.contract import workload
from tests.contract.conftest import Result


@pytest.fixture
def cut_off(results: dict[str, Result]) -> Result:
    return results["cut_off"]


@pytest.fixture
def filtered(results: dict[str, Result]) -> Result:
    return results["filtered"]


@pytest.fixture
def given_up(results: dict[str, Result]) -> Result:
    return results["given_up"]


def waiting(result: Result, rollout_id: int) -> list[PartialRollout]:
    return [
        PartialRollout.from_json(record) for record in result["rollouts"][rollout_id]["waiting"]["rollouts"]
    ]


def samples(result: Result, rollout_id: int) -> list[dict[str, Any]]:
    return result["rollouts"][rollout_id]["samples"]


def response(sample: dict[str, Any]) -> list[int]:
    return sample["tokens"][len(sample["tokens"]) - sample["response_length"] :]


def answers(sample: dict[str, Any]) -> list[str]:
    """The words with which the environment answered, without those that fill up the response."""
    words = [VOCABULARY[token] for token in response(sample)]
    turns = sample["metadata"]["midstream"]["turns"]
    observed = [word for turn in turns for word in words[turn["action_end"] : turn["end"]]]
    return [word for word in observed if word != "ok"]


def labels(result: Result, rollout_id: int) -> list[str]:
    return sorted(sample["prompt"].split()[1] for sample in samples(result, rollout_id))


def test_a_step_trains_what_is_finished_first_and_then_what_was_cut_off(cut_off):
    assert [labels(cut_off, rollout_id) for rollout_id in range(3)] == [
        ["f0", "f0", "f1", "f1", "f2", "f2"],
        ["f3", "f3", "f4", "f4", "f5", "f5"],
        ["f6", "f6", "f7", "f7", "f8", "f8"],
    ]


def test_the_abort_cuts_into_a_turn_and_into_a_step(cut_off):
    left = waiting(cut_off, 0)
    assert cut_off["rollouts"][0]["waiting"]["groups"] == 3
    in_turn = [r for r in left if r.open_turn and r.open_turn.phase is Phase.GENERATING and len(r.turns) > 1]
    in_step = [r for r in left if r.open_turn and r.open_turn.phase is Phase.ACTING]
    assert in_turn
    assert in_step


def test_an_action_goes_on_under_the_next_policy(cut_off):
    """The abort comes in the middle of a turn, so that two versions share that turn's action."""
    cut = {
        tuple(r.tokens)
        for r in waiting(cut_off, 0)
        if r.open_turn and r.open_turn.action_end - r.open_turn.start > 0
    }
    resumed = [
        s for s in samples(cut_off, 1) if any(tuple(response(s)[: len(tokens)]) == tokens for tokens in cut)
    ]
    assert len(resumed) == len(cut)
    assert any(
        turn["start"] < start < turn["action_end"]
        for sample in resumed
        for version, start, _ in sample["metadata"]["midstream"]["spans"]
        for turn in sample["metadata"]["midstream"]["turns"]
        if version == 2
    )


def test_no_token_is_lost_and_every_token_says_which_policy_made_it(cut_off):
    for rollout_id in range(3):
        for sample in samples(cut_off, rollout_id):
            spans = sample["metadata"]["midstream"]["spans"]
            made = [0] * sample["response_length"]
            for _, start, end in spans:
                made[start:end] = [1] * (end - start)
            assert made == sample["loss_mask"]
            assert all(
                log_prob < 0 for log_prob, mask in zip(sample["rollout_log_probs"], made, strict=True) if mask
            )
            assert {version for version, _, _ in spans} == {int(v) for v in sample["weight_versions"]}
        before = [r.tokens for r in waiting(cut_off, rollout_id - 1)] if rollout_id else []
        now = [response(sample) for sample in samples(cut_off, rollout_id)]
        assert all(any(tokens == response_[: len(tokens)] for response_ in now) for tokens in before)


def test_the_environment_goes_on_where_it_was(cut_off):
    """The transcript's count of steps and the workspace's agree, although the workspace was cut off in between."""
    for rollout_id in range(3):
        for sample in samples(cut_off, rollout_id):
            steps = workload.LONG_STEPS if sample["prompt"].split()[1] in ("f3", "f4") else 1
            assert answers(sample) == [str(count) for count in range(1, steps)]
            assert sample["reward"] == 1.0
            assert (sample["metadata"]["midstream"]["resumes"] > 0) == (rollout_id > 0)
            assert sample["metadata"]["midstream"]["attempts"] == 0


def test_a_restart_of_the_host_loses_no_group(cut_off):
    saved, reloaded = cut_off["rollouts"][1]["waiting"], cut_off["rollouts"][2]["reloaded"]
    assert saved["groups"] == 3
    assert all(reloaded[name] == saved[name] for name in saved)


def test_convert_and_split_keep_every_sample_whole(cut_off):
    for rollout_id in range(3):
        by_index = {sample["index"]: sample for sample in samples(cut_off, rollout_id)}
        ranks = cut_off["rollouts"][rollout_id]["ranks"]
        assert len(ranks) == 2
        for rank in ranks:
            for position, index in enumerate(rank["sample_indices"]):
                sample = by_index.pop(index)
                assert rank["tokens"][position] == sample["tokens"]
                assert rank["response_lengths"][position] == sample["response_length"]
                assert rank["loss_masks"][position] == sample["loss_mask"]
                assert rank["rollout_log_probs"][position] == pytest.approx(
                    sample["rollout_log_probs"], rel=1e-6
                )
        assert not by_index


def test_notes_reach_every_rank_with_their_samples(cut_off, host):
    """Of a rollout that was resumed the tokens of the version before weigh less."""
    if host != "slime":
        pytest.skip("slime's fork has no trainer's hook")
    weights: dict[int, list[float]] = {1: [], 2: []}
    for rank in cut_off["rollouts"][1]["ranks"]:
        assert len(rank["round_number"]) == len(rank["response_lengths"]) > 0
        for note, length in zip(rank["round_number"], rank["response_lengths"], strict=True):
            assert (sum(note["lengths"]), note["version"]) == (length, 2)
            for version, weight in zip(note["versions"], note["weights"], strict=True):
                if version in weights:
                    weights[version].append(weight)
    assert weights[1]
    assert weights[2]
    assert max(weights[1]) <= exp(-0.1)


def test_only_informative_groups_are_trained(filtered):
    trained = samples(filtered, 0)
    # The two even groups come first; a group of the others may be even by chance, and is dropped too.
    counted = re.search(r"'rollout/dynamic_filter/drop_all_1': (\d+)", filtered["log"])
    assert counted and int(counted.group(1)) >= 2
    assert len({sample["group_index"] for sample in trained}) == 1
    assert {sample["reward"] for sample in trained} == {0.0, 1.0}


def test_rewards_are_normalised_within_their_group(filtered):
    rewards = {sample["index"]: sample["reward"] for sample in samples(filtered, 0)}
    mean, deviation = fmean(rewards.values()), stdev(rewards.values())
    for rank in filtered["rollouts"][0]["ranks"]:
        expected = [(rewards[index] - mean) / deviation for index in rank["sample_indices"]]
        assert rank["rewards"] == pytest.approx(expected, rel=1e-4)


def test_the_discard_policy_leaves_nothing_behind(filtered):
    assert filtered["rollouts"][0]["waiting"]["groups"] == 0


def test_a_group_that_is_given_up_is_dropped_without_its_last_members(given_up):
    """The one that hangs would have had the reward of the others in the end."""
    assert "'rollout/dynamic_filter/drop_stopped': 1" in given_up["log"]
    assert "group 0 is given up" in given_up["log"]
    trained = samples(given_up, 0)
    assert {sample["group_index"] for sample in trained} == {1}
    assert sorted(sample["reward"] for sample in trained) == [0.0, 0.0, 0.0, 1.0]
    assert not any(sample["remove_sample"] for sample in trained)


def test_the_host_logs_our_metrics_with_its_own(cut_off):
    assert "'staleness/token_mean'" in cut_off["log"]
    assert "'rollout/response_len/mean'" in cut_off["log"]
