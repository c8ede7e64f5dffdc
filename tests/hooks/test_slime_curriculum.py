"""The curriculum in a host of slime's shape: which prompts become groups, and what is learnt of them."""

import copy
import json
import logging
import math
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from midstream.buffers.curriculum.book import digest_of
from midstream.buffers.curriculum.state import StateError
from midstream.hooks.slime.data_source import DataSource
from midstream.hooks.slime.filters import informative, observe_all
from midstream.hooks.slime.log import log_rollout
from midstream.hooks.slime.outcomes import MOST_SOURCES
from midstream.hooks.slime.prompts import HostPrompts
from midstream.hooks.slime.rewards import post_process
from midstream.hooks.slime.sample import task_of
from midstream.hooks.slime.settings import curriculum_of, engine_of, siblings_of
from midstream.local.sample import Sample
from tests.conf.tuned import tuned
from tests.hooks.host import host_args
from tests.hooks.jobs import end

TASKS, MEMBERS = 12, 4
_ROOT = "midstream.hooks.slime.filters"


def tasks(count: int = TASKS) -> list[dict[str, Any]]:
    """Half of them of the source `easy`; the label is the number."""
    return [
        {
            "prompt": "7",
            "label": str(number),
            "metadata": {
                "files": {},
                "pre_commands": [],
                "eval_cmd": "true",
                "source": "easy" if number < count // 2 else "hard",
            },
        }
        for number in range(count)
    ]


def job_args(folder: Path, curriculum: dict[str, Any] | None = None, **settings: Any) -> Namespace:
    options: dict[str, Any] = {
        "n_samples_per_prompt": MEMBERS,
        "rollout_batch_size": 2,
        "dynamic_sampling_filter_path": f"{_ROOT}.informative",
        "rollout_all_samples_process_path": f"{_ROOT}.observe_all",
        "save": str(folder / "checkpoint"),
        "load": str(folder / "checkpoint"),
        "sglang_router_port": hash(folder) % 60_000,
        "midstream": {
            "run_dir": str(folder / "run"),
            "environment": {"factory": "tests.hooks.jobs:Environments"},
            "curriculum": {"enabled": True, "gate": {"explore": 0.0}, **(curriculum or {})},
        },
        **settings,
    }
    return host_args(folder, tasks(), **options)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[DataSource]:
    source = DataSource(job_args(tmp_path))
    yield source
    source.close()


def finished(group: list[Sample], *rewards: float) -> list[Sample]:
    for sample, reward in zip(group, rewards, strict=True):
        end(sample, reward)
    return group


def solve(group: list[Sample]) -> list[Sample]:
    """All members solve the easy tasks, half of them the others."""
    easy = group[0].metadata["source"] == "easy"
    return finished(group, *([1.0] * MEMBERS if easy else [1.0, 0.0] * (MEMBERS // 2)))


def step(source: DataSource, args: Namespace, number: int, groups: int = 2) -> dict[str, float]:
    """Play until the batch is full, and log it."""
    batch: list[list[Sample]] = []
    while len(batch) < groups:
        [group] = source.get_samples(1)
        if informative(args, solve(group)).keep:
            batch.append(group)
        else:
            source.drop_samples([group])
    metrics: dict[str, Any] = {}
    log_rollout(number, args, [sample for group in batch for sample in group], metrics, 1.0)
    return metrics


def test_groups_of_solved_prompts_are_no_longer_paid_for(tmp_path: Path, source: DataSource) -> None:
    args = job_args(tmp_path)
    steps = [step(source, args, number) for number in range(20)]
    # Without a curriculum as many easy groups as others are paid for.
    assert 1 <= sum(metrics["curriculum/easy/played"] for metrics in steps) <= 6
    assert sum(metrics["curriculum/easy/skipped"] for metrics in steps) > 40
    assert all(metrics["curriculum/hard/informative"] == 1.0 for metrics in steps)
    assert steps[-1]["curriculum/unknown_prompts"] == 0


def test_groups_are_numbered_by_the_host_one_after_another(source: DataSource) -> None:
    groups = source.get_samples(5)
    assert [group[0].group_index for group in groups] == list(range(5))
    assert [sample.index for group in groups for sample in group] == list(range(5 * MEMBERS))
    assert all(len({sample.label for sample in group}) == 1 for group in groups)


def test_waiting_groups_still_go_before_new_ones(source: DataSource) -> None:
    [group] = source.get_samples(1)
    source.add_samples([group])
    assert [each[0].group_index for each in source.get_samples(2)] == [0, 1]


def test_a_group_is_learnt_from_once_whichever_hook_sees_it(tmp_path: Path, source: DataSource) -> None:
    args = job_args(tmp_path)
    [group] = source.get_samples(1)
    informative(args, solve(group))
    observe_all(args, [group], source)
    found = curriculum_of(args)
    assert found is not None
    tallies = found.curriculum.end_step()
    assert sum(tally.ended for tally in tallies.values()) == 1


def test_where_no_filter_is_called_what_is_trained_on_is_learnt_from(
    tmp_path: Path, source: DataSource
) -> None:
    args = job_args(tmp_path)
    seen, unseen, *_ = groups = source.get_samples(4)
    found = curriculum_of(args)
    assert found is not None
    informative(args, solve(seen))
    for group in groups[1:]:
        solve(group)
    metrics: dict[str, Any] = {}
    log_rollout(0, args, [sample for group in groups for sample in group], metrics, 1.0)
    assert metrics["curriculum/easy/played"] + metrics["curriculum/hard/played"] == 4
    book = found.curriculum.book
    assert book.successes.sum() + book.failures.sum() == 4 * MEMBERS
    # A host may keep a group, and hand it to training in a later step.
    before = found.curriculum.belief(digest_of(task_of(unseen[0]).key))
    informative(args, unseen)
    assert found.curriculum.belief(digest_of(task_of(unseen[0]).key)) == before


def test_with_a_filter_of_the_users_own_all_groups_are_learnt_from(tmp_path: Path) -> None:
    args = job_args(tmp_path, dynamic_sampling_filter_path="some.filter")
    source = DataSource(args)
    observe_all(args, [solve(group) for group in source.get_samples(4)], source)
    found = curriculum_of(args)
    assert found is not None
    assert sum(tally.ended for tally in found.curriculum.end_step().values()) == 4
    source.close()


def test_where_no_hook_sees_groups_end_those_that_are_trained_on_are_learnt_from(
    tmp_path: Path, source: DataSource
) -> None:
    args = job_args(tmp_path)
    for number in range(20):
        trained = [sample for group in source.get_samples(2) for sample in solve(group)]
        metrics: dict[str, Any] = {}
        log_rollout(number, args, trained, metrics, 1.0)
    assert metrics["curriculum/hard/played"] == 2
    assert metrics["curriculum/hard/informative"] == 1.0 and metrics["curriculum/easy/skipped"] > 0


def test_members_whose_infrastructure_failed_do_not_count(tmp_path: Path, source: DataSource) -> None:
    args = job_args(tmp_path)
    [group] = source.get_samples(1)
    finished(group, 1.0, 0.0, 0.0, 0.0)
    for sample in group[1:]:
        sample.remove_sample = True
    verdict = informative(args, group)
    assert (verdict.keep, verdict.reason) == (False, "all_1")
    found = curriculum_of(args)
    assert found is not None
    [row] = found.curriculum.book.successes.nonzero()[0]
    assert (found.curriculum.book.successes[row], found.curriculum.book.failures[row]) == (1, 0)


def test_a_rollout_that_was_split_counts_once(tmp_path: Path, source: DataSource) -> None:
    args = job_args(tmp_path)
    [group] = source.get_samples(1)
    first, *others = finished(group, 1.0, 0.0, 0.0, 0.0)
    assert informative(args, [[first, copy.copy(first), copy.copy(first)], *others]).keep
    found = curriculum_of(args)
    assert found is not None
    [row] = found.curriculum.book.successes.nonzero()[0]
    assert (found.curriculum.book.successes[row], found.curriculum.book.failures[row]) == (1, 3)


def test_a_group_that_was_cut_off_has_not_ended(tmp_path: Path, source: DataSource) -> None:
    args = job_args(tmp_path)
    [group] = source.get_samples(1)
    for sample in group[1:]:
        end(sample, 0.0)
    group[0].status = Sample.Status.ABORTED
    observe_all(args, [group], source)
    found = curriculum_of(args)
    assert found is not None and not found.curriculum.book.failures.any()
    end(group[0], 1.0)
    observe_all(args, [group], source)
    assert found.curriculum.book.failures.sum() == 3


@pytest.mark.parametrize("rewards", [(math.nan, 1.0, 0.0, 0.0), (1.0, 0.0, 0.0, math.inf)])
def test_a_reward_that_is_no_number_is_refused_whatever_its_place(
    tmp_path: Path, source: DataSource, rewards: tuple[float, ...]
) -> None:
    args = job_args(tmp_path)
    [group] = source.get_samples(1)
    with pytest.raises(ValueError, match="let your reward function return a finite number"):
        informative(args, finished(group, *rewards))


def test_what_a_rollout_costs_is_remembered(tmp_path: Path, source: DataSource) -> None:
    args = job_args(tmp_path)
    [group] = source.get_samples(1)
    informative(args, solve(group))
    found = curriculum_of(args)
    assert found is not None
    book = found.curriculum.book
    [row] = book.tokens.nonzero()[0]
    cost = book.cost(int(row))
    own = sum(group[0].loss_mask or [])
    assert cost.tokens == own > 0 and cost.turns >= 1


def assert_a_restart_goes_on_alike(source: DataSource, args: Namespace) -> None:
    source.save(2)
    expected = [group[0].label for group in source.get_samples(8)]
    source.close()
    again = DataSource(args)
    again.load(2)
    assert [group[0].label for group in again.get_samples(8)] == expected
    again.close()


def test_a_restart_goes_on_with_the_same_choices(tmp_path: Path) -> None:
    args = job_args(tmp_path, {"gate": {"by": "thompson"}})
    source = DataSource(args)
    for number in range(3):
        step(source, args, number)
    assert_a_restart_goes_on_alike(source, args)


def test_a_restart_goes_on_with_the_same_choices_by_weights_that_were_tuned(tmp_path: Path) -> None:
    args = job_args(tmp_path, {"gate": {"min_informative": 0.0}})
    source = DataSource(args)
    step(source, args, 0)
    tuned(tmp_path / "run", "curriculum.sampler.weights.hard=3")
    step(source, args, 1)
    assert_a_restart_goes_on_alike(source, args)


def test_a_start_without_a_checkpoint_knows_nothing_of_an_earlier_run(tmp_path: Path) -> None:
    args = job_args(tmp_path)
    source = DataSource(args)
    for number in range(3):
        step(source, args, number)
    source.save(2)
    source.close()
    fresh = DataSource(args)
    fresh.get_samples(1)
    found = curriculum_of(args)
    assert found is not None and not found.curriculum.book.successes.any()
    fresh.close()


def test_switched_on_in_the_middle_of_a_run_it_begins_anew_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = job_args(tmp_path, {"enabled": False})
    source = DataSource(args)
    source.get_samples(3)
    source.save(0)
    source.close()
    source = DataSource(job_args(tmp_path))
    source.load(0)
    assert "begins anew" in caplog.text
    assert [group[0].group_index for group in source.get_samples(4)] == [0, 1, 2, 3]
    source.close()


@pytest.mark.parametrize(("rollout_id", "warns"), [(-1, False), (None, False), (3, True)])
def test_a_first_start_warns_of_no_missing_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rollout_id: int | None, warns: bool
) -> None:
    args = job_args(tmp_path)
    prompts = HostPrompts(args)
    prompts.begin(rollout_id)  # slime says -1 at the first start of a job with --load
    assert curriculum_of(args) is not None
    assert ("begins anew" in caplog.text) == warns
    prompts.close()


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    args = job_args(tmp_path)
    source = DataSource(args)
    step(source, args, 0)
    source.save(0)
    source.close()
    [path] = (tmp_path / "run" / "curriculum").glob("checkpoint-*.npz")
    path.write_bytes(path.read_bytes()[:200])
    source = DataSource(args)
    with pytest.raises(StateError, match="remove it"):
        source.load(0)
    source.close()


def test_old_checkpoints_go_with_the_journals(tmp_path: Path, source: DataSource) -> None:
    args = job_args(tmp_path)
    for number in range(5):
        step(source, args, number)
        source.save(number)
    kept = sorted(path.name for path in (tmp_path / "run" / "curriculum").glob("checkpoint-*"))
    assert kept == [f"checkpoint-{number:09d}.npz" for number in (2, 3, 4)]


def test_checkpoints_that_a_job_has_gone_back_behind_take_no_place(tmp_path: Path) -> None:
    args = job_args(tmp_path)
    source = DataSource(args)
    for number in (10, 20, 30):
        source.save(number)
    source.load(10)
    for number in (12, 14):
        source.save(number)
    kept = sorted(path.name for path in (tmp_path / "run" / "curriculum").glob("checkpoint-*"))
    assert kept == [f"checkpoint-{number:09d}.npz" for number in (10, 12, 14)]
    source.close()


def test_checkpoints_of_an_earlier_run_do_not_displace_those_of_this_one(tmp_path: Path) -> None:
    args = job_args(tmp_path)
    for steps in (5, 1):
        source = DataSource(args)
        for number in range(steps):
            step(source, args, number)
            source.save(number)
        source.close()
        shutil.rmtree(tmp_path / "run" / "buffer")  # as the journal says it, to begin anew
    kept = [path.name for path in (tmp_path / "run" / "curriculum").glob("checkpoint-*")]
    assert kept == ["checkpoint-000000000.npz"]


def test_the_history_has_a_line_for_each_step(tmp_path: Path, source: DataSource) -> None:
    args = job_args(tmp_path)
    for number in range(3):
        step(source, args, number)
    lines = (tmp_path / "run" / "curriculum" / "history.jsonl").read_text().splitlines()
    history = [json.loads(line) for line in lines]
    assert [line["step"] for line in history] == [0, 1, 2]
    of_easy = [line["sources"]["easy"] for line in history]
    assert all(sum(line["pass_rates"]) == line["known"] <= line["prompts"] == TASKS // 2 for line in of_easy)
    ended = sum(line["ended"] for line in of_easy)
    assert sum(groups for line in of_easy for _, _, groups in line["calibration"]) == ended > 0


def test_a_prompt_that_another_hook_changed_is_said_once(
    tmp_path: Path, source: DataSource, caplog: pytest.LogCaptureFixture
) -> None:
    args = job_args(tmp_path)
    for group in source.get_samples(3):
        for sample in group:
            sample.label = "other"
        informative(args, solve(group))
    assert caplog.text.count("not in the dataset") == 1
    metrics: dict[str, Any] = {}
    log_rollout(0, args, [], metrics, 1.0)
    assert metrics["curriculum/unknown_prompts"] == 3


@pytest.mark.parametrize(
    ("flags", "layer", "message"),
    [
        ({"dynamic_sampling_filter_path": None, "rollout_all_samples_process_path": None}, {}, "learns from"),
        (
            {"dynamic_sampling_filter_path": "own.filter"},
            {"early_stop": {"min_informative": 0.1}},
            "early_stop.*it needs",
        ),
        ({"n_samples_per_prompt": 1}, {}, "use 2 or more"),
    ],
)
def test_a_job_that_would_not_learn_is_refused(
    tmp_path: Path, flags: dict[str, Any], layer: dict[str, Any], message: str
) -> None:
    source = DataSource(job_args(tmp_path, layer, **flags))
    with pytest.raises(ValueError, match=message):
        source.get_samples(1)
    source.close()


def with_sources(folder: Path, sources: list[Any]) -> Namespace:
    """A job over a prompt of each of these sources, as they come up."""
    args = job_args(folder, {"sampler": {"by": "uniform"}})
    numbered = [
        task | {"label": str(number), "metadata": task["metadata"] | {"source": source}}
        for number, (task, source) in enumerate(zip(tasks(len(sources)), sources, strict=True))
    ]
    Path(args.prompt_data).write_text("".join(json.dumps(task) + "\n" for task in numbered))
    return args


def test_sources_may_be_called_anything(tmp_path: Path) -> None:
    args = with_sources(tmp_path, ["", None, 7, "a/b", "line\nbreak", ["x"], {"y": 1}])
    source = DataSource(args)
    taken = source.get_samples(7)
    assert len({group[0].label for group in taken}) == 7
    found = curriculum_of(args)
    assert found is not None
    assert found.curriculum.sizes()["default"] == 2
    for group in taken:
        informative(args, finished(group, *[1.0, 0.0] * (MEMBERS // 2)))
    metrics: dict[str, Any] = {}
    log_rollout(0, args, [], metrics, 1.0)
    assert metrics["curriculum/a/b/informative"] == 1.0
    source.save(0)
    source.close()
    source = DataSource(args)
    source.load(0)
    source.close()


@pytest.mark.parametrize(
    ("weights", "sources", "told"),
    [
        (
            {"hrad": 2.0},
            {"easy", "hard"},
            "names 'hrad', and no prompt is of such a source: there are 'easy', 'hard'",
        ),
        ({"easy": 0.0}, {"hard"}, None),
        ({"easy": 0.0, "hard": 0.0}, {"easy", "hard"}, "give one of 'easy', 'hard' a weight above 0"),
    ],
)
def test_weights_that_nothing_could_be_played_by_are_told(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    weights: dict[str, float],
    sources: set[str],
    told: str | None,
) -> None:
    source = DataSource(job_args(tmp_path, {"sampler": {"weights": weights, "by": "uniform"}}))
    assert {group[0].metadata["source"] for group in source.get_samples(12)} == sources
    assert told in caplog.text if told else "weights" not in caplog.text
    source.close()


def test_a_source_for_each_prompt_is_refused(tmp_path: Path) -> None:
    source = DataSource(with_sources(tmp_path, [f"prompt-{number}" for number in range(MOST_SOURCES + 1)]))
    with pytest.raises(ValueError, match="source_key=source names 1,001 sources"):
        source.get_samples(1)
    source.close()


def test_equal_groups_are_kept_with_the_weight_that_is_set(tmp_path: Path) -> None:
    rules = {"filter": {"zero_variance": "keep", "zero_variance_weight": 0.25}}
    args = job_args(
        tmp_path, rules, rewards_normalization=True, grpo_std_normalization=False, advantage_estimator="grpo"
    )
    source = DataSource(args)
    solved, failed, mixed, broken = source.get_samples(4)
    finished(solved, 1.0, 1.0, 1.0, 1.0)
    finished(failed, 0.0, 0.0, 0.0, 0.0)
    finished(mixed, 1.0, 0.0, 1.0, 0.0)
    finished(broken, 1.0, 1.0, 1.0, 0.0)
    broken[3].remove_sample = True
    groups = [solved, failed, mixed, broken]
    assert all(informative(args, group).keep for group in groups)
    _, rewards = post_process(args, [sample for group in groups for sample in group])
    assert rewards == pytest.approx([0.25] * 4 + [-0.25] * 4 + [0.5, -0.5] * 2 + [0.25] * 3 + [0.0])
    source.close()


def test_a_step_ends_though_nothing_informs(
    tmp_path: Path, source: DataSource, caplog: pytest.LogCaptureFixture
) -> None:
    args = job_args(tmp_path)
    caplog.set_level(logging.WARNING)
    verdicts = []
    for _ in range(18):
        [group] = source.get_samples(1)
        verdicts.append(informative(args, finished(group, *[0.0] * MEMBERS)).keep)
    # Four for each of the two groups of a step, twice.
    assert verdicts == [False] * 16 + [True] * 2
    assert "kept until the step ends" in caplog.text


def test_no_group_is_given_up_once_equal_rewards_are_kept(tmp_path: Path) -> None:
    args = job_args(tmp_path, {"early_stop": {"min_informative": 0.5, "min_finished": 2}})
    source = DataSource(args)
    [group] = source.get_samples(1)
    decide = siblings_of(args).decide
    assert decide is not None
    alike = (task_of(group[0]).key, [1.0] * 3, MEMBERS, None)
    assert decide(*alike)
    # Four for each of the two groups of a step, twice: what was given up is dropped even then.
    for _ in range(16):
        informative(args, finished(source.get_samples(1)[0], *[1.0] * MEMBERS))
    assert not decide(*alike)
    log_rollout(0, args, [], {}, 1.0)
    assert decide(*alike), "the next step is strict again"
    source.close()


def test_the_policys_version_ages_what_is_known(tmp_path: Path) -> None:
    args = job_args(tmp_path, {"forget": {"half_life": 2.0}})
    source = DataSource(args)
    engine = engine_of(args)
    engine.go_on_after(0)
    [group] = source.get_samples(1)
    informative(args, finished(group, *[1.0] * MEMBERS))
    found = curriculum_of(args)
    assert found is not None
    [row] = found.curriculum.book.successes.nonzero()[0]
    version = found.curriculum.version
    assert version is not None and engine.version == version
    found.curriculum.advance(version + 3)
    easy = found.curriculum.sources[group[0].metadata["source"]]
    left = easy.remembered(1.0, 0.0, float(found.curriculum.book.noted_at[row]), 0)
    assert left == pytest.approx((2**-1.5, 0))
    source.close()
