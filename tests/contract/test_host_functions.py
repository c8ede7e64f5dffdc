"""slime's other rollout and generate functions over our data source, across restarts of the host.

`fully_async`: our generate under slime's fully-async rollout function, whose worker takes groups one by one and
keeps finished ones in its queue from step to step. `streaming` and `stock`: slime's own generate functions, whose
samples carry no record of ours, cut off and resumed by `--partial-rollout`.
"""

from typing import Any

import pytest

from tests.contract import workload
from tests.contract.conftest import Result
from tests.contract.jobs import MEMBERS

Samples = list[dict[str, Any]]

OPEN = ("pending", "aborted")
PARTIAL = ("streaming", "stock")
JOBS = ("fully_async", *PARTIAL)


@pytest.fixture
def result(request: pytest.FixtureRequest, host: str, results: dict[str, Result]) -> Result:
    if request.param not in results:
        pytest.skip(f"{host} has no such function")
    return results[request.param]


def trained(result: Result, rollout_ids: range) -> Samples:
    return [sample for number in rollout_ids for sample in result["rollouts"][number]["samples"]]


def reloaded(result: Result, rollout_id: int) -> Samples:
    found: Samples = result["rollouts"][rollout_id]["reloaded"]["samples"]
    return found


def groups(samples: Samples) -> set[int]:
    return {sample["group_index"] for sample in samples}


def restarts(result: Result) -> list[int]:
    return [number for number, rollout in enumerate(result["rollouts"]) if rollout["reloaded"] is not None]


@pytest.mark.parametrize("result", JOBS, indirect=True)
def test_no_prompt_is_lost_over_a_restart(result: Result) -> None:
    """What the prompts gave out is trained or waits, except what the host's own step has thrown away."""
    for restart in restarts(result):
        known = groups(trained(result, range(restart))) | groups(reloaded(result, restart))
        state = result["rollouts"][restart]["reloaded"]
        assert len(known) + sum(state["dropped"].values()) == state["given_out"]


@pytest.mark.parametrize("result", ["fully_async"], indirect=True)
def test_no_group_is_dropped_of_a_host_that_keeps_them(result: Result) -> None:
    for restart in restarts(result):
        assert result["rollouts"][restart]["reloaded"]["dropped"] == {}


@pytest.mark.parametrize("result", JOBS, indirect=True)
def test_none_is_trained_twice(result: Result) -> None:
    indices = [sample["index"] for sample in trained(result, range(len(result["rollouts"])))]
    assert len(indices) == len(set(indices))
    for restart in restarts(result):
        assert not groups(trained(result, range(restart))) & groups(reloaded(result, restart))


@pytest.mark.parametrize("result", ["fully_async"], indirect=True)
def test_what_was_finished_and_not_handed_over_is_trained_as_it_was(result: Result) -> None:
    """Also what has been in the worker's queue for longer than two steps."""
    [first, _] = restarts(result)
    waiting = reloaded(result, first)
    open_groups = groups([sample for sample in waiting if sample["status"] in OPEN])
    finished = {s["index"]: s for s in waiting if s["group_index"] not in open_groups}
    assert len(finished) >= MEMBERS * (workload.QUEUED - first)
    later = {s["index"]: s for s in trained(result, range(first, len(result["rollouts"])))}
    assert finished.keys() & later.keys()
    for index in finished.keys() & later.keys():
        for name in ("tokens", "loss_mask", "rollout_log_probs", "reward", "weight_versions"):
            assert later[index][name] == finished[index][name]


@pytest.mark.parametrize("result", ["fully_async"], indirect=True)
def test_what_ended_beside_a_running_member_waits_with_it(result: Result) -> None:
    waiting = reloaded(result, restarts(result)[0])
    ended, running = sorted(
        (s for s in waiting if s["group_index"] == workload.UNEVEN), key=lambda s: s["status"] in OPEN
    )
    assert ended["reward"] is not None and ended["response_length"] == workload.RESPONSE_TOKENS
    assert (running["status"], running["response_length"]) == ("pending", 0)
    long = [s for s in waiting if s["group_index"] == workload.LONG]
    assert [(s["status"], s["response_length"]) for s in long] == [("pending", 0)] * MEMBERS


@pytest.mark.parametrize("result", PARTIAL, indirect=True)
def test_what_was_cut_off_waits_after_a_restart_with_the_same_tokens(result: Result) -> None:
    cut_off = 0
    for restart in restarts(result):
        rollout = result["rollouts"][restart - 1]
        assert reloaded(result, restart) == rollout["waiting"]["samples"]
        cut_off += sum(
            sample["status"] == "aborted" and sample["response_length"] > 0
            for sample in reloaded(result, restart)
        )
    assert cut_off


@pytest.mark.parametrize("result", PARTIAL, indirect=True)
def test_what_was_cut_off_goes_on_from_its_tokens(result: Result) -> None:
    resumed = 0
    for restart in restarts(result):
        before = {sample["index"]: sample for sample in reloaded(result, restart)}
        rollout = result["rollouts"][restart]
        after = {sample["index"]: sample for sample in rollout["samples"] + rollout["waiting"]["samples"]}
        for index in before.keys() & after.keys():
            length = len(before[index]["tokens"])
            assert after[index]["tokens"][:length] == before[index]["tokens"]
            old = before[index]["rollout_log_probs"] or []
            assert (after[index]["rollout_log_probs"] or [])[: len(old)] == old
            resumed += before[index]["response_length"] > 0 and len(after[index]["tokens"]) > length
    assert resumed
