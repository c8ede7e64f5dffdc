"""`midstream compare` around a job that is over at once: what it asks for, prints and exits with."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from midstream.cli.main import main
from midstream.conf.compose import compose_runs, write_resolved
from midstream.local.events import sort_out
from midstream.local.summary import summarise

Job = Callable[..., dict[str, Any]]


def entry(strategy: str, **others: Any) -> dict[str, Any]:
    return {**summarise(sort_out([{"kind": "run", "strategy": strategy}])), "status": "ok", **others}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[[Job], None]:
    """Puts a function in the place of the real job, whose import alone takes many seconds."""

    def install(compare: Job) -> None:
        module = ModuleType("midstream.local.compare")
        module.compare = compare  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "midstream.local.compare", module)
        monkeypatch.setattr("midstream.local.compare", module, raising=False)

    return install


def test_options_become_configuration(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "it's a [run], really"
    options = ["--strategies", "continue, wait", "--steps", "7", "--seed", "3", "--run-dir", str(run_dir)]
    assert main(["compare", "job=smoke", "steps=5", *options, "--dry-run"]) == 0
    resolved = yaml.safe_load(capfd.readouterr().out)
    assert list(resolved) == ["continue", "wait"]
    for name, config in resolved.items():
        assert (config["strategy"], config["steps"], config["seed"]) == (name, 7, 3)
        assert config["run_dir"] == str(run_dir)
    assert main(["compare", "job=smoke", *options, "--dry-run", "--json"]) == 0
    assert json.loads(capfd.readouterr().out).keys() == {"continue", "wait"}
    assert not run_dir.exists()


def test_json_is_alone_on_stdout(
    capfd: pytest.CaptureFixture[str], job: Callable[[Job], None], tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def compare(
        runs: Mapping[str, Any], *, progress: Any, command: tuple[str, ...], resume: bool
    ) -> dict[str, Any]:
        asked.update(runs=list(runs), command=command, resume=resume)
        print("a library that prints")
        os.write(1, b"a child that prints\n")
        progress.note("a note")
        progress.strategy_started("wait", 1)
        progress.step_finished("wait", 0, 0.5, None, 0.25)
        progress.alarm("an alarm")
        progress.strategy_finished("wait", entry("wait"))
        return {"report": "report.html", "runs": [entry("wait")]}

    job(compare)
    arguments = ["compare", "--strategies", "wait", "--run-dir", str(tmp_path), "--json"]
    assert main(arguments) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out) == {"report": "report.html", "runs": [entry("wait")]}
    for said in ("library", "child", "a note", "an alarm", "step 1/1, reward 0.50, – tokens/s"):
        assert said in printed.err
    assert asked == {"runs": ["wait"], "command": ("midstream", *arguments), "resume": False}
    write_resolved(
        compose_runs(["strategies=[wait]", f"run_dir={tmp_path}"])["wait"], tmp_path / "wait/config.yaml"
    )
    assert main([*arguments, "--resume"]) == 0
    assert asked["resume"] is True


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_run_directory_that_cannot_be_used_is_said_before_anything_is_loaded(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, dry: list[str]
) -> None:
    arguments = ["compare", "--strategies", "wait", "--run-dir", str(tmp_path), *dry]
    assert main([*arguments, "--resume"]) == 2
    assert "there is nothing to resume here" in capfd.readouterr().err
    write_resolved(
        compose_runs(["strategies=[wait]", f"run_dir={tmp_path}"])["wait"], tmp_path / "wait/config.yaml"
    )
    assert main([*arguments, "--resume", "--seed", "5"]) == 2
    assert "seed" in capfd.readouterr().err
    events = tmp_path / "wait" / "events" / "host-1.jsonl"
    events.parent.mkdir()
    events.write_text("")
    assert main(arguments) == 2
    assert "holds an earlier run" in capfd.readouterr().err


def test_the_table_and_the_report_are_on_stdout(
    capfd: pytest.CaptureFixture[str], job: Callable[[Job], None]
) -> None:
    runs = [entry("wait", wall_s=20.0, steps=1), entry("discard", wall_s=10.0, steps=1)]
    job(lambda *_, **__: {"report": "somewhere/report.html", "runs": runs})
    assert main(["compare", "--strategies", "wait,discard"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["wait", "discard"]
    (wall_clock,) = (line.split() for line in lines if line.startswith("Wall-clock"))
    assert wall_clock[1:] == ["20.0", "s", "(2.00×)", "*", "10.0", "s"]
    assert lines[-1] == "Report: somewhere/report.html"


@pytest.mark.parametrize(
    ("runs", "code"),
    [
        ([entry("wait"), entry("continue", restores_checked=4)], 0),
        ([entry("wait"), entry("continue", restores_checked=4, restores_bad=1)], 3),
        ([entry("wait"), entry("continue", status="interrupted")], 3),
        ([entry("wait")], 3),
    ],
)
def test_less_than_was_asked_for_is_degraded(
    job: Callable[[Job], None], runs: list[dict[str, Any]], code: int
) -> None:
    job(lambda *_, **__: {"report": "report.html", "runs": runs})
    assert main(["compare", "--strategies", "wait,continue"]) == code


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "what was recorded is in"),
        (OSError(28, "No space left on device", "runs/x"), 1, "No space left on device: 'runs/x'"),
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_what_ends_the_job_is_said_in_a_line(
    capfd: pytest.CaptureFixture[str],
    job: Callable[[Job], None],
    error: BaseException,
    code: int,
    said: str,
) -> None:
    def fail(*_: Any, **__: Any) -> dict[str, Any]:
        raise error

    job(fail)
    assert main(["compare", "--json"]) == code
    printed = capfd.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert "Traceback" not in printed.err
