"""The numbers of a run against small runs whose numbers are known by hand."""

import math
from typing import Any

import pytest

from midstream.local.events import RunEvents, sort_out
from midstream.local.summary import covered_s, summarise, trainer_wait_fraction


def run_of(*steps: dict[str, Any], end: dict[str, Any] | None = None) -> RunEvents:
    events: list[dict[str, Any]] = [{"kind": "run", "strategy": "continue"}]
    events += [{"kind": "step", "step": number, **step} for number, step in enumerate(steps)]
    return sort_out([*events, *([{"kind": "end", **end}] if end else [])])


def test_counts_are_summed_and_what_is_left_in_the_buffer_is_wasted() -> None:
    steps = (
        {
            "trained_rollouts": 2,
            "generated_tokens": 100,
            "reprefilled_tokens": 0,
            "wasted_tokens": 10,
            "buffered_tokens": 40,
            "response_tokens": [20, 30],
            "resumes": 0,
            "restores_checked": 0,
            "restores_bad": 0,
            "logprob_gap_fresh": 2e-6,
        },
        {
            "trained_rollouts": 2,
            "generated_tokens": 60,
            "reprefilled_tokens": 25,
            "wasted_tokens": 0,
            "buffered_tokens": 30,
            "response_tokens": [50, 20],
            "resumes": 3,
            "restores_checked": 2,
            "restores_bad": 1,
            "failed_rollouts": 2,
            "logprob_gap_fresh": 1e-6,
        },
    )
    summary = summarise(run_of(*steps, end={"wall_s": 9.0, "status": "ok"}))
    assert summary == {
        "strategy": "continue",
        "status": "ok",
        "steps": 2,
        "wall_s": 9.0,
        "trained_rollouts": 4,
        "generated_tokens": 160,
        "wasted_tokens": 40,
        "wasted_fraction": 0.25,
        "reprefilled_tokens": 25,
        "buffered_tokens": 30,
        "lost_tokens": 0,
        "trainer_wait_fraction": 0.0,
        "reward_first": None,
        "reward_last": None,
        "reward_held_out": None,
        "reward_held_out_sources": {},
        "resumes": 3,
        "restores_checked": 2,
        "restores_bad": 1,
        "failed_rollouts": 2,
        "max_logprob_gap_fresh": 2e-6,
        "mean_response_tokens": 30.0,
        "lag_trajectory_mean": None,
        "lag_trajectory_max": None,
        "lag_token_mean": None,
        "lag_token_max": None,
        "lag_environment_mean": None,
        "lag_environment_max": None,
    }


def test_lags_count_by_rollout_and_by_token() -> None:
    steps = (
        {"lag_trajectory": [0, 3], "lag_environment": [0, 2], "lag_token": {"0": 90, "3": 10}},
        {"lag_trajectory": [1], "lag_environment": [0], "lag_token": {"0": 95, "1": 5}},
    )
    summary = summarise(run_of(*steps))
    assert (summary["lag_trajectory_mean"], summary["lag_trajectory_max"]) == (pytest.approx(4 / 3), 3)
    assert (summary["lag_token_mean"], summary["lag_token_max"]) == (pytest.approx(35 / 200), 3)
    assert (summary["lag_environment_mean"], summary["lag_environment_max"]) == (pytest.approx(2 / 3), 2)


def test_the_score_on_held_out_tasks_is_the_run_s_last() -> None:
    sources = {
        "easy": {"tasks": 4, "failed": 0, "reward_mean": 1.0},
        "hard": {"tasks": 0, "reward_mean": None},
    }
    scored = {"kind": "evaluation", "version": 9, "reward_mean": 0.625, "sources": sources}
    earlier = {"kind": "evaluation", "version": 0, "reward_mean": 0.25}
    summary = summarise(sort_out([{"kind": "run", "strategy": "wait"}, earlier, scored]))
    assert summary["reward_held_out"] == 0.625
    assert summary["reward_held_out_sources"] == {"easy": 1.0, "hard": None}


@pytest.mark.parametrize(
    ("rewards", "first", "last"),
    [
        ([0.25], 0.25, 0.25),
        ([0.0, 0.2, 0.4, 0.6], 0.0, 0.6),
        ([0.0, 0.5, *[9.0] * 6, 0.5, 1.0], 0.25, 0.75),
        ([0.0, 0.5, *[9.0] * 10, 0.5, 1.0], 0.25, 0.75),
        ([None, 0.5, *[9.0] * 6, math.nan, 1.0], 0.5, 1.0),
        ([None], None, None),
    ],
)
def test_rewards_are_means_over_the_first_and_the_last_fifth(
    rewards: list[float | None], first: float | None, last: float | None
) -> None:
    summary = summarise(run_of(*({"reward_mean": reward} for reward in rewards)))
    assert (summary["reward_first"], summary["reward_last"]) == (first, last)


def test_the_trainer_waits_where_only_rollouts_run() -> None:
    one_after_the_other = run_of(
        {"rollout_start": 0.0, "rollout_end": 4.0, "train_start": 4.0, "train_end": 5.0, "push_end": 6.0},
        {"rollout_start": 6.0, "rollout_end": 8.0, "train_start": 8.0, "train_end": 9.0, "push_end": 10.0},
        end={"wall_s": 12.0, "status": "ok"},
    )
    assert trainer_wait_fraction(one_after_the_other) == pytest.approx(6 / 12)
    overlapped = run_of(
        {"rollout_start": 0.0, "rollout_end": 4.0, "train_start": 4.0, "train_end": 6.0, "push_end": 6.0},
        {"rollout_start": 4.0, "rollout_end": 8.0, "train_start": 8.0, "train_end": 10.0, "push_end": 10.0},
    )
    assert trainer_wait_fraction(overlapped) == pytest.approx(6 / 10)


def test_a_run_that_was_killed_is_summarised_as_far_as_it_got() -> None:
    killed = run_of({"rollout_start": 0.0, "rollout_end": 4.0, "generated_tokens": None})
    summary = summarise(killed)
    assert (summary["status"], summary["wall_s"], summary["steps"]) == ("unfinished", 4.0, 1)
    assert summary["wasted_fraction"] is None
    assert summary["trainer_wait_fraction"] == 1.0
    empty = summarise(run_of())
    assert (empty["steps"], empty["wall_s"], empty["trainer_wait_fraction"]) == (0, 0.0, None)


def test_a_resumed_run_counts_no_step_twice_and_all_of_its_time() -> None:
    first = {"rollout_start": 0.0, "rollout_end": 4.0, "train_start": 4.0, "push_end": 5.0}
    lost = {"rollout_start": 5.0, "rollout_end": 9.0, "train_start": 9.0, "push_end": 10.0}
    again = {"rollout_start": 12.0, "rollout_end": 16.0, "train_start": 16.0, "push_end": 17.0}
    counts = {"generated_tokens": 100, "trained_rollouts": 4}
    events: list[dict[str, Any]] = [
        {"kind": "run", "strategy": "continue", "resumed_at": None, "elapsed_s": 0.0},
        {"kind": "step", "step": 0, **first, **counts},
        {"kind": "step", "step": 1, **lost, **counts},
        {"kind": "end", "wall_s": 12.0, "status": "interrupted"},
        {"kind": "run", "strategy": "continue", "resumed_at": 1, "elapsed_s": 12.0},
    ]
    resumed = sort_out(events)
    summary = summarise(resumed)
    assert (summary["status"], summary["steps"], summary["wall_s"]) == ("unfinished", 1, 12.0)
    assert (summary["generated_tokens"], summary["lost_tokens"]) == (100, 100)
    events += [
        {"kind": "step", "step": 1, **again, **counts},
        {"kind": "end", "wall_s": 20.0, "status": "ok"},
    ]
    summary = summarise(sort_out(events))
    assert (summary["status"], summary["steps"], summary["wall_s"]) == ("ok", 2, 20.0)
    assert (summary["trained_rollouts"], summary["generated_tokens"], summary["lost_tokens"]) == (8, 200, 100)
    assert summary["trainer_wait_fraction"] == pytest.approx(12 / 20)


def test_covered_seconds_count_overlaps_once() -> None:
    assert covered_s([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
