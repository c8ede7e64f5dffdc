"""What the documentation tells people to run works."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.records import Group, Member
from midstream.cli.main import main
from midstream.hooks.credit.kept import described, keep
from tests.buffers.made import played
from tests.conf.tuned import control_of, tuned

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (page.name, block)
        for page in PAGES
        for block in re.findall(
            rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL
        )
    ]


def commands(program: str) -> list[str]:
    lines = [line.split(" #")[0].strip() for _, block in blocks("bash") for line in block.splitlines()]
    return sorted({line for line in lines if line.startswith(program + " ")})


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_in_the_docs_runs(page: str, code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{page}: {done.stderr}"


class Shell:
    """Runs `midstream` in a folder, in this process: its libraries take longer to load than a command takes to run."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def run(self, words: list[str]) -> str:
        """What it prints; `words` are what a user types after the program's name."""
        code = main(words)
        printed = self._capsys.readouterr()
        assert code == 0, printed.err
        return printed.out


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


@pytest.mark.parametrize("line", commands("midstream compare"))
def test_compare_commands_are_accepted(line: str, shell: Shell) -> None:
    tasks = shell.folder / "my_tasks.jsonl"
    tasks.write_text(
        '{"prompt": "start f0 <act>", "label": "", "metadata": {"files": {}, "eval_cmd": "true"}}\n'
    )
    words = [*shlex.split(line.replace("my_tasks.jsonl", str(tasks)))[1:], "--dry-run"]
    if "--resume" in words:
        begin([word for word in words if word != "--resume"], shell)
    shell.run(words)


def begin(words: list[str], shell: Shell) -> None:
    """Leave what a comparison leaves that was killed at its start."""
    for config in yaml.safe_load(shell.run(words)).values():
        recorded = shell.folder / config["midstream"]["run_dir"] / "config.yaml"
        recorded.parent.mkdir(parents=True)
        recorded.write_text(yaml.safe_dump(config))


@pytest.mark.parametrize("line", commands("midstream status"))
def test_status_commands_are_accepted(line: str, shell: Shell) -> None:
    with Journal(shell.folder / "runs" / "mine" / "continue" / "buffer") as journal:
        journal.buffered([Group("0", (Member(b"record"),))])
    (shell.folder / "snapshots").mkdir()
    shell.run(shlex.split(line)[1:])


@pytest.mark.parametrize("line", commands("midstream blame"))
def test_blame_commands_are_accepted(line: str, shell: Shell) -> None:
    kept = described(played((3, {"a": "x"})), version=4, index=0, step=0)
    keep(shell.folder / "runs" / "mine" / "continue", 0, [kept])
    shell.run(shlex.split(line)[1:])


@pytest.mark.parametrize("line", commands("midstream tune"))
def test_tune_commands_are_accepted(line: str, shell: Shell) -> None:
    run_dir = shell.folder / "runs" / "mine"
    control_of(run_dir)
    tuned(run_dir, "bounds.token=12")
    words = shlex.split(line)[1:]
    asks = {"--list", "--log", "--dry-run"} & set(words)
    # Nobody takes it up here.
    shell.run(words if asks else [*words, "--no-wait"])


def test_make_targets_exist() -> None:
    named = {line.split()[1] for line in commands("make")}
    assert named
    assert named <= TARGETS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_hooks_of_the_slime_page_exist() -> None:
    from midstream.hooks.slime.host import load_function

    paths = set(re.findall(r"midstream\.hooks\.slime\.[\w.]+", (ROOT / "docs" / "slime.md").read_text()))
    assert len(paths) == 7
    for path in paths:
        assert callable(load_function(path))
