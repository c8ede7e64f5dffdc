"""Hosts that keep groups from one step to the next, as slime's fully-async rollout function does."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from midstream.buffers.journal.errors import OwnershipError
from midstream.buffers.journal.status import status_of
from midstream.hooks.slime.data_source import DataSource
from midstream.hooks.slime.settings import abandoned_of
from tests.hooks.jobs import TASKS, Jobs, finish, numbers, streamed
from tests.hooks.played import play


@pytest.fixture
def keeping(jobs: Jobs) -> Jobs:
    jobs.args.rollout_function_path = "midstream.local.mine.generate_rollout_fully_async"
    jobs.args.custom_rollout_log_function_path = "midstream.hooks.slime.log.log_rollout"
    return jobs


def test_what_a_host_keeps_is_not_given_up_however_long_it_is_kept(keeping: Jobs) -> None:
    source = keeping.start()
    *queued, running = source.get_samples(TASKS)
    finish(*queued)
    for rollout_id, group in enumerate(queued[:-1]):
        keeping.train(rollout_id, group)
    source.save(rollout_id)
    before = [sample.to_dict() for sample in queued[-1]]
    again = keeping.start(load=rollout_id)
    assert numbers(again.waiting_groups) == numbers([queued[-1], running])
    assert [sample.to_dict() for sample in again.waiting_groups[0]] == before


def test_what_is_generated_further_at_a_save_waits_as_it_was_handed_out(keeping: Jobs) -> None:
    source = keeping.start()
    source.add_samples(source.get_samples(2))
    ours, theirs = source.get_samples(2)
    play(ours[0], (3, "a"))
    streamed(theirs[0])
    source.add_samples([ours, theirs])
    before = [sample.to_dict() for sample in [*ours, *theirs]]
    before = json.loads(json.dumps(before))
    source.get_samples(2)
    # In the middle of a resume: tokens come, the record and the status are of before.
    ours[0].tokens += [1, 1]
    theirs[0].tokens += [1]
    theirs[0].response_length += 1
    source.save(0)
    again = keeping.start(load=0)
    assert [sample.to_dict() for group in again.waiting_groups for sample in group] == before


def test_a_host_says_what_it_gives_up(keeping: Jobs) -> None:
    source = keeping.start()
    finished, cut, running = source.get_samples(3)
    finish(finished)
    play(cut[0], (3, "a"))
    source.drop_samples([finished, cut])
    assert status_of(keeping.run_dir / "buffer").dropped["host"].groups == 2
    assert [snapshot.id for snapshot in abandoned_of(keeping.args)] == ["s0", "s1"]
    source.save(0)
    assert numbers(keeping.start(load=0).waiting_groups) == numbers([running])


def test_what_is_finished_and_never_handed_over_is_said(
    keeping: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    source = keeping.start()
    [group] = source.get_samples(1)
    finish(group)
    for rollout_id in range(31):
        keeping.train(rollout_id)
    assert "drop_samples" not in caplog.text
    for rollout_id in range(31, 40):
        keeping.train(rollout_id)
    assert caplog.text.count("1 groups have been finished for 32 steps") == 1
    assert "data_source.drop_samples(groups)" in caplog.text


def test_the_settings_say_what_a_host_keeps(jobs: Jobs) -> None:
    jobs.args.rollout_function_path = "midstream.local.mine.around_generate_rollout"
    jobs.args.midstream["journal"] = {"host_keeps_groups": False}
    source = jobs.start()
    _, trained = source.get_samples(2)
    finish(trained)
    jobs.train(0, trained)
    source.save(0)
    assert jobs.start(load=0).get_buffer_length() == 0


def test_a_host_that_keeps_groups_has_to_say_what_it_trains_on(keeping: Jobs) -> None:
    source = keeping.start()
    running, finished = source.get_samples(2)
    source.save(0)
    assert numbers(keeping.start(load=0).waiting_groups) == numbers([running, finished])
    _, finished = keeping.source.get_samples(2)
    finish(finished)
    with pytest.raises(OwnershipError, match="1 groups are finished.*have midstream.*log_rollout called"):
        keeping.source.save(1)
    keeping.args.custom_rollout_log_function_path = None
    keeping.source.close()
    with pytest.raises(ValueError, match="which groups are trained on.*add --custom-rollout-log"):
        DataSource(keeping.args)


@pytest.mark.parametrize("policy", ["continue", "restart", "wait"])
def test_a_host_that_cuts_nothing_off_needs_no_flags_for_it(keeping: Jobs, policy: str) -> None:
    keeping.args.partial_rollout = False
    keeping.args.midstream["resume_policy"] = policy
    source = keeping.start()
    [group] = source.get_samples(1)
    play(group[0], (3, "a"))
    source.add_samples([group])
    assert numbers(source.get_samples(1)) == numbers([group])


def test_a_checkpoint_is_of_one_moment(keeping: Jobs) -> None:
    """While one thread takes and hands back, another saves: what the position has passed waits or is trained."""
    source = keeping.start()
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            groups = source.get_samples(3)
            source.add_samples(groups[:2])
            finish(groups[2])

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            for rollout_id in range(20):
                keeping.train(rollout_id)
                source.save(rollout_id)
        finally:
            is_over.set()
        working.result()
    again = keeping.start(load=rollout_id)
    position = json.loads((Path(keeping.args.load) / "rollout" / f"prompts_{rollout_id}.json").read_text())
    assert sorted(numbers(again.waiting_groups)) == list(range(position["sample_group_index"]))
