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
from midstream.hooks.credit.kept import described, keep
from tests.buffers.made import played

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


@pytest.mark.parametrize("line", commands("midstream compare"))
def test_compare_commands_are_accepted(line: str, tmp_path: Path) -> None:
    tasks = tmp_path / "my_tasks.jsonl"
    tasks.write_text(
        '{"prompt": "start f0 <act>", "label": "", "metadata": {"files": {}, "eval_cmd": "true"}}\n'
    )
    words = shlex.split(line.replace("my_tasks.jsonl", str(tasks)))[1:]
    if "--resume" in words:
        begin([word for word in words if word != "--resume"], tmp_path)
    tried(words, tmp_path)


def begin(words: list[str], folder: Path) -> None:
    """Leave what a comparison leaves that was killed at its start."""
    for config in yaml.safe_load(tried(words, folder)).values():
        recorded = folder / config["midstream"]["run_dir"] / "config.yaml"
        recorded.parent.mkdir(parents=True)
        recorded.write_text(yaml.safe_dump(config))


def tried(words: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "midstream.cli.main", *words, "--dry-run"],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("line", commands("midstream status"))
def test_status_commands_are_accepted(line: str, tmp_path: Path) -> None:
    with Journal(tmp_path / "runs" / "mine" / "continue" / "buffer") as journal:
        journal.buffered([Group("0", (Member(b"record"),))])
    (tmp_path / "snapshots").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "midstream.cli.main", *shlex.split(line)[1:]],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", commands("midstream blame"))
def test_blame_commands_are_accepted(line: str, tmp_path: Path) -> None:
    kept = described(played((3, {"a": "x"})), version=4, index=0, step=0)
    keep(tmp_path / "runs" / "mine" / "continue", 0, [kept])
    done = subprocess.run(
        [sys.executable, "-m", "midstream.cli.main", *shlex.split(line)[1:]],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


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
    assert len(paths) == 6
    for path in paths:
        assert callable(load_function(path))
