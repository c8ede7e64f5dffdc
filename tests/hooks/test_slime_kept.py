"""What slime's hooks keep of the rollouts that are trained on, and what `midstream blame` says of it."""

import json
import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from midstream.cli.main import main
from midstream.hooks.slime import keeping
from midstream.hooks.slime.log import log_rollout
from midstream.hooks.slime.sample import store
from midstream.local.sample import Sample
from tests.hooks.host import number_args
from tests.hooks.jobs import Jobs, end, streamed
from tests.hooks.played import play


def finished(sample: Sample, *turns: tuple[int, str]) -> None:
    rollout = play(sample, *turns)
    rollout.status, rollout.reward = type(rollout.status).COMPLETED, 1.0
    store(sample, rollout)


def blamed(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    assert main(["blame", *map(str, arguments), "--json"]) == 0
    [run] = json.loads(capsys.readouterr().out)["runs"]
    return run["rollouts"]


def test_a_batch_is_kept_and_blamed(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = jobs.start().get_samples(2)
    finished(first[0], (3, "old"), (4, "new\x1b\udcff"))
    finished(first[1], (4, ""))
    end(second[0])
    streamed(second[1], Sample.Status.COMPLETED)  # of no record of ours
    jobs.train(5, first, second)

    assert main(["blame", str(jobs.run_dir), str(first[0].index)]) == 0
    printed = capsys.readouterr().out
    assert "trained in step 5, reward 1.00, completed" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert ["3", "0", "created", "1", "B", "50", "%", "old"] in rows
    assert ["4", "1", "created", "1", "B", "50", "%", r"new\x1b\udcff"] in rows
    assert [rollout["index"] for rollout in blamed(capsys, jobs.run_dir)] == [
        first[0].index,
        first[1].index,
        second[0].index,
    ]


def test_what_waits_is_blamed_without_running_what_its_samples_hold(
    jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    source = jobs.start()
    first, second = source.get_samples(2)
    play(first[0], (3, "a"))
    play(second[0], (4, "b"), (6, "c"))
    trap = jobs.run_dir / "sprung"
    second[0].metadata["tool"] = Trap(trap)
    source.add_samples([first, second])

    # Beside the job: two of the four members have begun.
    assert [rollout["index"] for rollout in blamed(capsys, jobs.run_dir, "--waiting")] == [
        first[0].index,
        second[0].index,
    ]
    [found] = blamed(capsys, jobs.run_dir, second[0].index)
    assert (found["step"], found["status"], found["version"]) == (None, "aborted", 6)
    assert [(write["path"], write["version"]) for write in found["blame"]["writes"]] == [("b", 4), ("c", 6)]
    assert not trap.exists()
    assert main(["blame", str(jobs.run_dir), str(first[1].index)]) == 1
    assert f"there is no rollout {first[1].index}: " in capsys.readouterr().err


class Scored(Sample):
    """A sample with several rewards, as slime's with ``--reward-key``."""

    def get_reward_value(self, args: Namespace) -> float:
        return self.reward[args.reward_key]  # type: ignore[index]


def test_of_several_rewards_the_one_that_trains_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = Scored(group_index=0, index=4, prompt="7")
    finished(sample, (3, "a"))
    sample.reward = {"score": 0.25, "style": 1.0}  # type: ignore[assignment]
    log_rollout(0, number_args(tmp_path, {}, reward_key="score"), [sample], None, 1.0)
    assert [rollout["reward"] for rollout in blamed(capsys, tmp_path, 4)] == [0.25]


class Trap:
    """Leaves a file behind where somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_disk_that_refuses_stops_no_training(
    jobs: Jobs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "_said", set())
    [first] = jobs.start().get_samples(1)
    for sample in first:
        end(sample)
    metrics: dict[str, Any] = {}
    assert log_rollout(0, jobs.args, first, metrics, 1.0) is False
    assert metrics["staleness/not_kept"] == 0
    for path in (jobs.run_dir / "rollouts").iterdir():
        path.unlink()
    (jobs.run_dir / "rollouts").rmdir()
    (jobs.run_dir / "rollouts").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        for rollout_id in (1, 2):
            log_rollout(rollout_id, jobs.args, first, metrics, 1.0)
            assert metrics["staleness/not_kept"] == 2
    assert len([record for record in caplog.records if "cannot keep" in record.getMessage()]) == 1


def test_nothing_is_kept_where_nobody_wants_it(tmp_path: Path) -> None:
    args = number_args(tmp_path, {"credit": {"keep_rollouts": False}})
    sample = Sample(group_index=0, index=0, prompt="7")
    end(sample)
    metrics: dict[str, Any] = {}
    log_rollout(0, args, [sample], metrics, 1.0)
    assert metrics["staleness/not_kept"] == 0
    assert not (tmp_path / "rollouts").exists()
