"""Restarts of a job of slime's shape: the buffer is as it was at the checkpoint that the host loads."""

import asyncio
import json
import threading
from argparse import Namespace

import pytest

from midstream.buffers.journal import encoding
from midstream.buffers.journal.errors import JournalError, JournalInUse, OwnershipError
from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.status import status_of
from midstream.envs.errors import SnapshotMissing
from midstream.hooks.slime import restart
from midstream.hooks.slime.data_source import DataSource
from midstream.hooks.slime.sample import recorded_rollout
from midstream.hooks.slime.settings import abandoned_of, engine_of, environments_of, holds_of
from midstream.local.sample import Sample
from tests.hooks.jobs import MEMBERS, Jobs, end, numbers, streamed
from tests.hooks.played import play
from tests.hooks.scripted import ScriptedEngine


def test_what_waited_waits_again_as_it_was(jobs: Jobs) -> None:
    source = jobs.start()
    _, second, third = source.get_samples(3)
    play(second[0], (3, "a"), (4, "b"))
    end(second[1], reward=0.5)
    second[0].metadata["start_rollout_id"] = 5
    source.add_samples([third, second])
    source.save(5)
    before = [sample.to_dict() for sample in [*third, *second]]
    source.get_samples(2)

    again = jobs.start(load=5)
    assert numbers(again.waiting_groups) == [0, 2, 1], "what was in flight then, and the others in order"
    assert [sample.to_dict() for group in again.waiting_groups[1:] for sample in group] == before
    assert numbers(again.get_samples(4)) == [0, 2, 1, 3]


def test_without_a_checkpoint_to_load_nothing_waits(jobs: Jobs) -> None:
    source = jobs.start()
    [group] = source.get_samples(1)
    source.add_samples([group])
    source.save(0)
    assert numbers(jobs.start().get_samples(2)) == [0, 1]
    assert jobs.source.get_buffer_length() == 0


def test_a_job_that_begins_anew_saves_nothing_of_the_one_before(jobs: Jobs) -> None:
    source = jobs.start()
    source.get_samples(1)
    source.save(0)
    jobs.start().save(0)
    assert jobs.start(load=0).get_buffer_length() == 0


def test_what_was_handed_to_a_step_after_the_checkpoint_waits_and_what_was_trained_does_not(
    jobs: Jobs,
) -> None:
    source = jobs.start()
    for rollout_id in (0, 1):  # a host that generates ahead hands over before the step before is saved
        [group] = source.get_samples(1)
        for sample in group:
            end(sample)
        jobs.train(rollout_id, group)
    source.save(0)
    assert numbers(jobs.start(load=0).waiting_groups) == [1]
    assert status_of(jobs.run_dir / "buffer").trained.groups == 1


def test_a_journal_that_is_ahead_goes_back_to_the_checkpoint(jobs: Jobs) -> None:
    source = jobs.start()
    old, older = source.get_samples(2)
    source.add_samples([old, older])
    source.save(0)
    again = source.get_samples(2)
    play(again[0][0], (3, ""))
    for sample in again[1]:
        end(sample)
    source.add_samples([again[0]])
    jobs.train(1, again[1])
    source.save(1)
    back = jobs.start(load=0)
    assert numbers(back.waiting_groups) == [0, 1]
    assert [sample.response_length for group in back.waiting_groups for sample in group] == [0] * 4


def test_a_checkpoint_that_the_journal_does_not_have_is_refused(jobs: Jobs) -> None:
    source = jobs.start()
    for rollout_id in (3, 4):
        source.save(rollout_id)
    jobs.position(7)
    with pytest.raises(JournalError, match="no checkpoint 7, only 3, 4.*load one of these"):
        jobs.start(load=7)


def test_a_new_run_directory_begins_empty_and_says_so(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    jobs.position(7)
    assert jobs.start(load=7).get_buffer_length() == 0
    assert "has no checkpoint" in caplog.text and "set that one" in caplog.text


@pytest.mark.parametrize(
    ("position", "words"),
    [
        (0, "group 0 is handed out as new, and is there already"),
        (1, "group 1 .* group 3 comes next"),
        (7, "group 7"),
    ],
)
def test_prompts_that_are_not_where_the_buffer_is_are_refused(jobs: Jobs, position: int, words: str) -> None:
    """A host that dies while it saves may have one without the other."""
    source = jobs.start()
    first, second, third = source.get_samples(3)
    source.add_samples([first])
    for sample in [*second, *third]:
        end(sample)
    jobs.train(0, second, third)
    source.save(0)
    jobs.position(0, position)
    again = jobs.start(load=0)
    with pytest.raises(OwnershipError, match=f"prompts are not where the buffer is: {words}.*load the state"):
        again.get_samples(2)


@pytest.mark.parametrize("name", ["journal.sqlite", "journal.lock"])
def test_a_journal_that_is_removed_under_a_job_is_said_at_the_next_save(jobs: Jobs, name: str) -> None:
    source = jobs.start()
    source.add_samples(source.get_samples(1))
    (jobs.run_dir / "buffer" / name).unlink()
    with pytest.raises(JournalError, match="removed or replaced while this job had it open.*Start again"):
        source.save(0)


def test_groups_of_another_size_are_refused(jobs: Jobs) -> None:
    source = jobs.start()
    source.add_samples(source.get_samples(1))
    source.save(0)
    jobs.args.n_samples_per_prompt = MEMBERS + 1
    with pytest.raises(JournalError, match="a group of 2 waits.*--n-samples-per-prompt is 3"):
        jobs.start(load=0)


def test_records_of_another_version_are_refused_and_stay(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    source = jobs.start()
    [group] = source.get_samples(1)
    play(group[0], (3, "a"))
    source.add_samples([group])
    source.save(0)
    with monkeypatch.context() as newer:
        newer.setattr(encoding, "FORMAT", encoding.FORMAT + 1)
        with pytest.raises(JournalError, match="go on with the version that wrote it"):
            jobs.start(load=0)
    assert numbers(jobs.start(load=0).waiting_groups) == [0]


def test_a_host_that_gives_back_what_it_does_not_have_is_refused(jobs: Jobs) -> None:
    source = jobs.start()
    group, other = source.get_samples(2)
    with pytest.raises(OwnershipError, match="group 0 is given back or given up, and is not in flight"):
        source.add_samples([group, group])
    source.add_samples([group])
    for refused in (source.add_samples, source.drop_samples):
        with pytest.raises(OwnershipError, match="group 0 is given back or given up, and is not in flight"):
            refused([group])
    assert numbers(source.waiting_groups) == [0]
    source.add_samples([other])
    assert numbers(source.get_samples(3)) == [0, 1, 2]


def test_what_the_journal_could_not_take_back_waits_after_a_restart(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jobs.start()
    first, second = source.get_samples(2)
    source.add_samples([first])
    with monkeypatch.context() as full_disk:
        full_disk.setattr(Journal, "buffered", fails)
        with pytest.raises(JournalError, match="disk is full"):
            source.add_samples([second])
    assert numbers(source.get_samples(1)) == [0], "the others go on"
    source.save(0)
    assert sorted(numbers(jobs.start(load=0).waiting_groups)) == [0, 1]


def test_members_that_were_split_stay_together(jobs: Jobs) -> None:
    source = jobs.start()
    [group] = source.get_samples(1)
    play(group[0], (0, ""))
    group[0] = [group[0], Sample.from_dict(json.loads(json.dumps(group[0].to_dict())))]
    source.add_samples([group])
    source.save(0)
    [again] = jobs.start(load=0).get_samples(1)
    assert [type(member) for member in again] == [list, Sample]
    assert [sample.to_dict() for sample in again[0]] == [sample.to_dict() for sample in group[0]]


def test_what_cannot_be_written_down_is_left_out_and_said(
    jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    source = jobs.start()
    [group] = source.get_samples(1)
    group[0].metadata["live"] = threading.Lock()
    group[1].label = "mine"
    source.add_samples([group])
    source.save(0)
    assert "'metadata'" in caplog.text and "left out" in caplog.text
    [again] = jobs.start(load=0).get_samples(1)
    assert again[1].label == "mine"


def test_what_the_host_gives_up_leaves_the_journal(jobs: Jobs) -> None:
    """A host that keeps nothing between its steps has given up all that it neither trains on nor gives back."""
    source = jobs.start()
    filtered, cut, _, trained, back = source.get_samples(5)
    for sample in [*filtered, *trained]:
        end(sample)
    for sample in cut:
        play(sample, (3, ""))
    source.add_samples([back])
    jobs.train(0, trained)
    status = status_of(jobs.run_dir / "buffer")
    assert (status.taken.groups, status.dropped["host"].groups) == (0, 3)
    source.save(0)
    assert numbers(jobs.start(load=0).waiting_groups) == [4]


def test_what_ended_beside_a_running_member_is_not_lost(jobs: Jobs) -> None:
    source = jobs.start()
    [group] = source.get_samples(1)
    end(group[0])
    source.save(0)
    [again] = jobs.start(load=0).get_samples(1)
    assert [sample.status for sample in again] == [Sample.Status.COMPLETED, Sample.Status.PENDING]
    assert recorded_rollout(again[0]) == recorded_rollout(group[0])


def test_a_host_that_never_says_what_it_trains_on_is_refused(jobs: Jobs) -> None:
    source = jobs.start()
    [group] = source.get_samples(1)
    for sample in group:
        end(sample)
    with pytest.raises(OwnershipError, match="1 groups are finished.*log_rollout"):
        source.save(0)
    source.close()
    jobs.source = None
    jobs.args.custom_rollout_log_function_path = None
    with pytest.raises(ValueError, match="which groups are trained on.*add --custom-rollout-log"):
        jobs.start()


def test_a_group_that_is_trained_on_and_given_back_is_refused(jobs: Jobs) -> None:
    source = jobs.start()
    [group] = source.get_samples(1)
    source.add_samples([group])
    with pytest.raises(OwnershipError, match="group 0 is trained on in step 3, and was given back"):
        jobs.train(3, group)


def test_what_the_journal_could_not_take_down_goes_out_next(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jobs.start()
    [group] = source.get_samples(1)
    play(group[0], (3, "a"))
    source.add_samples([group])
    with monkeypatch.context() as full_disk:
        full_disk.setattr(Journal, "taken", fails)
        for _ in range(2):
            with pytest.raises(JournalError, match="disk is full"):
                source.get_samples(3)
    assert numbers(source.waiting_groups) == [0]
    assert numbers(source.get_samples(2)) == [0, 1]
    source.save(0)
    assert numbers(jobs.start(load=0).get_samples(4)) == [0, 1, 2, 3], "what nobody got waits, too"


def fails(*_: object) -> None:
    raise JournalError("the disk is full")


def test_a_job_that_would_throw_the_buffer_away_is_refused(jobs: Jobs) -> None:
    source = jobs.start()
    source.add_samples(source.get_samples(2))
    for rollout_id in (3, 4):
        source.save(rollout_id)
    with pytest.raises(JournalError, match="2 groups wait.*checkpoints 3, 4.*--load.*another run_dir"):
        jobs.start().get_samples(1)
    assert numbers(jobs.start(load=4).waiting_groups) == [0, 1]


def test_a_second_job_on_the_run_directory_is_refused(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "_PATIENCE_S", 0.2)
    jobs.start()
    with pytest.raises(JournalInUse, match="in use by process.*set another run_dir"):
        DataSource(jobs.args)


def test_a_second_job_does_not_change_what_the_first_is_tuned_by(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "_PATIENCE_S", 0.2)
    jobs.start()
    before = (jobs.run_dir / "control" / "base.json").read_bytes()
    second = Namespace(**vars(jobs.args))
    second.midstream = {**second.midstream, "bounds": {"token": 3}}
    with pytest.raises(JournalInUse):
        DataSource(second)
    assert (jobs.run_dir / "control" / "base.json").read_bytes() == before


def test_a_job_that_is_just_ending_is_waited_for(jobs: Jobs) -> None:
    first = jobs.start()
    jobs.source = None
    ending = threading.Timer(0.5, first.close)
    ending.start()
    jobs.start()
    ending.join()


def test_a_run_directory_that_cannot_be_written_is_refused(jobs: Jobs) -> None:
    jobs.run_dir.write_text("a file")
    with pytest.raises(JournalError, match=r"cannot write the journal in .*run/buffer .*set run_dir"):
        jobs.start()


def answered(jobs: Jobs, *engines: ScriptedEngine) -> list[int]:
    """The versions under which a restarted job sees each of these engines, and the one before the first."""
    source = jobs.start()
    [group] = source.get_samples(1)
    play(group[0], (7, ""))
    source.add_samples([group])
    engine_of(jobs.args).version = 7
    source.save(0)
    jobs.start(load=0)
    client = engine_of(jobs.args)
    seen = [client.version]

    async def ask() -> None:
        for engine in engines:
            async with engine.serving() as url:
                client.url = url
                generation = await client.generate([13], {"max_new_tokens": 2})
                assert generation.spans[-1].version == client.version
                seen.append(client.version)
        await client.close()

    asyncio.run(ask())
    return seen


@pytest.mark.parametrize(
    ("engines", "seen"),
    [
        ((1, 2, 5), [8, 8, 9, 12]),
        ((0, 1), [8, 8, 9]),
        ((7, 8), [8, 8, 9]),
        ((8, 9), [8, 8, 9]),
        ((20,), [8, 20]),
    ],
)
def test_versions_go_on_where_an_engine_counts_anew(
    jobs: Jobs, engines: tuple[int, ...], seen: list[int]
) -> None:
    assert answered(jobs, *(ScriptedEngine([("add <end>", "stop")], version) for version in engines)) == seen


def waiting_on_snapshots(jobs: Jobs, policy: str) -> DataSource:
    jobs.args.midstream["resume_policy"] = policy
    source = jobs.start()
    groups = source.get_samples(2)
    play(groups[0][0], (3, "a"), (3, "b"))
    end(groups[0][1])
    source.add_samples(groups)
    source.save(0)
    return source


@pytest.mark.parametrize(("policy", "needed"), [("continue", {"s2"}), ("rewind", {"s0", "s1", "s2"})])
def test_the_store_is_told_what_a_restart_needs(jobs: Jobs, policy: str, needed: set[str]) -> None:
    waiting_on_snapshots(jobs, policy)
    jobs.start(load=0)
    assert set(environments_of(jobs.args).needed) == needed


def test_a_snapshot_that_is_missing_is_said(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    waiting_on_snapshots(jobs, "rewind")
    environments_of(jobs.args).missing = frozenset({"s1"})
    jobs.start(load=0)
    assert "1 of 3 snapshots" in caplog.text and "s1" in caplog.text


def test_a_store_without_any_of_the_snapshots_is_refused(jobs: Jobs) -> None:
    waiting_on_snapshots(jobs, "continue")
    environments_of(jobs.args).missing = frozenset({"s2"})
    with pytest.raises(SnapshotMissing, match=r"none of the 1 snapshots.*midstream\.snapshots\.path"):
        jobs.start(load=0)


def test_a_snapshot_of_a_checkpoint_outlasts_its_rollout(jobs: Jobs) -> None:
    source = waiting_on_snapshots(jobs, "continue")
    [group, _] = source.get_samples(2)
    rollout = recorded_rollout(group[0])
    free = holds_of(jobs.args).release(rollout.snapshots.values())
    assert [snapshot.id for snapshot in free] == ["s0", "s1"], (
        "the rollout has ended, the checkpoint needs s2"
    )
    end(group[0])
    jobs.train(1, group)
    for rollout_id in (1, 2):
        source.save(rollout_id)
    assert abandoned_of(jobs.args) == [], "the checkpoint can still be loaded"
    source.save(3)
    assert [snapshot.id for snapshot in abandoned_of(jobs.args)] == ["s2"]


def test_a_snapshot_that_only_an_earlier_process_released_goes_with_its_checkpoint(jobs: Jobs) -> None:
    source = waiting_on_snapshots(jobs, "continue")
    [group, _] = source.get_samples(2)
    end(group[0])
    jobs.train(1, group)
    source.save(1)
    source = jobs.start(load=1)
    source.save(2)
    assert abandoned_of(jobs.args) == [], "checkpoint 0 can still be loaded"
    source.save(3)
    assert [snapshot.id for snapshot in abandoned_of(jobs.args)] == ["s2"]


def test_a_damaged_group_costs_only_itself(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    source = waiting_on_snapshots(jobs, "continue")
    source.close()
    jobs.source = None
    path = next((jobs.run_dir / "buffer").glob("*.sqlite*"))
    content = bytearray(path.read_bytes())
    at = content.index(b"midR")
    content[at + 40] ^= 0xFF
    path.write_bytes(content)
    again = jobs.start(load=0)
    assert numbers(again.waiting_groups) == [1]
    assert "damage cost 1 groups" in caplog.text


def test_closing_lets_go_of_the_run_directory_and_twice_is_fine(jobs: Jobs) -> None:
    source = jobs.start()
    source.close()
    source.close()
    assert asyncio.run(_opens(jobs.args))


async def _opens(args: Namespace) -> bool:
    source = DataSource(args)
    source.close()
    return True


def test_samples_of_the_hosts_own_generate_outlast_a_restart(jobs: Jobs) -> None:
    source = jobs.start()
    [group] = source.get_samples(1)
    streamed(group[0])
    source.add_samples([group])
    source.save(0)
    before = [sample.to_dict() for sample in group]
    status = status_of(jobs.run_dir / "buffer")
    assert (status.buffered.tokens, status.newest_version) == (3, 4)
    [again] = jobs.start(load=0).get_samples(1)
    assert [sample.to_dict() for sample in again] == before


def test_samples_of_the_hosts_own_generate_start_anew(jobs: Jobs) -> None:
    jobs.args.midstream["resume_policy"] = "restart"
    source = jobs.start()
    [group] = source.get_samples(1)
    streamed(group[0])
    source.add_samples([group])
    [[sample, _]] = source.get_samples(1)
    assert (sample.tokens, sample.response, sample.response_length) == ([13], "", 0)
    assert (sample.status, sample.weight_versions) == (Sample.Status.PENDING, [])
    assert "midstream" not in sample.metadata
    assert source.counters.discarded_tokens == {"cut_off": 2}
