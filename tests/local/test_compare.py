"""The main job on real parts: a real SGLang server, Megatron-core, sandboxes with real shells."""

import json
import math
import operator
from pathlib import Path
from typing import Any

import pytest

from tests.local import running

STRATEGIES = ("wait", "discard", "restart", "continue", "naive")
SOURCES = "{submitted: {share: 1, check: submit}, solved: {share: 3}}"
FIELDS = {
    "strategy", "steps", "wall_s", "trained_rollouts", "generated_tokens", "wasted_tokens", "wasted_fraction",
    "trainer_wait_fraction", "reward_first", "reward_last", "resumes", "restores_checked", "restores_bad",
    "max_logprob_gap_fresh", "mean_response_tokens", "reward_held_out", "reprefilled_tokens",
}  # fmt: skip


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    run_dir = tmp_path_factory.mktemp("compare") / "run"
    held_out = ["tasks.held_out=4", "tasks.held_out_every=2", f"tasks.sources={SOURCES}"]
    done = running.run(run_dir, "--json", "--steps", "3", "--strategies", ",".join(STRATEGIES), *held_out)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed == json.loads((run_dir / "compare.json").read_text())
    assert Path(printed["report"]).is_file()
    return run_dir, {run["strategy"]: run for run in printed["runs"]}


def test_every_strategy_trains_all_its_steps(compared: tuple[Path, dict[str, Any]]) -> None:
    _, runs = compared
    assert tuple(runs) == STRATEGIES
    for run in runs.values():
        assert run.keys() >= FIELDS
        assert (run["steps"], run["trained_rollouts"]) == (3, 3 * 4 * 4)
        assert 0 < run["trainer_wait_fraction"] < 1


def test_the_engine_and_the_trainer_agree_on_fresh_tokens(compared: tuple[Path, dict[str, Any]]) -> None:
    for run in compared[1].values():
        assert 0 < run["max_logprob_gap_fresh"] <= 1e-4


def test_continue_resumes_in_restored_environments(compared: tuple[Path, dict[str, Any]]) -> None:
    run = compared[1]["continue"]
    assert run["resumes"] > 0
    assert run["restores_checked"] > 0
    assert run["restores_bad"] == 0
    assert compared[1]["naive"]["restores_checked"] == 0


def test_only_what_goes_on_is_read_again(compared: tuple[Path, dict[str, Any]]) -> None:
    runs = compared[1]
    assert runs["wait"]["reprefilled_tokens"] == runs["discard"]["reprefilled_tokens"] == 0
    assert runs["continue"]["reprefilled_tokens"] > 0


def test_policies_are_scored_outside_of_the_run_s_time(compared: tuple[Path, dict[str, Any]]) -> None:
    run_dir, runs = compared
    for strategy, run in runs.items():
        scores = [event for event in running.events(run_dir, strategy) if event["kind"] == "evaluation"]
        steps = {e["version"]: e for e in running.events(run_dir, strategy) if e["kind"] == "step"}
        assert [score["version"] for score in scores] == [0, 2, 3]
        for score in scores:
            assert (score["tasks"], score["failed"]) == (4, 0)
            assert {name: part["tasks"] for name, part in score["sources"].items()} == {
                "submitted": 1,
                "solved": 3,
            }
            assert 0 <= score["reward_mean"] <= 1
        # The clock of the step that follows goes on from where the score began.
        for score in scores[:2]:
            assert (
                0 <= steps[score["version"]]["rollout_start"] - score["start"] < score["end"] - score["start"]
            )
        assert run["wall_s"] <= scores[-1]["start"] < scores[-1]["end"]
        assert run["reward_held_out"] == scores[-1]["reward_mean"]
        assert run["reward_held_out_sources"].keys() == {"submitted", "solved"}


def test_a_filter_drops_what_teaches_nothing_after_it_was_played(tmp_path: Path) -> None:
    learnt = ["warm_start.steps=100", f"tasks.sources={SOURCES}", "tasks.count=32"]
    done = running.run(tmp_path / "run", "--steps", "2", "--strategies", "dapo", "--json", *learnt)
    assert done.returncode == 0, done.stderr
    steps = [event for event in running.events(tmp_path / "run", "dapo") if event["kind"] == "step"]
    assert [(step["groups"], step["informative_groups"]) for step in steps] == [(4, 4), (4, 4)]
    assert sum(len(step["dropped_groups"]) for step in steps) > 0
    (run,) = json.loads(done.stdout)["runs"]
    assert run["wasted_tokens"] > 0


def test_a_run_ends_after_the_step_in_which_its_time_is_up(tmp_path: Path) -> None:
    done = running.run(
        tmp_path / "run", "--steps", "50", "--strategies", "wait", "--json", "max_seconds=0.01"
    )
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert (run["status"], run["steps"], run["reward_held_out"]) == ("ok", 1, None)


def test_only_strategies_that_cut_off_waste(compared: tuple[Path, dict[str, Any]]) -> None:
    runs = compared[1]
    assert runs["wait"]["wasted_tokens"] == 0
    assert runs["discard"]["wasted_tokens"] > 0
    assert runs["discard"]["resumes"] == runs["restart"]["resumes"] == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_token_is_trained_wasted_or_waiting(
    compared: tuple[Path, dict[str, Any]], strategy: str
) -> None:
    run_dir, runs = compared
    steps = [event for event in running.events(run_dir, strategy) if event["kind"] == "step"]
    generated = sum(step["generated_tokens"] for step in steps)
    trained = sum(step["trained_tokens"] for step in steps)
    wasted = sum(step["wasted_tokens"] for step in steps)
    assert generated == trained + wasted + steps[-1]["buffered_tokens"] == runs[strategy]["generated_tokens"]
    assert all(step["wasted_tokens"] >= 0 for step in steps)
    for step in steps:
        assert sum(step["response_tokens"]) == step["trained_tokens"] == sum(step["lag_token"].values())
        assert len(step["lag_trajectory"]) == step["trained_rollouts"] == len(step["lag_environment"])
        assert all(map(operator.le, step["lag_environment"], step["lag_trajectory"]))
        assert min(step["lag_trajectory"]) >= 0
        assert math.isfinite(step["train"]["loss"])


def test_resumed_rollouts_hold_tokens_of_several_versions(compared: tuple[Path, dict[str, Any]]) -> None:
    steps = [event for event in running.events(compared[0], "continue") if event["kind"] == "step"]
    lags = {int(lag) for step in steps for lag in step["lag_token"]}
    assert 0 in lags and max(lags) > 0
    waited = [event for event in running.events(compared[0], "wait") if event["kind"] == "step"]
    assert {lag for step in waited for lag in step["lag_token"]} == {"0"}


def test_the_resolved_configuration_is_kept(compared: tuple[Path, dict[str, Any]]) -> None:
    text = (compared[0] / "continue" / "config.yaml").read_text()
    assert "resume_policy: continue" in text
    assert "partial_rollout: true" in text
