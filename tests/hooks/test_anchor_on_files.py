"""The policy `anchor` on real workspaces: forks of one state go their own ways and end each on its own."""

import asyncio
import itertools
from argparse import Namespace
from pathlib import Path

import pytest

from midstream.buffers.rollout import Anchor
from midstream.envs.errors import SnapshotMissing
from midstream.hooks.slime.data_source import DataSource
from midstream.hooks.slime.generate import generate, give_up_abandoned
from midstream.hooks.slime.log import log_rollout
from midstream.hooks.slime.sample import recorded_rollout, task_of
from midstream.hooks.slime.settings import engine_of, environments_of
from midstream.local.sample import Sample
from tests.hooks.host import file_args
from tests.hooks.scripted import ScriptedEngine, WordTokenizer

ONE_OF_THREE = 'test "$(ls -d 3 4 5 2>/dev/null | wc -l)" = 1 && test "$(cat 2)" = more'


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    return file_args(tmp_path, {"resume_policy": "anchor"}, eval_cmd=ONE_OF_THREE, members=3)


def test_forks_of_one_state_do_not_disturb_each_other(args: Namespace) -> None:
    cut_off_in = {2, 3, 6}  # numbers of requests
    first = ["add 2 <end>", "obs"]
    second = ["obs"]
    forks = [["add 3 <end>", "obs <end>", "add"]]
    forks += [[f"add {number} <end>", "obs <end>", "done <end>"] for number in (4, 5)]
    words = [*first, *second, *itertools.chain(*forks), "done <end>"]
    engine = ScriptedEngine([(text, "stop" if "<end>" in text else "abort") for text in words])

    def on_request(number: int) -> None:
        engine.version = int(number > 3)
        args.generate_state.aborted = number in cut_off_in

    engine.on_request = on_request
    asyncio.run(fork_and_play(args, engine))
    assert engine.answers == []


async def fork_and_play(args: Namespace, engine: ScriptedEngine) -> None:
    source, environments = DataSource(args), environments_of(args)

    async def play(sample: Sample) -> None:
        args.generate_state.aborted = False
        await generate(args, sample, {"max_new_tokens": 80})

    async with engine.serving() as url:
        client = engine_of(args)
        client.url = url
        try:
            [group] = source.get_samples(1)
            indices = [sample.index for sample in group]
            await play(group[0])
            await play(group[1])  # cut off in its first action; the third has not even begun
            source.add_samples([group])
            assert source.get_samples(1) == [group]
            assert [sample.response for sample in group] == ["add 2 <end> obs"] * 3
            assert [sample.loss_mask for sample in group] == [[1, 1, 1, 0], [0] * 4, [0] * 4]
            assert [sample.index for sample in group] == indices
            task = task_of(group[0])
            [anchor] = {recorded_rollout(sample).anchor for sample in group}
            shared = recorded_rollout(group[0]).snapshots[anchor.snapshot]
            assert anchor == Anchor(shared.id, 4)
            assert source.counters.forked == 2

            for sample in group:
                await play(sample)
            first = group[0]
            assert [sample.status for sample in group] == [Sample.Status.ABORTED] + [
                Sample.Status.COMPLETED
            ] * 2
            own = recorded_rollout(first)
            assert first.response.startswith("add 2 <end> obs" + "add 3 <end>obs")

            # Two have ended: what they shared with the one that waits is still there.
            await (await environments.resume(task, shared)).close()
            source.add_samples([group])
            assert source.get_samples(1) == [group]
            await play(first)

            texts = [WordTokenizer().decode(sample.tokens, skip_special_tokens=False) for sample in group]
            assert [text.split("obs <end> obs ")[1][:5] for text in texts] == ["1 2 3", "1 2 4", "1 2 5"]
            assert [sample.reward for sample in group] == [1.0, 1.0, 1.0]
            # The three tokens of the prefix count once.
            assert [sum(sample.loss_mask) for sample in group] == [3 + 7, 7, 7]
            assert environments.counters.restores_bad == 0
            # The journal needs the newest until the group's step is over.
            for rollout_id in range(3):
                log_rollout(rollout_id, args, group, None, 1.0)
            await give_up_abandoned(args)
            for snapshot in own.snapshots.values():
                with pytest.raises(SnapshotMissing):
                    await environments.resume(task, snapshot)
        finally:
            await client.close()
            await environments.close()
