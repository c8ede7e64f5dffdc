"""The command as a user meets it: help, errors, exit codes."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from midstream.cli.main import main

START_LIMIT_S = 0.5


def test_help_answers_at_once_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from midstream.cli.main import main; main(['--help']); "
        "print(sorted({'torch', 'matplotlib', 'hydra', 'sglang', 'pydantic', 'numpy'} & set(sys.modules)))"
    )
    times_s = []
    for _ in range(3):
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        times_s.append(time.monotonic() - start)
    assert done.stdout.endswith("[]\n")
    assert min(times_s) < START_LIMIT_S


def test_compare_help_lists_every_strategy(capsys: pytest.CaptureFixture[str], repository: Path) -> None:
    assert main(["compare", "--help"]) == 0
    text = capsys.readouterr().out
    strategies = [path.stem for path in (repository / "conf" / "strategy").glob("*.yaml")]
    assert strategies
    for strategy in strategies:
        assert f"\n    {strategy} " in text


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"midstream {version('midstream')}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["conpare"], "conpare"),
        (["compare", "--steps", "0"], "--steps"),
        (["compare", "--strategies", "wait,hurry"], "'hurry'"),
        (["compare", "--strategies", ""], "strategies"),
        (["compare", "steps"], "steps"),
        (["compare", "stepz=3"], "stepz"),
        (["compare", "trainer.lr=-1"], "trainer.lr"),
        (["compare", "--tasks", "/absent/tasks.jsonl"], "/absent/tasks.jsonl"),
        (["report", "/absent"], "/absent"),
    ],
)
def test_wrong_usage_is_named_without_a_traceback(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert "Traceback" not in printed.err


def test_a_broken_line_of_the_tasks_is_named_by_its_number(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tasks = tmp_path / "it's mine, [really].jsonl"
    tasks.write_text(
        '{"prompt": "p", "label": null, "metadata": {"files": {}, "eval_cmd": "true"}}\n{"prompt\n'
    )
    run_dir = tmp_path / "run"
    assert main(["compare", "--tasks", str(tasks), "--run-dir", str(run_dir)]) == 2
    assert f"{tasks}:2" in capsys.readouterr().err
    assert not run_dir.exists()


def test_report_of_a_directory_without_events_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err


def test_debug_shows_where_an_error_came_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["report", str(tmp_path), "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_output_that_nobody_reads_is_not_an_error_of_ours() -> None:
    command = f"{sys.executable} -m midstream.cli.main compare --dry-run | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("wait:")
    assert done.stderr == ""
