"""Held-out tasks: each is played once, outside of any batch, and failures are not scored."""

import asyncio
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from midstream.local.evaluation import Evaluation, Score, evaluate
from midstream.local.rollout import GenerateState
from midstream.local.sample import Sample


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "held_out.jsonl"
    lines = [{"prompt": f"task {number}", "label": "", "metadata": {"number": number}} for number in range(6)]
    lines[0]["metadata"]["kind"] = lines[1]["metadata"]["kind"] = "easy"
    lines[2]["metadata"]["kind"] = "hard"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("recorded_hooks")
    module.evaluated = []

    async def generate(
        args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
    ) -> Sample:
        module.evaluated.append(evaluation)
        sample.reward, sample.remove_sample = float(sample.metadata["number"]), sample.metadata["number"] == 1
        return sample

    async def unaware(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        return sample

    module.generate, module.unaware, module.reward = generate, unaware, lambda args, sample: 0.5
    monkeypatch.setitem(sys.modules, "recorded_hooks", module)
    return module


def args(generate: str) -> Namespace:
    return Namespace(
        custom_generate_function_path=f"recorded_hooks.{generate}",
        custom_rm_path="recorded_hooks.reward",
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=8,
        generate_state=GenerateState(None, asyncio.Semaphore(2)),
    )


def test_failed_tasks_are_counted_and_not_scored(hooks: ModuleType, tasks: Path) -> None:
    found = asyncio.run(evaluate(args("generate"), tasks, 4, "kind"))
    assert found.total == Score(tasks=3, failed=1, reward_mean=(0 + 2 + 3) / 3)
    assert found.sources == {"easy": Score(1, 1, 0.0), "hard": Score(1, 0, 2.0)}
    assert hooks.evaluated == [True] * 4


def test_a_generate_function_need_not_know_of_evaluation(hooks: ModuleType, tasks: Path) -> None:
    assert asyncio.run(evaluate(args("unaware"), tasks, 100, "source")) == Evaluation(Score(6, 0, 0.5))
