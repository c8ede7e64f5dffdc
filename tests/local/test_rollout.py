"""The local job's rollout step: slime's order, slime's hooks, and no group lost or trained twice."""

import asyncio
import sys
from argparse import Namespace
from types import ModuleType
from typing import Any

import pytest

from midstream.hooks.slime.host import load_function
from midstream.local.rollout import DynamicFilterOutput, GenerateState, generate_rollout
from midstream.local.sample import Sample


class Source:
    """Groups with rising numbers, and what came back."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.handed_out = 0
        self.returned: list[list[Sample]] = []

    def get_samples(self, count: int) -> list[list[Sample]]:
        groups = self.returned[:count]
        del self.returned[: len(groups)]
        for _ in range(count - len(groups)):
            first = self.handed_out * self.size
            groups.append([Sample(group_index=self.handed_out, index=first + i) for i in range(self.size)])
            self.handed_out += 1
        return groups

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self.returned += groups


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of hooks that notes the order in which it is called."""
    module = ModuleType("recorded_hooks")
    module.calls = []

    async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        module.calls.append(("generate", sample.index))
        # Later groups are slower, so that a step has stragglers to cut off.
        for _ in range(20 * sample.group_index):
            if args.generate_state.aborted:
                sample.response, sample.status = "partial", Sample.Status.ABORTED
                return sample
            await asyncio.sleep(0.01)
        sample.response, sample.status = "whole", Sample.Status.COMPLETED
        return sample

    async def reward(args: Namespace, sample: Sample) -> float:
        module.calls.append(("reward", sample.index))
        return float(sample.index % 2 or sample.group_index == 1)

    def keep(args: Namespace, group: list[Sample]) -> Any:
        module.calls.append(("filter", group[0].group_index))
        return DynamicFilterOutput(len({s.reward for s in group}) > 1, "equal")

    def process(args: Namespace, groups: list[list[Sample]], source: Any) -> None:
        module.calls.append(("process", [group[0].group_index for group in groups]))

    async def finish(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        sample.response, sample.status = "whole", Sample.Status.COMPLETED
        return sample

    module.finish = finish
    module.generate, module.reward, module.keep, module.process = generate, reward, keep, process
    monkeypatch.setitem(sys.modules, "recorded_hooks", module)
    return module


def args(**changes: Any) -> Namespace:
    values = {
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 4,
        "partial_rollout": True,
        "custom_generate_function_path": "recorded_hooks.generate",
        "custom_rm_path": "recorded_hooks.reward",
        "dynamic_sampling_filter_path": None,
        "rollout_all_samples_process_path": "recorded_hooks.process",
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": 8,
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 9,  # nobody listens: an abort must survive a dead engine
        "generate_state": GenerateState(None, asyncio.Semaphore(64)),
    }
    return Namespace(**(values | changes))


def test_a_step_takes_what_is_ready_and_hands_back_the_rest(hooks: ModuleType) -> None:
    source = Source(size=2)
    batch = asyncio.run(generate_rollout(args(), 7, source))
    assert [group[0].group_index for group in batch.samples] == [0, 1]
    assert sorted(group[0].group_index for group in source.returned) == [2, 3]
    cut = [sample for group in source.returned for sample in group]
    assert {sample.status for sample in cut} == {Sample.Status.ABORTED}
    assert {sample.metadata["start_rollout_id"] for sample in cut} == {7}
    assert batch.dropped == []


def test_without_partial_rollout_the_rest_is_dropped(hooks: ModuleType) -> None:
    source = Source(size=2)
    batch = asyncio.run(generate_rollout(args(partial_rollout=False), 0, source))
    assert source.returned == []
    assert sorted(group[0].group_index for group in batch.dropped) == [2, 3]


def test_a_filtered_group_is_replaced_and_its_reason_counted(hooks: ModuleType) -> None:
    source = Source(size=2)
    settings = args(dynamic_sampling_filter_path="recorded_hooks.keep", over_sampling_batch_size=2)
    batch = asyncio.run(generate_rollout(settings, 0, source))
    assert [group[0].group_index for group in batch.samples] == [0, 2]
    assert [group[0].group_index for group in batch.dropped] == [1]
    assert batch.metrics == {"rollout/dynamic_filter/drop_equal": 1}


def test_hooks_are_called_in_slimes_order(hooks: ModuleType) -> None:
    settings = args(dynamic_sampling_filter_path="recorded_hooks.keep", rollout_batch_size=1)
    asyncio.run(generate_rollout(settings, 0, Source(size=2)))
    names = [name for name, _ in hooks.calls]
    assert names.index("generate") < names.index("reward") < names.index("filter") < names.index("process")


def test_a_resumed_group_keeps_its_finished_members(hooks: ModuleType) -> None:
    source = Source(size=2)
    done = Sample(group_index=0, index=0, reward=0.25, response="whole", status=Sample.Status.COMPLETED)
    source.add_samples([[done, Sample(group_index=0, index=1)]])
    batch = asyncio.run(generate_rollout(args(rollout_batch_size=1, over_sampling_batch_size=1), 0, source))
    assert [sample.reward for sample in batch.samples[0]] == [0.25, 1.0]
    assert ("generate", 0) not in hooks.calls


def test_a_failing_hook_ends_the_step_and_leaves_no_task(hooks: ModuleType) -> None:
    async def fail(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        if sample.index == 3:
            raise RuntimeError("broken hook")
        await asyncio.sleep(60)
        return sample

    hooks.generate = fail

    async def step() -> None:
        with pytest.raises(RuntimeError, match="broken hook"):
            await generate_rollout(args(), 0, Source(size=2))
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(step())


def test_no_reward_from_anybody_is_an_error_that_says_so(hooks: ModuleType) -> None:
    with pytest.raises(ValueError, match="custom_rm_path"):
        asyncio.run(generate_rollout(args(custom_rm_path=None), 0, Source(size=1)))


def test_a_hook_that_does_not_exist_is_named() -> None:
    with pytest.raises(ImportError, match="midstream.local.rollout has no nothing"):
        load_function("midstream.local.rollout.nothing")


def test_a_filter_that_keeps_nothing_ends_the_step(hooks: ModuleType) -> None:
    hooks.keep = lambda args, group: DynamicFilterOutput(keep=False, reason="never")
    hooks.generate = hooks.finish
    settings = args(dynamic_sampling_filter_path="recorded_hooks.keep", over_sampling_batch_size=2)
    with pytest.raises(RuntimeError, match="drop_never"):
        asyncio.run(generate_rollout(settings, 0, Source(size=1)))
