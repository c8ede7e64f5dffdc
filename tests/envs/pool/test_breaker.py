"""The breaker's transitions, by cases computed by hand."""

from midstream.envs.pool.breaker import Admission, Breaker
from midstream.envs.pool.settings import PoolSettings

SETTINGS = PoolSettings(
    breaker_window_s=10, breaker_results=4, breaker_failed_share=0.5, breaker_open_s=8, breaker_longest_s=20
)


def admitted(breaker: Breaker, now: float) -> Admission:
    admission = breaker.admit(now)
    assert admission is not None
    return admission


def results(breaker: Breaker, now: float, *failed: bool) -> None:
    for each in failed:
        breaker.record(admitted(breaker, now), each, now)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(SETTINGS)
    results(breaker, now, True, True, True, True)
    assert breaker.state(now) == "open"
    return breaker


def test_too_few_results_conclude_nothing() -> None:
    breaker = Breaker(SETTINGS)
    results(breaker, 0.0, True, True, True)
    assert breaker.state(0.0) == "closed"


def test_it_opens_when_half_of_enough_results_are_failures() -> None:
    breaker = Breaker(SETTINGS)
    results(breaker, 0.0, False, False, False, True, True)
    assert breaker.state(0.0) == "closed"  # 2 of 5
    results(breaker, 0.0, True)
    assert breaker.state(0.0) == "open"  # 3 of 6


def test_a_success_opens_nothing_whatever_came_before() -> None:
    breaker = Breaker(SETTINGS)
    results(breaker, 0.0, True, True, True)
    results(breaker, 1.0, False)
    assert breaker.state(1.0) == "closed"


def test_results_before_the_window_count_no_more() -> None:
    breaker = Breaker(SETTINGS)
    results(breaker, 0.0, True, True, True)
    results(breaker, 11.0, True)
    assert breaker.state(11.0) == "closed"
    results(breaker, 12.0, True, True, True)
    assert breaker.state(12.0) == "open"


def test_nobody_is_admitted_until_the_probe_is_due_and_then_one() -> None:
    breaker = opened()
    assert breaker.admit(7.9) is None
    assert breaker.wait_s(6.0) == 2.0
    assert breaker.state(8.0) == "half_open"
    assert admitted(breaker, 8.0).is_probe
    assert breaker.admit(8.0) is None
    assert breaker.admit(100.0) is None


def test_a_probe_that_succeeds_closes_it_and_old_failures_are_forgotten() -> None:
    breaker = opened()
    breaker.record(admitted(breaker, 8.0), False, 9.0)
    assert breaker.state(9.0) == "closed"
    results(breaker, 9.0, True, True, True)
    assert breaker.state(9.0) == "closed"


def test_probes_that_fail_wait_twice_as_long_up_to_the_longest() -> None:
    breaker = opened()
    now = 0.0
    for wait_s in (8.0, 16.0, 20.0, 20.0):
        assert breaker.wait_s(now) == wait_s
        now += wait_s
        breaker.record(admitted(breaker, now), True, now)
    breaker.record(admitted(breaker, now + 20), False, now + 20)
    results(breaker, now + 21, True, True, True, True)
    assert breaker.wait_s(now + 21) == 8.0  # a success starts the waits anew


def test_a_probe_that_is_given_up_leaves_room_for_the_next() -> None:
    breaker = opened()
    breaker.abandon(admitted(breaker, 8.0))
    assert admitted(breaker, 8.0).is_probe


def test_results_from_before_it_opened_do_not_count() -> None:
    breaker = Breaker(SETTINGS)
    early = admitted(breaker, 0.0)
    results(breaker, 0.0, True, True, True, True)
    breaker.record(early, False, 1.0)
    assert breaker.state(1.0) == "open"
    probe = admitted(breaker, 8.0)
    breaker.record(early, True, 8.0)
    breaker.abandon(early)
    assert breaker.admit(8.0) is None  # the probe is still the only one
    breaker.record(probe, False, 9.0)
    assert breaker.state(9.0) == "closed"
