"""Tasks of several sources: their shares, what passes and what never does, in a real shell."""

import json
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from midstream.conf.compose import compose
from midstream.conf.schema import TaskSource
from midstream.envs.tasks import load_tasks
from midstream.local.tasks.chain_fix import SUBMIT, Split
from midstream.local.tasks.mixed import task_counts, write_mixed_tasks

SOURCES = {
    "easy": TaskSource(share=0.55, check="submit"),
    "medium": TaskSource(share=0.3),
    "hopeless": TaskSource(share=0.15, check="never"),
}


def written(
    path: Path,
    count: int,
    sources: Mapping[str, TaskSource] = SOURCES,
    *,
    seed: int = 0,
    split: Split = "train",
) -> list[dict[str, Any]]:
    write_mixed_tasks(path, count, sources, source_key="source", seed=seed, split=split)
    return [json.loads(line) for line in path.read_text().splitlines()]


def passes(task: dict[str, Any], actions: list[str], workdir: Path) -> bool:
    """What the real check says after the actions in a real shell."""
    workdir.mkdir()
    for name, content in task["metadata"]["files"].items():
        (workdir / name).write_text(content)
    script = "\n".join([". ./.bashrc", "sleep() { :; }", *actions])
    subprocess.run(
        ["bash", "--noprofile", "--norc"],
        cwd=workdir,
        input=script,
        text=True,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return (
        subprocess.run(["bash", "-c", task["metadata"]["eval_cmd"]], cwd=workdir, check=False).returncode == 0
    )


def test_each_source_asks_for_what_it_says(tmp_path: Path) -> None:
    tasks = {task["metadata"]["source"]: task for task in written(tmp_path / "tasks.jsonl", 20)}
    solved, submitted, not_submitted = (
        {name: passes(task, actions(task), tmp_path / f"{name}-{kind}") for name, task in tasks.items()}
        for kind, actions in enumerate(
            (lambda task: task["label"].split(" ; "), lambda _: [SUBMIT], lambda _: ["cat f0"])
        )
    )
    assert solved == {"easy": True, "medium": True, "hopeless": False}
    assert submitted == {"easy": True, "medium": False, "hopeless": False}
    assert not any(not_submitted.values())


def test_nothing_but_the_check_tells_the_sources_apart(tmp_path: Path) -> None:
    alike = {name: TaskSource(share=1, check=check) for name, check in (("a", "chain"), ("b", "never"))}
    lengths: dict[str, Counter[int]] = {"a": Counter(), "b": Counter()}
    tasks = written(tmp_path / "tasks.jsonl", 2000, alike)
    for task in tasks:
        lengths[task["metadata"]["source"]][task["metadata"]["chain_length"]] += 1
    assert all(abs(lengths["a"][n] - lengths["b"][n]) < 80 for n in range(1, 9))
    own = [{task["label"] for task in tasks if task["metadata"]["source"] == name} for name in alike]
    assert own[0] != own[1]


@pytest.mark.parametrize(
    ("count", "counts"), [(20, (11, 6, 3)), (64, (35, 19, 10)), (7, (4, 2, 1)), (100, (55, 30, 15))]
)
def test_shares_are_kept_and_add_up(tmp_path: Path, count: int, counts: tuple[int, ...]) -> None:
    assert tuple(task_counts(count, SOURCES).values()) == counts
    tasks = written(tmp_path / "tasks.jsonl", count)
    assert Counter(task["metadata"]["source"] for task in tasks) == dict(zip(SOURCES, counts, strict=True))


def test_any_part_of_the_file_is_a_mix(tmp_path: Path) -> None:
    tasks = written(tmp_path / "tasks.jsonl", 200)
    for start in range(0, 200, 50):
        assert {task["metadata"]["source"] for task in tasks[start : start + 50]} == set(SOURCES)


def test_a_source_without_a_task_is_refused() -> None:
    with pytest.raises(ValueError, match=r"of 3 tasks none is of hopeless: ask for more tasks"):
        task_counts(3, SOURCES)


def test_seed_and_split_choose_the_tasks(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    first = written(path, 40)
    assert written(path, 40) == first
    for other in (written(path, 40, seed=1), written(path, 40, split="held_out")):
        assert not [task for task in first if task in other]


def test_the_mixed_job_s_tasks_are_tasks(tmp_path: Path) -> None:
    config = compose(["job=mixed", "tasks.held_out=64"])
    path = tmp_path / "tasks.jsonl"
    write_mixed_tasks(path, config.tasks.count, config.tasks.sources, source_key="kind", seed=0)
    kinds = Counter(task.metadata["kind"] for task in load_tasks(path))
    assert kinds["easy"] / kinds.total() == pytest.approx(0.55, abs=0.01)
