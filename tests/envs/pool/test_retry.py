"""When a failed creation is tried again: cases computed by hand, and the loop with a clock that tests turn."""

import asyncio

import pytest

from midstream.envs.errors import SandboxFailure
from midstream.envs.pool.retry import Again, GiveUp, decide, retrying
from midstream.envs.pool.settings import PoolSettings

SETTINGS = PoolSettings(retry_attempts=4, retry_first_s=1.0, retry_longest_s=5.0)
LONG = 1000.0


@pytest.mark.parametrize(
    ("failure", "attempt", "left_s", "draw", "expected"),
    [
        (SandboxFailure("f", "transient"), 1, LONG, 0.0, Again(0.5)),
        (SandboxFailure("f", "transient"), 1, LONG, 0.5, Again(0.75)),
        (SandboxFailure("f", "transient"), 3, LONG, 0.0, Again(2.0)),
        (SandboxFailure("f", "throttled", 7.0), 1, LONG, 0.0, Again(7.0)),
        (SandboxFailure("f", "throttled", 10.0), 900, LONG, 0.5, Again(10.5)),
        (SandboxFailure("f", "throttled"), 2, LONG, 0.0, Again(2.0)),
        (SandboxFailure("f", "throttled"), 2000, LONG, 0.0, Again(5.0)),
        (SandboxFailure("f", "quota"), 1, LONG, 0.0, Again(1.0, on_release=True)),
        (SandboxFailure("f", "quota"), 5, 2.0, 0.0, Again(2.0, on_release=True)),
    ],
)
def test_waits(failure: SandboxFailure, attempt: int, left_s: float, draw: float, expected: Again) -> None:
    assert decide(failure, attempt, left_s, SETTINGS, draw) == expected


@pytest.mark.parametrize(
    ("failure", "attempt", "left_s"),
    [
        (SandboxFailure("f", "permanent"), 1, LONG),
        (SandboxFailure("f", "transient"), 4, LONG),
        (SandboxFailure("f", "transient"), 1, 0.4),
        (SandboxFailure("f", "throttled", 7.0), 1, 6.9),
        (SandboxFailure("f", "quota"), 1, 0.0),
    ],
)
def test_what_is_given_up(failure: SandboxFailure, attempt: int, left_s: float) -> None:
    assert isinstance(decide(failure, attempt, left_s, SETTINGS, 0.0), GiveUp)


class Story:
    """Attempts that fail as told, on a clock that only waiting moves."""

    def __init__(self, *failures: SandboxFailure) -> None:
        self.failures = list(failures)
        self.now = 100.0
        self.attempts_at: list[float] = []
        self.released_after: float | None = None

    async def ready(self) -> None:
        return

    async def attempt(self, _: None) -> str:
        self.attempts_at.append(self.now)
        if self.failures:
            raise self.failures.pop(0)
        return "made"

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def until_release(self, seconds: float) -> None:
        self.now += seconds if self.released_after is None else self.released_after

    def play(self, deadline: float = 1000.0) -> str:
        return asyncio.run(
            retrying(
                self.ready,
                self.attempt,
                SETTINGS,
                deadline=deadline,
                clock=lambda: self.now,
                sleep=self.sleep,
                until_release=self.until_release,
                draw=lambda: 0.0,
            )
        )


def test_a_provider_that_names_a_time_is_asked_again_then_and_not_before() -> None:
    story = Story(
        SandboxFailure("slow down", "throttled", 30.0), SandboxFailure("slow down", "throttled", 12.5)
    )
    assert story.play() == "made"
    assert story.attempts_at == [100.0, 130.0, 142.5]


def test_passing_failures_back_off_and_end_with_the_attempts() -> None:
    story = Story(*[SandboxFailure("it broke") for _ in range(9)])
    with pytest.raises(SandboxFailure, match="it broke .*attempt 4 of 4") as failed:
        story.play()
    assert story.attempts_at == [100.0, 100.5, 101.5, 103.5]
    assert failed.value.kind == "transient"


def test_a_quota_waits_for_a_release() -> None:
    story = Story(SandboxFailure("full", "quota"), SandboxFailure("full", "quota"))
    story.released_after = 0.25
    story.play()
    assert story.attempts_at == [100.0, 100.25, 100.5]


def test_a_permanent_failure_is_raised_as_it_came() -> None:
    failure = SandboxFailure("no such image", "permanent")
    with pytest.raises(SandboxFailure) as failed:
        Story(failure).play()
    assert failed.value is failure


@pytest.mark.parametrize("kind", ["throttled", "quota", "transient"])
def test_no_attempt_begins_after_the_deadline(kind: str) -> None:
    story = Story(*[SandboxFailure("again", kind) for _ in range(99)])  # type: ignore[arg-type]
    with pytest.raises(SandboxFailure, match="deadline|attempt 4") as failed:
        story.play(deadline=112.0)
    assert max(story.attempts_at) <= 112.0
    assert failed.value.kind == kind
