"""A group on its way is measured once, by whoever comes first; whatever fails then, its lag decides alone."""

import asyncio
import logging
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from midstream.buffers.rollout import PartialRollout, Span, Status
from midstream.envs.protocol import Snapshot
from midstream.hooks.answers import Generation
from midstream.hooks.engine import Engine, EngineRejected
from midstream.hooks.ratio import Shared, mean_squared_log_ratio
from midstream.hooks.slime.data_source import DataSource
from midstream.hooks.slime.generate import generate
from midstream.hooks.slime.log import log_rollout
from midstream.hooks.slime.ratio import measurements_of
from midstream.hooks.slime.sample import SampleSink, begin_rollout, recorded_rollout, store, task_of
from midstream.hooks.slime.settings import abandoned_of, engine_of, environments_of, tally_of
from midstream.local.sample import Sample
from tests.hooks.host import number_args
from tests.hooks.scripted import IDS, ScriptedEngine, WordTokenizer

FAR = -0.5 - 0.3  # so that the squared log-ratio is 0.09, above the 0.04 that a group may have


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    return number_args(tmp_path, {"resume_policy": "ladder", "engine": {"retry_s": 0.2}})


def play(sample: Sample, actions: int, log_prob: float = -0.5) -> None:
    """Let ``sample`` add that often under version 0, as ``generate`` would, and be cut off."""
    tokenizer = WordTokenizer()
    rollout = begin_rollout(sample, task_of(sample), tokenizer)
    sink = SampleSink(Namespace(), sample, tokenizer)
    rollout.enter(Snapshot("0", "0"))
    for number in range(1, actions + 1):
        rollout.begin_turn()
        made = Generation(
            [1, 0], [log_prob] * 2, "add <end>", "stop", (Span(0, 0, 2),), {"finish_reason": {}}
        )
        rollout.append_action(made.tokens, made.log_probs, made.spans)
        sink.append_action(made)
        rollout.finish_action()
        rollout.append_observation([IDS["obs"]])
        sink.append_observation([IDS["obs"]], "obs")
        rollout.enter(Snapshot(str(number), str(number), str(number - 1)))
    rollout.status = Status.ABORTED
    store(sample, rollout)


def on_its_way(args: Namespace) -> tuple[DataSource, list[Sample]]:
    """A group that was cut off under version 0 and is handed out under version 1."""
    source = DataSource(args)
    [group] = source.get_samples(1)
    play(group[0], 2)
    play(group[1], 1)
    source.add_samples([group])
    engine_of(args).version = 1
    assert source.get_samples(1) == [group]
    return source, group


def with_engine(args: Namespace, engine: ScriptedEngine, work: Callable[[], Awaitable[None]]) -> None:
    async def serve() -> None:
        async with engine.serving() as url:
            client = engine_of(args)
            client.url = url
            try:
                await work()
            finally:
                await client.close()

    asyncio.run(serve())


def generate_group(args: Namespace, engine: ScriptedEngine, group: list[Sample]) -> None:
    async def all_at_once() -> None:
        await asyncio.gather(*(generate(args, sample, {"max_new_tokens": 40}) for sample in group))

    with_engine(args, engine, all_at_once)


def measurements(engine: ScriptedEngine) -> list[dict[str, Any]]:
    return [request for request in engine.requests if request["sampling_params"]["max_new_tokens"] == 0]


def done(number: int = 2, version: int = 1) -> ScriptedEngine:
    return ScriptedEngine([("done <end>", "stop")] * number, version=version)


def test_a_group_that_differs_little_goes_on_as_it_is(args: Namespace) -> None:
    source, group = on_its_way(args)
    engine = done()
    generate_group(args, engine, group)
    prefixes = [[13, 1, 0, 5, 1, 0], [13, 1, 0]]  # to the last trained token
    assert [request["input_ids"] for request in measurements(engine)] == prefixes
    assert {request["logprob_start_len"] for request in measurements(engine)} == {0}
    assert [sample.reward for sample in group] == [2.0, 1.0]
    assert [sample.loss_mask for sample in group] == [[1, 1, 0, 1, 1, 0, 1, 1], [1, 1, 0, 1, 1]]
    counters = source.counters
    assert (counters.ratio_checked, counters.ratio_anchored, counters.resumed) == (1, 0, 2)


def test_a_group_that_differs_too_much_is_forked_before_anybody_plays(args: Namespace) -> None:
    source, group = on_its_way(args)
    engine = done()
    engine.known = FAR
    generate_group(args, engine, group)
    assert len(measurements(engine)) == 2
    assert engine.requests[2]["input_ids"] == engine.requests[3]["input_ids"] == [13, 1, 0, 5, 1, 0, 5]
    assert environments_of(args).resumed_from == ["2", "2"]
    assert [sample.loss_mask for sample in group] == [[0] * 6 + [1, 1]] * 2
    assert [sample.response for sample in group] == ["add <end> obs add <end> obs" + "done <end>"] * 2
    assert [sample.reward for sample in group] == [2.0, 2.0]
    assert [recorded_rollout(sample).own_tokens for sample in group] == [6, 2]
    counters = source.counters
    assert (counters.ratio_checked, counters.ratio_anchored, counters.forked) == (1, 1, 1)
    for rollout_id in range(3):
        log_rollout(rollout_id, args, group, None, 1.0)
    gone = [*environments_of(args).forgotten, *(snapshot.id for snapshot in abandoned_of(args))]
    assert gone.count("2") == 1, "the state that both share goes with the last, when its step is over"


def test_members_that_come_later_find_it_decided(args: Namespace) -> None:
    _, group = on_its_way(args)
    engine = done()
    engine.known = FAR
    generate_group(args, engine, group[1:])
    generate_group(args, engine, group[:1])
    assert len(measurements(engine)) == 2
    assert [sample.reward for sample in group] == [2.0, 2.0]
    assert tally_of(args).ratio_checked == 1


def test_a_member_that_is_cancelled_leaves_the_measurement_to_the_others(args: Namespace) -> None:
    _, group = on_its_way(args)
    engine = done()
    engine.known, engine.slow_s = FAR, 0.3

    async def cancel_the_first() -> None:
        first, second = (
            asyncio.create_task(generate(args, sample, {"max_new_tokens": 40})) for sample in group
        )
        await asyncio.sleep(0.1)
        first.cancel()
        await second
        assert first.cancelled()

    with_engine(args, engine, cancel_the_first)
    assert len(measurements(engine)) == 2
    assert (tally_of(args).ratio_anchored, group[1].reward) == (1, 2.0)


def test_when_all_are_cancelled_nothing_is_left_and_it_can_be_measured_again(args: Namespace) -> None:
    _, group = on_its_way(args)
    engine = done()
    engine.slow_s = 0.3

    async def cancel_all() -> None:
        tasks = [asyncio.create_task(generate(args, sample, {"max_new_tokens": 40})) for sample in group]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not [task for task in asyncio.all_tasks() if "_measure" in repr(task)]

    with_engine(args, engine, cancel_all)
    assert tally_of(args).ratio_checked == 0
    engine.slow_s = 0.0
    generate_group(args, engine, group)
    assert (tally_of(args).ratio_checked, [sample.reward for sample in group]) == (1, [2.0, 1.0])


def test_an_engine_that_refuses_leaves_it_to_the_lag_and_says_so(
    args: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    _, group = on_its_way(args)
    engine = done()
    engine.statuses = [400, 400]
    with caplog.at_level(logging.WARNING):
        generate_group(args, engine, group)
    assert "goes on by its lag alone, its log-ratio is unknown: " in caplog.text
    assert [sample.reward for sample in group] == [2.0, 1.0]
    assert tally_of(args).ratio_checked == 0


def test_a_batch_that_is_full_measures_nothing(args: Namespace) -> None:
    source, group = on_its_way(args)
    args.generate_state.aborted = True
    engine = done()
    generate_group(args, engine, group)
    assert engine.requests == []
    assert [sample.status for sample in group] == [Sample.Status.ABORTED] * 2
    args.generate_state.aborted = False
    source.add_samples([group])
    assert source.get_samples(1) == [group]
    generate_group(args, engine, group)
    assert (len(measurements(engine)), tally_of(args).ratio_checked) == (2, 1)


def test_what_left_without_a_question_is_not_measured_by_an_old_one(args: Namespace) -> None:
    source, group = on_its_way(args)
    source.add_samples([group])
    engine_of(args).version = 0
    source.get_samples(1)
    engine = done(version=0)
    generate_group(args, engine, group)
    assert measurements(engine) == []


def test_an_evaluation_is_none_of_its_business(args: Namespace) -> None:
    _, group = on_its_way(args)
    other = Sample.from_dict(group[0].to_dict())
    engine = done(1)

    async def settle_a_stranger() -> None:
        await measurements_of(args).settle(other)

    with_engine(args, engine, settle_a_stranger)
    assert engine.requests == []


def test_another_temperature_leaves_it_to_the_lag_and_says_so(
    args: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    args.rollout_temperature = 0.65
    with caplog.at_level(logging.WARNING):
        _, group = on_its_way(args)
    assert "--rollout-temperature is 0.65, and the engine measures log-ratios at 1" in caplog.text
    engine = done()
    generate_group(args, engine, group)
    assert measurements(engine) == []


def test_the_mean_is_over_tokens_and_only_those_that_are_trained() -> None:
    long, short = PartialRollout("p", "g", prompt_tokens=[7]), PartialRollout("p", "g", prompt_tokens=[7])
    for rollout, log_probs in ((long, [-0.5, -0.5, -0.5]), (short, [-1.5])):
        rollout.begin_turn()
        rollout.append_action([1] * len(log_probs), log_probs, [Span(0, 0, len(log_probs))])
    engine = ScriptedEngine([])
    found: list[float | None] = []

    async def measure() -> None:
        async with engine.serving() as url:
            client = Engine(url)
            found.append(await mean_squared_log_ratio(client, [long, short], [None, None]))
            found.append(await mean_squared_log_ratio(client, [short], [None]))
            found.append(await mean_squared_log_ratio(client, [], []))
            long.loss_mask = [1, 0, 0]
            found.append(await mean_squared_log_ratio(client, [long, short], [None, None]))
            short.loss_mask = [0]
            found.append(await mean_squared_log_ratio(client, [short], [None]))
            await client.close()

    asyncio.run(measure())
    assert found == [0.25, 1.0, None, 0.5, None]


@pytest.mark.parametrize(
    "answer",
    [
        '{"meta_info": {"finish_reason": {"type": "length"}}}',
        '{"meta_info": {"input_token_logprobs": [[-0.5, 3, null]], "finish_reason": {"type": "length"}}}',
        '{"meta_info": {"input_token_logprobs": [[null, 1, null]], "finish_reason": {"type": "length"}}}',
    ],
    ids=["no log-probs", "other tokens", "no number"],
)
def test_an_answer_about_other_tokens_is_refused(answer: str) -> None:
    engine = ScriptedEngine([], raw_answers=[answer])

    async def ask() -> None:
        async with engine.serving() as url:
            client = Engine(url)
            try:
                with pytest.raises(EngineRejected, match="answered what no SGLang answers"):
                    await client.log_probs([7, 1], 1)
            finally:
                await client.close()

    asyncio.run(ask())


def test_what_an_abort_cut_off_is_no_measurement() -> None:
    engine = ScriptedEngine([], raw_answers=['{"meta_info": {"finish_reason": {"type": "abort"}}}'])

    async def ask() -> list[float] | None:
        async with engine.serving() as url:
            client = Engine(url)
            try:
                return await client.log_probs([7, 1], 1)
            finally:
                await client.close()

    assert asyncio.run(ask()) is None


def test_shared_work_that_fails_fails_for_all() -> None:
    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise ValueError("broken")

    async def wait_for_it() -> list[Any]:
        shared = Shared(fail)
        return await asyncio.gather(shared.done(), shared.done(), return_exceptions=True)

    assert [str(error) for error in asyncio.run(wait_for_it())] == ["broken", "broken"]
