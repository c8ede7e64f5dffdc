"""Several people tune one run at once, in processes that start each round together."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from midstream.conf.control.changes import path_of
from midstream.conf.control.strict import ControlError
from midstream.conf.control.tuning import commit
from tests.conf.tuned import control_of, proposed, tuned

PEOPLE = 4
ROUNDS = 30
WINS = 10

_processes = multiprocessing.get_context("fork")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    control_of(tmp_path / "run")
    return tmp_path / "run"


def together(what: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What each of the people comes to."""
    with _processes.Manager() as manager:
        results = manager.dict()
        people = [
            _processes.Process(target=lambda who=who: results.update({who: what(who, *arguments)}))
            for who in range(PEOPLE)
        ]
        for each in people:
            each.start()
        for each in people:
            each.join()
        assert [each.exitcode for each in people] == [0] * PEOPLE
        return [results[who] for who in range(PEOPLE)]


def tune_at_once(who: int, run: Path, start: Barrier) -> list[str]:
    """In each round all have seen the same; returns what each round said, "" where it went well."""
    said = []
    for number in range(ROUNDS):
        change = proposed(run, f"bounds.token={PEOPLE * number + who + 100}")
        start.wait()
        try:
            commit(run, change)
            said.append("")
        except ControlError as error:
            said.append(str(error))
        start.wait()
    return said


def test_of_those_who_tune_at_once_one_wins_and_the_others_are_told(run: Path) -> None:
    control = control_of(run)
    said = together(tune_at_once, run, _processes.Barrier(PEOPLE))
    for number, each in enumerate(zip(*said, strict=True)):
        [winner] = [who for who, words in enumerate(each) if not words]
        for words in filter(None, each):
            assert f" wrote version {number + 1} at " in words
            assert f"→ {PEOPLE * number + winner + 100})" in words
            assert "nothing of yours is written" in words
    assert sorted(path.name for path in (run / "control").iterdir()) == [
        *(path_of(run, version + 1).name for version in range(ROUNDS)),
        "base.json",
    ]
    [last] = [who for who in range(PEOPLE) if not said[who][-1]]
    assert control.read().layer.bounds.token == PEOPLE * (ROUNDS - 1) + last + 100


def count_up(who: int, run: Path) -> int:
    """Raises a weight of one's own by one each time; returns how often somebody else was quicker."""
    refused = 0
    for count in range(1, WINS + 1):
        while True:
            try:
                tuned(run, f"curriculum.sampler.weights.p{who}={count}")
                break
            except ControlError:
                refused += 1
    return refused


def test_no_change_is_lost_among_those_who_try_again(run: Path) -> None:
    control = control_of(run)
    together(count_up, run)
    settled = control.read()
    assert (settled.version, settled.alarms) == (PEOPLE * WINS, ())
    assert settled.layer.curriculum.sampler.weights == {f"p{who}": WINS for who in range(PEOPLE)}
