"""Events survive what happens to processes and disks, and say so where they are damaged."""

import json
import multiprocessing
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from midstream.local.events import EventsError, EventWriter, read_file, read_run, sort_out


def test_what_is_written_is_read_back_in_order(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as events:
        events.write("run", strategy="wait", where=tmp_path)
        events.write("step", step=0, rewards=np.array([0.5, float("nan")]), lag_token={0: 7})
    assert list(read_file(events.path)) == [
        {"kind": "run", "strategy": "wait", "where": str(tmp_path)},
        {"kind": "step", "step": 0, "rewards": [0.5, None], "lag_token": {"0": 7}},
    ]


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as events:
        events.write("step", loss=float("inf"), train={"grad_norm": np.float32("nan")})
    assert json.loads(events.path.read_text()) == {"kind": "step", "loss": None, "train": {"grad_norm": None}}


def test_a_value_that_is_not_data_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as events:
        with pytest.raises(TypeError, match="object"):
            events.write("step", model=object())
        assert events.path.read_bytes() == b""


def _write_until_killed(folder: Path) -> None:
    with EventWriter(folder) as events:
        for step in range(10**9):
            events.write("step", step=step, response_tokens=list(range(50)))


def test_a_killed_process_loses_at_most_its_last_line(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_write_until_killed, args=(tmp_path,))
    process.start()
    while not any(path.stat().st_size > 100_000 for path in tmp_path.glob("*.jsonl")):
        assert process.is_alive()
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    (path,) = tmp_path.glob("*.jsonl")
    steps = [event["step"] for event in read_file(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) >= path.read_bytes().count(b"\n")


def test_a_torn_last_line_is_not_read_and_not_written_after(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as events:
        events.write("step", step=0)
    with events.path.open("ab") as file:
        file.write(b'{"kind":"step","ste')
    assert [event["step"] for event in read_file(events.path)] == [0]
    with EventWriter(tmp_path) as again:
        assert again.path == events.path
        again.write("step", step=1)
    assert [event["step"] for event in read_file(events.path)] == [0, 1]


def test_a_full_disk_leaves_whole_lines_only(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as events:
        events.write("step", step=0)
        kept_bytes = events.path.stat().st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (kept_bytes + 10, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                events.write("step", step=1, response_tokens=list(range(50)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, ignored)
        assert events.path.stat().st_size == kept_bytes
        events.write("step", step=1)
    assert [event["step"] for event in read_file(events.path)] == [0, 1]


@pytest.mark.parametrize("line", ["{broken}", "[1, 2]", '{"no": "kind"}', ""])
def test_damage_before_the_last_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "host-1.jsonl"
    path.write_text(f'{{"kind":"run"}}\n{line}\n{{"kind":"end"}}\n')
    with pytest.raises(EventsError, match=r"host-1\.jsonl:2: .*remove this line"):
        list(read_file(path))


def test_the_latest_run_of_a_folder_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "continue" / "events"
    folder.mkdir(parents=True)
    _write_lines(folder / "b-1.jsonl", {"kind": "run", "start_unix": 1.0}, {"kind": "step", "step": 5})
    _write_lines(
        folder / "a-2.jsonl",
        {"kind": "run", "start_unix": 2.0},
        {"kind": "step", "step": 1, "reward_mean": 0.1},
        {"kind": "step", "step": 0},
        {"kind": "step", "step": 1, "reward_mean": 0.2},
    )
    _write_lines(folder / "c-3.jsonl", {"kind": "alarm", "t": 3.0, "message": "a sandbox died"})
    run = read_run(tmp_path / "continue")
    assert [(step["step"], step.get("reward_mean")) for step in run.steps] == [(0, None), (1, 0.2)]
    assert [alarm["message"] for alarm in run.alarms] == ["a sandbox died"]
    assert (run.strategy, run.status) == ("continue", "unfinished")


def test_a_resumed_run_is_read_as_one_and_steps_after_its_checkpoint_are_lost(tmp_path: Path) -> None:
    folder = tmp_path / "continue" / "events"
    folder.mkdir(parents=True)
    # Files of processes whose names say nothing of their order.
    _write_lines(
        folder / "b-1.jsonl", {"kind": "run", "start_unix": 1.0, "resumed_at": None}, {"kind": "end"}
    )
    _write_lines(
        folder / "c-1.jsonl",
        {"kind": "run", "start_unix": 2.0, "resumed_at": None, "seed": 7},
        {"kind": "step", "step": 0},
        {"kind": "step", "step": 1, "reward_mean": 0.1},
        {"kind": "step", "step": 2},
        {"kind": "alarm", "t": 1.0, "message": "first"},
        {"kind": "end", "status": "interrupted"},
    )
    # The second part is killed before it has trained anything, the third has the same number of a process.
    _write_lines(
        folder / "a-1.jsonl",
        {"kind": "run", "start_unix": 3.0, "resumed_at": 1},
        {"kind": "run", "start_unix": 4.0, "resumed_at": 1},
        {"kind": "step", "step": 1, "reward_mean": 0.2},
        {"kind": "alarm", "t": 9.0, "message": "second"},
    )
    run = read_run(tmp_path / "continue")
    assert run.run["seed"] == 7 and len(run.parts) == 3
    assert [(step["step"], step.get("reward_mean")) for step in run.steps] == [(0, None), (1, 0.2)]
    assert [(step["step"], step.get("reward_mean")) for step in run.lost] == [(1, 0.1), (2, None)]
    assert [alarm["message"] for alarm in run.alarms] == ["first", "second"]
    assert run.status == "unfinished"


def test_scores_of_versions_that_were_lost_do_not_count() -> None:
    events = [
        {"kind": "run", "resumed_at": None},
        *({"kind": "evaluation", "version": version, "reward_mean": 0.1 * version} for version in (0, 2, 4)),
        {"kind": "run", "resumed_at": 2},
        {"kind": "evaluation", "version": 2, "reward_mean": 0.5},
    ]
    run = sort_out(events)
    assert [(score["version"], score["reward_mean"]) for score in run.evaluations] == [(0, 0.0), (2, 0.5)]
    assert run.evaluation == events[-1]
    assert sort_out(events[:1]).evaluation is None


def test_a_folder_without_a_run_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(EventsError, match=str(tmp_path)):
        read_run(tmp_path)


def _write_lines(path: Path, *events: dict[str, object]) -> None:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
