"""What is kept of rollouts, and what of it can be read after all that may happen to files."""

import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from midstream.buffers.lags import Lags
from midstream.buffers.rollout import Span, Status
from midstream.hooks.credit.kept import KeptRollout, described, has_kept, keep, kept_rollouts
from midstream.hooks.credit.lines import FOLDER
from midstream.hooks.credit.measured import Measurements, keep_measured, measured_in
from tests.buffers.made import played


def made(step: int, index: int, **fields: object) -> KeptRollout:
    rollout = played((3, {"a": "xx", "\udcff\n": "y"}), (5, {"b": "zzz"}))
    rollout.status, rollout.reward, rollout.resumes = Status.COMPLETED, 0.5, 1
    return replace(described(rollout, version=6, index=index, step=step), **fields)


def read(run_dir: Path) -> tuple[list[KeptRollout], list[str]]:
    damaged: list[str] = []
    return list(kept_rollouts(run_dir, lambda error: damaged.append(str(error)))), damaged


@contextmanager
def no_file_larger_than(limit_bytes: int) -> Iterator[None]:
    """As a disk that is full after so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_is_kept_of_a_rollout() -> None:
    kept = made(2, 7)
    assert (kept.step, kept.index, kept.group_key, kept.prompt_key) == (2, 7, "group", "prompt")
    assert (kept.reward, kept.status, kept.fault, kept.version) == (0.5, "completed", None, 6)
    assert (kept.dispatch_version, kept.spans) == (3, (Span(3, 0, 2), Span(5, 3, 5)))
    assert (kept.tokens, kept.turns, kept.resumes, kept.lags) == (6, 2, 1, Lags(3, 3, 3))
    assert kept.blame.shares == {3: 0.5, 5: 0.5}


def test_the_newest_step_comes_first_and_a_batch_keeps_its_order(tmp_path: Path) -> None:
    assert read(tmp_path) == ([], []) and not has_kept(tmp_path)
    batches = {step: [made(step, index) for index in (2 * step + 1, 2 * step)] for step in (0, 9, 1_000_000)}
    for step, batch in batches.items():
        keep(tmp_path, step, batch)
    assert has_kept(tmp_path)
    assert read(tmp_path) == ([*batches[1_000_000], *batches[9], *batches[0]], [])


def test_a_step_that_is_done_again_takes_the_place_of_what_came_after_it(tmp_path: Path) -> None:
    for step in range(4):
        keep(tmp_path, step, [made(step, step)])
        keep_measured(tmp_path, step, 3, Measurements([f"group/{step}"], [0], [0.0], [], [], []))
    keep(tmp_path, 1, [made(1, 10)])
    assert [rollout.index for rollout in read(tmp_path)[0]] == [10, 0]
    # Fewer ranks may measure it this time.
    assert [len(measured_in(tmp_path, step)) for step in range(4)] == [1, 0, 0, 0]


@pytest.mark.parametrize("reward", [math.nan, math.inf, None, {"score": 1.0}])
def test_a_reward_that_is_no_number_is_kept_as_none(tmp_path: Path, reward: Any) -> None:
    rollout = played((3, {}))
    rollout.reward = reward
    keep(tmp_path, 0, [described(rollout, version=6, index=0, step=0)])
    assert read(tmp_path)[0][0].reward is None


def test_a_failure_is_no_reward(tmp_path: Path) -> None:
    rollout = played((3, {}))
    rollout.status, rollout.failure, rollout.reward = Status.FAILED, "environment", 0.0
    keep(tmp_path, 0, [described(rollout, version=6, index=0, step=0)])
    [kept], _ = read(tmp_path)
    assert (kept.reward, kept.failure) == (None, "environment")


def test_files_that_are_damaged_are_named_and_cost_no_other(tmp_path: Path) -> None:
    for step in range(6):
        keep(tmp_path, step, [made(step, index) for index in range(50)])
    paths = sorted((tmp_path / FOLDER).iterdir())
    whole = paths[1].read_bytes()
    paths[1].write_bytes(whole[: len(whole) // 2])
    flipped = bytearray(paths[2].read_bytes())
    flipped[len(flipped) // 2] ^= 0xFF
    paths[2].write_bytes(flipped)
    paths[3].write_bytes(zstandard.compress(b'{"step": 3, "colour": "red"}\n'))
    paths[4].write_bytes(zstandard.compress(b"[" * 100_000))
    rollouts, damaged = read(tmp_path)
    assert {rollout.step for rollout in rollouts} == {0, 5}
    assert len(damaged) == 4
    for path, text in zip(reversed(paths[1:5]), damaged, strict=True):
        assert str(path) in text and "remove it" in text


@pytest.mark.parametrize("cut", [0, 1, 4, 17, -1])
def test_a_file_cut_anywhere_is_damaged(tmp_path: Path, cut: int) -> None:
    keep(tmp_path, 0, [made(0, 0)])
    [path] = (tmp_path / FOLDER).iterdir()
    path.write_bytes(path.read_bytes()[:cut])
    rollouts, [damage] = read(tmp_path)
    assert rollouts == [] and str(path) in damage


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / FOLDER / "000003.jsonl.zst").mkdir(parents=True)
    rollouts, [damage] = read(tmp_path)
    assert rollouts == [] and "cannot read" in damage


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    keep(tmp_path, 0, [made(0, 0)])
    before = {path: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()}
    with no_file_larger_than(100), pytest.raises(OSError, match="File too large"):
        keep(tmp_path, 0, [made(0, index) for index in range(500)])
    assert {path: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()} == before
