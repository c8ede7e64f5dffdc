"""One rollout through cuts, failures and bounds: what is in the record, and what was done to the world."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from midstream.buffers.rollout import PartialRollout, Phase, Status
from midstream.envs.errors import EnvironmentFailure, RestoreMismatch, SnapshotDamaged, SnapshotMissing
from midstream.envs.protocol import Task
from midstream.hooks.answers import Generation
from midstream.hooks.engine import Engine, EngineRejected, EngineUnavailable
from midstream.hooks.rules import TurnRules
from midstream.hooks.turns import Play
from tests.hooks.scripted import IDS, NumberEnvironment, NumberEnvironments, ScriptedEngine, WordTokenizer

PROMPT = [IDS["7"]]


class Mirror:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def append_action(self, generation: Generation) -> None:
        self.tokens += generation.tokens

    def append_observation(self, tokens: list[int], text: str) -> None:
        self.tokens += tokens

    def rewrite(self, rollout: PartialRollout) -> None:
        self.tokens = list(rollout.tokens)


@dataclass
class Scene:
    """A rollout, its engine and its environments, played once or several times."""

    answers: list[tuple[str, str]]
    environments: NumberEnvironments = field(default_factory=NumberEnvironments)
    rules: TurnRules = field(
        default_factory=lambda: TurnRules(observation_template="obs {observation}", max_turns=8)
    )
    budget: int = 100
    keeps_environment: bool = True
    retry_s: float = 5.0
    rollout: PartialRollout = field(
        default_factory=lambda: PartialRollout("p", "g", prompt_tokens=list(PROMPT))
    )
    sink: Mirror = field(default_factory=Mirror)
    aborted: bool = False

    def __post_init__(self) -> None:
        self.engine = ScriptedEngine(self.answers)

    def play(self, **changes: Any) -> PartialRollout:
        """Play until the end or the abort, and check what holds after every play."""

        async def run() -> None:
            async with self.engine.serving() as url:
                await self.run(url, **changes)

        asyncio.run(run())
        return self.rollout

    async def run(self, url: str, **changes: Any) -> None:
        client = Engine(url, retry_s=self.retry_s)
        try:
            await self.parts(client, **changes).run()
        finally:
            await client.close()
            assert self.environments.live == 0, "an environment stayed open"
            self.rollout.check()
            assert self.sink.tokens == self.rollout.tokens

    def parts(self, client: Engine, **changes: Any) -> Play:
        return Play(
            rollout=self.rollout,
            task=Task(prompt="7", label=None, metadata={}),
            engine=client,
            environments=self.environments,
            tokenizer=WordTokenizer(),
            sampling_params={"temperature": 1.0, "max_new_tokens": self.budget},
            max_response_tokens=self.budget,
            rules=self.rules,
            sink=self.sink,
            aborted=lambda: self.aborted,
            keeps_environment=self.keeps_environment,
            **changes,
        )

    def text(self) -> str:
        return WordTokenizer().decode(self.rollout.tokens, skip_special_tokens=False)


def test_a_rollout_that_nobody_cuts_off() -> None:
    scene = Scene([("add <end>", "stop"), ("add <end>", "stop"), ("done <end>", "stop")])
    rollout = scene.play()
    assert scene.text() == "add <end> obs 1 add <end> obs 2 done <end>"
    assert rollout.loss_mask == [1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert (rollout.status, rollout.reward) == (Status.COMPLETED, 2.0)
    assert [turn.snapshot_before for turn in rollout.turns] == ["0", "1", "2"]
    assert scene.environments.executed == ["add", "add", "done"]
    assert scene.engine.requests[1]["input_ids"] == PROMPT + rollout.tokens[:4]


def test_an_abort_inside_an_action_keeps_its_tokens_and_the_environment() -> None:
    scene = Scene([("add <end>", "stop"), ("add", "abort"), ("<end>", "stop"), ("done <end>", "stop")])
    scene.engine.on_request = lambda number: setattr(scene, "aborted", number == 2)
    rollout = scene.play()
    assert rollout.status is Status.ABORTED
    assert rollout.turns[-1].phase is Phase.GENERATING
    assert rollout.snapshot == "1"

    scene.aborted, scene.engine.version = False, 4
    scene.engine.on_request = lambda number: None
    rollout = scene.play()
    assert scene.text() == "add <end> obs 1 add <end> obs 2 done <end>"
    assert (rollout.reward, rollout.resumes) == (2.0, 1)
    assert [(span.version, span.start, span.end) for span in rollout.spans] == [
        (0, 0, 2), (0, 4, 5), (4, 5, 6), (4, 8, 10)
    ]  # fmt: skip
    assert scene.environments.resumed_from == ["1"]
    assert scene.engine.requests[2]["sampling_params"]["max_new_tokens"] == scene.budget - 5


def test_what_the_engine_reads_again_is_counted_once_for_each_resume_or_restart() -> None:
    scene = Scene(
        [
            ("add <end>", "stop"),
            ("add", "abort"),
            ("<end>", "stop"),
            ("done", "abort"),
            ("done <end>", "stop"),
        ]
    )
    scene.engine.cached_tokens = 2

    async def cut_off_at(client: Engine, number: int) -> int:
        scene.aborted = False
        scene.engine.on_request = lambda request: setattr(scene, "aborted", request == number)
        await scene.parts(client).run()
        return client.counters.reprefilled_tokens

    async def run() -> None:
        async with scene.engine.serving() as url:
            client = Engine(url)
            try:
                assert await cut_off_at(client, 2) == 0
                resumed = await cut_off_at(client, 4)
                assert resumed == len(scene.engine.requests[2]["input_ids"]) - 2
                scene.rollout.restart()
                scene.sink.tokens = []
                restarted = await cut_off_at(client, 0)
                assert restarted - resumed == len(PROMPT) - 2
            finally:
                await client.close()

    asyncio.run(run())


def test_an_abort_inside_a_step_runs_the_step_again_on_the_state_before_it() -> None:
    scene = Scene(
        [("add <end>", "stop"), ("slow <end>", "stop"), ("done <end>", "stop")],
        environments=NumberEnvironments(slow_s=30.0),
        rules=TurnRules(observation_template="obs {observation}", abort_grace_s=0.1),
    )

    async def cut_off_the_slow_step() -> None:
        async with scene.engine.serving() as url:
            playing = asyncio.create_task(scene.run(url))
            while len(scene.engine.requests) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            scene.aborted = True
            await asyncio.wait_for(playing, timeout=5)

    asyncio.run(cut_off_the_slow_step())
    assert scene.rollout.status is Status.ABORTED
    assert scene.rollout.turns[-1].phase is Phase.ACTING
    assert scene.environments.executed == ["add"]

    scene.aborted, scene.environments.slow_s = False, 0.0
    rollout = scene.play()
    assert scene.environments.resumed_from == ["1"]
    assert scene.environments.executed == ["add", "slow", "done"]
    assert (scene.text(), rollout.reward) == ("add <end> obs 1 slow <end> obs 2 done <end>", 2.0)


def test_a_step_that_ends_within_the_grace_is_kept() -> None:
    scene = Scene(
        [("slow <end>", "stop"), ("done <end>", "stop")],
        environments=NumberEnvironments(slow_s=0.3),
        rules=TurnRules(observation_template="obs {observation}", abort_grace_s=10),
    )
    scene.engine.on_request = lambda number: asyncio.get_running_loop().call_later(
        0.1, setattr, scene, "aborted", True
    )
    scene.play()
    assert scene.rollout.status is Status.ABORTED
    assert scene.text() == "slow <end> obs 1"
    assert scene.rollout.snapshot == "1"


def test_the_budget_holds_over_resumes_and_ends_the_rollout() -> None:
    scene = Scene([("add <end>", "stop"), ("add", "abort"), ("1 2", "length")], budget=7)
    scene.engine.on_request = lambda number: setattr(scene, "aborted", number == 2)
    scene.play()
    scene.aborted, scene.engine.on_request = False, lambda number: None
    rollout = scene.play()
    assert len(rollout.tokens) == scene.budget
    assert scene.engine.requests[-1]["sampling_params"]["max_new_tokens"] == 2
    assert (rollout.status, rollout.reward) == (Status.TRUNCATED, 1.0)
    assert scene.environments.executed == ["add"], "an action that the budget cut short was executed"


def test_an_observation_never_exceeds_the_budget() -> None:
    scene = Scene([("add <end>", "stop")], budget=3)
    rollout = scene.play()
    assert scene.text() == "add <end> obs"
    assert (rollout.status, rollout.reward) == (Status.TRUNCATED, 1.0)


def test_the_last_turn_is_scored() -> None:
    scene = Scene(
        [("add <end>", "stop")] * 2, rules=TurnRules(observation_template="obs {observation}", max_turns=2)
    )
    rollout = scene.play()
    assert (rollout.status, rollout.reward, len(rollout.turns)) == (Status.TRUNCATED, 2.0, 2)


def test_a_turn_that_fills_its_own_bound_is_executed() -> None:
    rules = TurnRules(observation_template="obs {observation}", max_tokens_per_turn=1)
    scene = Scene([("add", "length"), ("done", "length")], rules=rules)
    rollout = scene.play()
    assert [request["sampling_params"]["max_new_tokens"] for request in scene.engine.requests] == [1, 1]
    assert (scene.text(), rollout.reward) == ("add obs 1 done", 1.0)


@pytest.mark.parametrize("failing", ["failing_steps", "failing_starts"])
def test_an_environment_that_fails_is_replaced(failing: str) -> None:
    scene = Scene([("add <end>", "stop"), ("add <end>", "stop"), ("done <end>", "stop")])
    setattr(scene.environments, failing, 2)
    rollout = scene.play()
    assert scene.text() == "add <end> obs 1 add <end> obs 2 done <end>"
    assert (rollout.status, rollout.reward, rollout.attempts, rollout.resumes) == (
        Status.COMPLETED,
        2.0,
        2,
        0,
    )


def test_a_snapshot_that_fails_takes_the_transcript_back_to_the_last_state() -> None:
    scene = Scene(
        [("add <end>", "stop"), ("add <end>", "stop"), ("add <end>", "stop"), ("done <end>", "stop")]
    )

    def break_the_next_snapshot(number: int) -> None:
        scene.environments.failing_snapshots = int(number == 1)

    scene.engine.on_request = break_the_next_snapshot
    rollout = scene.play()
    assert scene.text() == "add <end> obs 1 done <end>"
    assert rollout.reward == 1.0
    assert rollout.discarded_tokens == 4
    assert scene.environments.resumed_from == ["0"]


def test_failures_without_end_are_no_reward() -> None:
    scene = Scene([("break <end>", "stop")])
    rollout = scene.play()
    assert (rollout.status, rollout.reward, rollout.attempts) == (Status.FAILED, None, 3)


def test_naive_resumes_the_transcript_in_a_world_that_began_anew() -> None:
    scene = Scene([("add <end>", "stop"), ("add", "abort"), ("<end>", "stop"), ("done <end>", "stop")])
    scene.keeps_environment = False
    scene.engine.on_request = lambda number: setattr(scene, "aborted", number == 2)
    scene.play()
    scene.aborted, scene.engine.on_request = False, lambda number: None
    rollout = scene.play()
    assert scene.text() == "add <end> obs 1 add <end> obs 1 done <end>"
    assert rollout.reward == 1.0
    assert scene.environments.starts == 2


def test_a_cancelled_rollout_leaves_no_environment_open() -> None:
    scene = Scene([("slow <end>", "stop")], environments=NumberEnvironments(slow_s=30.0))

    async def cancel() -> None:
        async with scene.engine.serving() as url:
            playing = asyncio.create_task(scene.run(url))
            await asyncio.sleep(0.3)
            assert scene.environments.live == 1
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing

    asyncio.run(cancel())
    assert scene.environments.live == 0


def test_an_engine_that_is_away_for_a_while_costs_only_time() -> None:
    scene = Scene([("add <end>", "stop"), ("done <end>", "stop")])
    scene.engine.statuses = [503, 200, 500]
    rollout = scene.play()
    assert (scene.text(), rollout.reward) == ("add <end> obs 1 done <end>", 1.0)


def test_an_engine_that_stays_away_is_named() -> None:
    scene = Scene([], retry_s=0.5)
    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:9 within 0\.5 s"):
        asyncio.run(scene.run("http://127.0.0.1:9"))


def test_a_request_that_the_engine_refuses_is_not_repeated() -> None:
    scene = Scene([])
    scene.engine.statuses = [400]
    with pytest.raises(EngineRejected, match="answered 400: not now"):
        scene.play()
    assert len(scene.engine.requests) == 1


@pytest.mark.parametrize("loss", [SnapshotMissing, SnapshotDamaged, RestoreMismatch])
def test_a_lost_snapshot_costs_the_turns_since_the_one_before_it(loss: type[EnvironmentFailure]) -> None:
    answers = [("add <end>", "stop"), ("add <end>", "stop"), ("add", "abort"), ("done <end>", "stop")]
    scene = Scene(answers)
    scene.engine.on_request = lambda number: setattr(scene, "aborted", number == 3)
    scene.play()
    assert scene.rollout.snapshot == "2"
    scene.aborted, scene.engine.on_request = False, lambda number: None
    scene.environments.lost_snapshots, scene.environments.loss = {"2"}, loss
    rollout = scene.play()
    assert scene.environments.resumed_from == ["1"]
    assert (scene.text(), rollout.reward) == ("add <end> obs 1 done <end>", 1.0)
    assert (rollout.attempts, rollout.resumes, rollout.discarded_tokens) == (0, 1, 3)


def test_a_rollout_whose_snapshots_are_all_lost_begins_anew() -> None:
    scene = Scene([("add <end>", "stop"), ("add", "abort"), ("done <end>", "stop")])
    scene.engine.on_request = lambda number: setattr(scene, "aborted", number == 2)
    scene.play()
    scene.aborted, scene.engine.on_request = False, lambda number: None
    scene.environments.lost_snapshots = {"0", "1"}
    rollout = scene.play()
    assert (scene.text(), rollout.status, rollout.reward) == ("done <end>", Status.COMPLETED, 0.0)
    assert scene.environments.starts == 2


def test_an_environment_that_cannot_be_closed_changes_nothing() -> None:
    scene = Scene([("add <end>", "stop"), ("done <end>", "stop")])
    scene.environments.failing_closes = 1
    rollout = scene.play()
    assert (scene.text(), rollout.status, rollout.reward) == (
        "add <end> obs 1 done <end>",
        Status.COMPLETED,
        1.0,
    )


def test_an_abort_does_not_wait_for_a_slow_start() -> None:
    scene = Scene(
        [("done <end>", "stop")],
        environments=NumberEnvironments(slow_starts_s=30.0),
        rules=TurnRules(observation_template="obs {observation}", abort_grace_s=0.1),
    )

    async def abort_during_the_start() -> None:
        async with scene.engine.serving() as url:
            playing = asyncio.create_task(scene.run(url))
            await asyncio.sleep(0.1)
            scene.aborted = True
            await asyncio.wait_for(playing, timeout=5)

    asyncio.run(abort_during_the_start())
    assert (scene.rollout.status, scene.rollout.resumes) == (Status.ABORTED, 0)
    scene.aborted, scene.environments.slow_starts_s = False, 0.0
    assert scene.play().status is Status.COMPLETED


def test_the_patience_with_a_dead_engine_begins_when_it_dies() -> None:
    scene = Scene([("done <end>", "stop")], retry_s=0.8)
    scene.engine.slow_s, scene.engine.statuses = 1.0, [503]
    scene.engine.on_request = lambda number: setattr(scene.engine, "slow_s", 1.0 if number == 1 else 0.0)
    assert scene.play().status is Status.COMPLETED


def test_an_engine_whose_context_is_full_ends_the_rollout() -> None:
    scene = Scene([("add <end>", "stop"), ("add", "length")])
    rollout = scene.play()
    assert (rollout.status, rollout.reward) == (Status.TRUNCATED, 1.0)
    assert scene.environments.executed == ["add"]


def test_an_abort_that_the_host_did_not_ask_for_does_not_end_the_rollout() -> None:
    scene = Scene([("add", "abort"), ("<end>", "stop"), ("done <end>", "stop")])
    rollout = scene.play()
    assert (scene.text(), rollout.status, rollout.reward) == (
        "add <end> obs 1 done <end>",
        Status.COMPLETED,
        1.0,
    )


@pytest.mark.parametrize(
    "answer", ["null", "[]", '{"meta_info": {"finish_reason": "stop"}}', '{"output_ids": [1]}']
)
def test_an_answer_that_makes_no_sense_is_named(answer: str) -> None:
    scene = Scene([])
    scene.engine.raw_answers = [answer]
    with pytest.raises(EngineRejected, match="answered what no SGLang answers"):
        scene.play()


def test_an_answer_that_is_no_json_is_asked_for_again() -> None:
    scene = Scene([("done <end>", "stop")])
    scene.engine.raw_answers = ["<html>"]
    assert scene.play().status is Status.COMPLETED


def cut_off_in_the_second_action() -> Scene:
    scene = Scene([("add <end>", "stop"), ("add", "abort"), ("<end>", "stop"), ("done <end>", "stop")])
    scene.engine.on_request = lambda number: setattr(scene, "aborted", number == 2)
    return scene


def test_an_environment_that_is_cut_off_rests_in_the_recorded_state() -> None:
    scene = cut_off_in_the_second_action()
    rollout = scene.play()
    assert (scene.environments.resting, scene.environments.forgotten) == ([1], [])

    scene.aborted = False
    scene.engine.on_request = lambda number: None
    scene.play()
    assert rollout.status is Status.COMPLETED
    assert scene.environments.resting == [1]
    assert sorted(scene.environments.forgotten) == ["0", "1", "2"]


def test_what_nobody_will_resume_is_given_up_at_once() -> None:
    scene = cut_off_in_the_second_action()
    rollout = scene.play(may_go_on=False)
    assert rollout.status is Status.ABORTED
    assert scene.environments.resting == []
    assert sorted(scene.environments.forgotten) == ["0", "1"]


def test_snapshots_are_signed_with_the_version_and_turn_that_led_to_them() -> None:
    scene = cut_off_in_the_second_action()
    scene.play()
    scene.aborted, scene.engine.version = False, 4
    scene.engine.on_request = lambda number: None
    rollout = scene.play()
    signed = {key: (snapshot.version, snapshot.turn) for key, snapshot in rollout.snapshots.items()}
    # The second action began under version 0 and was finished, and so decided, under version 4.
    assert signed == {"0": (None, None), "1": (0, 0), "2": (4, 1)}


@pytest.mark.parametrize(
    ("engine_s", "snapshot_s", "at_least_s", "at_most_s"),
    # Two snapshots: one after the start, one after the only step that does not end the episode.
    # The bounds leave room for a busy machine.
    [(0.0, 0.5, 0.5, 2.0), (1.2, 0.3, 0.0, 0.3)],
    ids=["nothing hides them", "the engine hides them"],
)
def test_what_a_rollout_waited_for_its_snapshots_is_in_its_record(
    engine_s: float, snapshot_s: float, at_least_s: float, at_most_s: float
) -> None:
    environments = NumberEnvironments(snapshot_s=snapshot_s)
    scene = Scene([("add <end>", "stop"), ("done <end>", "stop")], environments=environments)
    scene.engine.slow_s = engine_s
    rollout = scene.play()
    assert at_least_s <= rollout.snapshot_wait_s <= at_most_s
    assert PartialRollout.from_json(rollout.to_json()).snapshot_wait_s == rollout.snapshot_wait_s


def test_an_agent_that_makes_its_world_unrecordable_gets_nothing() -> None:
    scene = Scene(
        [("add <end>", "stop"), ("add <end>", "stop")],
        environments=NumberEnvironments(spoiling="more than 200 entries"),
    )
    rollout = scene.play()
    assert (rollout.status, rollout.reward) == (Status.TRUNCATED, 0.0)
    assert rollout.fault == "more than 200 entries"
    assert (rollout.attempts, scene.environments.executed) == (0, ["add"])


@pytest.mark.parametrize("stuck", ["in a step", "at the engine", "in the start", "in a snapshot"])
def test_a_rollout_that_outlasts_its_deadline_is_masked_and_leaves_nothing(stuck: str) -> None:
    scene = Scene([("slow <end>", "stop"), ("done <end>", "stop")])
    environments = scene.environments
    if stuck == "in a step":
        environments.slow_s = 30.0
    elif stuck == "at the engine":
        scene.engine.on_request = lambda number: setattr(scene.engine, "slow_s", 3.0)
    elif stuck == "in the start":
        environments.slow_starts_s = 30.0
    else:
        environments.snapshot_s = 30.0
    began = time.monotonic()
    rollout = scene.play(deadline_s=0.3)
    assert time.monotonic() - began < 5
    assert (rollout.status, rollout.reward, rollout.failure) == (Status.FAILED, None, "deadline")
    assert rollout.attempts == 0
    assert environments.resting == []
    assert sorted(environments.forgotten) == sorted(rollout.snapshots)


def test_a_deadline_does_not_cut_the_release_of_the_environment_short() -> None:
    scene = Scene([("slow <end>", "stop")], environments=NumberEnvironments(slow_s=30.0, closing_s=0.5))
    rollout = scene.play(deadline_s=0.2)
    assert rollout.failure == "deadline"
    assert scene.environments.closed == 1


def test_the_time_to_the_deadline_begins_with_each_play() -> None:
    scene = cut_off_in_the_second_action()
    scene.engine.slow_s = 0.3
    scene.play(deadline_s=0.8)
    scene.aborted = False
    scene.engine.on_request = lambda number: None
    rollout = scene.play(deadline_s=0.8)
    assert (rollout.status, rollout.failure, rollout.resumes) == (Status.COMPLETED, None, 1)


def test_why_a_rollout_failed_is_in_its_record() -> None:
    rollout = Scene([("break <end>", "stop")]).play()
    assert rollout.failure == "environment"
    assert PartialRollout.from_json(rollout.to_json()).failure == "environment"


def stuck_in(place: str) -> Scene:
    """A rollout that comes to no end in its second turn, or in its start."""
    scene = Scene([("add <end>", "stop"), ("slow <end>", "stop"), ("done <end>", "stop")])
    environments = scene.environments
    if place == "in a step":
        environments.slow_s = 30.0
    elif place == "at the engine":
        scene.engine.on_request = lambda number: setattr(scene.engine, "slow_s", 2.0 * (number == 2))
    elif place == "in the start":
        environments.slow_starts_s = 30.0
    else:
        environments.snapshot_s = 30.0
    return scene


PLACES = ["in a step", "at the engine", "in the start", "in a snapshot"]


async def stop_later(scene: Scene, at_once: Callable[[asyncio.Task[None]], object] = bool) -> None:
    """Play, and stop that half a second later; `at_once` is done to its task at the same moment."""
    async with scene.engine.serving() as url:
        client = Engine(url, retry_s=scene.retry_s)
        play = scene.parts(client)
        playing = asyncio.create_task(play.run())
        await asyncio.sleep(0.5)
        assert not playing.done()
        play.stop()
        at_once(playing)
        try:
            await asyncio.wait_for(playing, timeout=5)
        finally:
            await client.close()
            assert scene.environments.live == 0
            scene.rollout.check()
            assert scene.sink.tokens == scene.rollout.tokens


@pytest.mark.parametrize("place", PLACES)
def test_a_rollout_that_is_stopped_is_masked_and_leaves_nothing(place: str) -> None:
    scene = stuck_in(place)
    asyncio.run(stop_later(scene))
    rollout, environments = scene.rollout, scene.environments
    assert (rollout.status, rollout.reward, rollout.failure) == (Status.FAILED, None, "stopped")
    assert (rollout.attempts, environments.resting) == (0, [])
    assert sorted(environments.forgotten) == sorted(rollout.snapshots)


@pytest.mark.parametrize("place", PLACES)
def test_who_cancels_a_rollout_that_is_stopped_finds_it_cancelled(place: str) -> None:
    scene = stuck_in(place)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(stop_later(scene, at_once=lambda playing: playing.cancel()))
    assert not scene.rollout.status.finished


@pytest.mark.parametrize("place", PLACES)
def test_a_host_that_aborts_while_a_rollout_is_stopped_finds_it_at_an_end(place: str) -> None:
    scene = stuck_in(place)
    asyncio.run(stop_later(scene, at_once=lambda playing: setattr(scene, "aborted", True)))
    assert scene.rollout.failure == "stopped"


def test_a_rollout_that_rests_ends_without_playing_when_it_is_stopped() -> None:
    scene = cut_off_in_the_second_action()
    scene.play()
    scene.aborted = False
    requests = len(scene.engine.requests)

    async def stop() -> None:
        play = scene.parts(Engine("http://127.0.0.1:9", retry_s=1.0))
        play.stop()
        await play.run()

    asyncio.run(stop())
    rollout = scene.rollout
    assert (rollout.status, rollout.failure, rollout.resumes) == (Status.FAILED, "stopped", 0)
    assert (len(scene.engine.requests), scene.environments.resumed_from) == (requests, [])
    assert sorted(scene.environments.forgotten) == ["0", "1"]


def test_a_rollout_that_has_its_result_keeps_it_when_it_is_stopped() -> None:
    scene = Scene([("done <end>", "stop")], environments=NumberEnvironments(closing_s=1.0))
    asyncio.run(stop_later(scene))
    assert (scene.rollout.status, scene.rollout.reward) == (Status.COMPLETED, 0.0)


def test_a_snapshot_that_is_under_way_is_given_up_with_its_rollout() -> None:
    scene = Scene([("done <end>", "stop")], environments=NumberEnvironments(snapshot_s=1.0))
    scene.engine.slow_s = 2.0
    asyncio.run(stop_later(scene))
    assert list(scene.rollout.snapshots) == scene.environments.forgotten == ["0"]


class StoppedInItsStart(NumberEnvironments):
    """An environment that is there at the moment at which its rollout is stopped."""

    play: Play

    async def start(self, task: Task) -> NumberEnvironment:
        environment = await super().start(task)
        self.play.stop()
        return environment


def test_who_is_stopped_in_its_start_generates_nothing() -> None:
    environments = StoppedInItsStart()
    scene = Scene([("done <end>", "stop")], environments=environments)
    scene.engine.slow_s = 1.0

    async def start() -> None:
        async with scene.engine.serving() as url:
            client = Engine(url, retry_s=scene.retry_s)
            environments.play = scene.parts(client)
            await environments.play.run()
            await client.close()

    asyncio.run(start())
    assert (scene.rollout.failure, scene.rollout.tokens) == ("stopped", [])
    assert (environments.starts, environments.live) == (1, 0)
