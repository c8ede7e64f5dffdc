"""The policy `rewind` on a real workspace: who wrote what decides how far its files go back."""

import asyncio
from argparse import Namespace
from pathlib import Path

import pytest

from midstream.envs.errors import SnapshotMissing
from midstream.hooks.slime.data_source import DataSource
from midstream.hooks.slime.generate import generate
from midstream.hooks.slime.sample import recorded_rollout, task_of
from midstream.hooks.slime.settings import abandoned_of, engine_of, environments_of
from midstream.local.sample import Sample
from tests.hooks.host import file_args
from tests.hooks.scripted import ScriptedEngine


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    layer = {"resume_policy": "rewind", "policies": {"rewind": {"max_lag": 3}}}
    return file_args(tmp_path, layer, eval_cmd="test ! -e 2 && grep -q more 3", members=1)


def test_files_go_back_to_before_what_too_old_a_policy_wrote(args: Namespace) -> None:
    engine = ScriptedEngine(
        [(words, "stop") for words in ("obs <end>", "add 2 <end>", "add 1 <end>")]
        + [("add", "abort")]
        + [(words, "stop") for words in ("add 3 <end>", "done <end>")]
    )

    def on_request(number: int) -> None:
        engine.version = {1: 0, 2: 1, 3: 4}.get(number, 4)
        args.generate_state.aborted = number == 4

    engine.on_request = on_request
    asyncio.run(cut_off_and_resume(args, engine))


async def cut_off_and_resume(args: Namespace, engine: ScriptedEngine) -> None:
    sample: Sample
    source, environments = DataSource(args), environments_of(args)
    async with engine.serving() as url:
        client = engine_of(args)
        client.url = url
        try:
            [[sample]] = source.get_samples(1)
            await generate(args, sample, {"max_new_tokens": 50})
            assert len(recorded_rollout(sample).turns) == 4
            source.add_samples([[sample]])

            client.version = 5  # the write of file 2, by version 1, is now older than 3 versions
            assert source.get_samples(1) == [[sample]]
            rollout = recorded_rollout(sample)
            assert (len(rollout.turns), [span.version for span in rollout.spans]) == (1, [0])
            gone = list(abandoned_of(args))
            assert len(gone) == 2

            args.generate_state.aborted = False
            await generate(args, sample, {"max_new_tokens": 50})
            assert (sample.reward, sample.response) == (1.0, "obs <end> obs 1add 3 <end>obs done <end>")
            assert environments.counters.restores_bad == 0
            for snapshot in gone:
                with pytest.raises(SnapshotMissing):
                    await environments.resume(task_of(sample), snapshot)
        finally:
            await client.close()
            await environments.close()
