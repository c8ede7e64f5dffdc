"""One rollout, turn by turn, on any environment and for any framework.

``play`` goes on from wherever the rollout stands: at its start, at a turn's boundary, inside an action
whose tokens were cut off, or before a step that was cancelled. It leaves the rollout in a state from
which it can go on again, and never leaves an environment open.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from midstream.buffers.rollout import PartialRollout, Phase, Status
from midstream.envs.errors import (
    AgentFault,
    EnvironmentFailure,
    RestoreMismatch,
    SnapshotDamaged,
    SnapshotMissing,
)
from midstream.envs.protocol import Environment, EnvironmentFactory, Snapshot, Step, Task
from midstream.hooks.engine import Engine
from midstream.hooks.patience import ABORT_POLL_S, Cut, Patience, Stopped, Stuck
from midstream.hooks.release import give_up, over, released
from midstream.hooks.rules import Tokenizer, TokenSink, TurnRules

_logger = logging.getLogger(__name__)

# What is wrong with a snapshot itself, so that the one before it is the next best.
_UNUSABLE = (SnapshotMissing, SnapshotDamaged, RestoreMismatch)


@dataclass
class Play:
    """The parts that one rollout needs, and the loop over its turns.

    ``max_response_tokens`` bounds the whole response, tokens of the environment included, over all
    resumes. ``keeps_environment`` False lets a resumed transcript go on in an environment that starts
    anew (the ``naive`` policy). ``may_go_on`` False says that nobody resumes what the host cuts off: its
    environment and snapshots are given up at once. ``goes_back`` says that a resume may begin at an earlier
    snapshot than the newest. ``deadline_s`` bounds one play, from ``run`` on.
    ``release`` is told of snapshots that this rollout no longer needs, and says which of them nobody does.
    """

    rollout: PartialRollout
    task: Task
    engine: Engine
    environments: EnvironmentFactory
    tokenizer: Tokenizer
    sampling_params: Mapping[str, Any]
    max_response_tokens: int
    rules: TurnRules
    sink: TokenSink
    aborted: Callable[[], bool] = lambda: False
    routing_key: str | None = None
    keeps_environment: bool = True
    may_go_on: bool = True
    deadline_s: float | None = None
    goes_back: bool = False
    release: Callable[[Iterable[Snapshot]], list[Snapshot]] = list
    _environment: Environment | None = field(default=None, init=False)
    _snapshotting: asyncio.Task[None] | None = field(default=None, init=False)
    _context_is_full: bool = field(default=False, init=False)
    _is_again: bool = field(default=False, init=False)  # the next call repeats what an engine has had

    def __post_init__(self) -> None:
        self._patience = Patience(self.aborted, self.rules.abort_grace_s, self.deadline_s)

    async def run(self) -> None:
        """Play until the rollout is finished or the host aborts.

        Afterwards ``rollout.status`` says which. An environment that fails is replaced by one from the
        last snapshot; after ``max_attempts`` failures the status is FAILED and there is no reward. A
        snapshot that cannot be restored costs the turns since the one before it. What the agent did to
        make going on impossible ends the episode with reward 0. What outlasts the deadline is FAILED too, and
        so is what ``stop`` ended.
        """
        rollout = self.rollout
        self._patience.begin()
        try:
            while not rollout.status.finished:
                try:
                    await self._advance()
                except Cut:
                    rollout.status = Status.ABORTED
                    await self._rest()
                    return
                except Stuck as stuck:
                    _logger.warning("rollout of %s is given up: %s", rollout.prompt_key, stuck)
                    self._fail("deadline")
                except Stopped:
                    self._fail("stopped")
                except AgentFault as fault:
                    rollout.fault = str(fault)
                    rollout.reward = 0.0
                    rollout.status = Status.TRUNCATED
                except _UNUSABLE:
                    # No attempt: there is one snapshot less each time, and the task itself at the end.
                    continue
                except EnvironmentFailure as failure:
                    _logger.warning("environment failed, attempt %d: %s", rollout.attempts + 1, failure)
                    rollout.attempts += 1
                    if rollout.attempts >= self.rules.max_attempts:
                        self._fail("environment")
                    await self._close()
            await self._give_up()
        finally:
            await asyncio.shield(self._close())

    def stop(self) -> None:
        """Have this play end without a result, as soon as it can; one that has its result keeps it."""
        self._patience.stop()

    def _fail(self, failure: str) -> None:
        self.rollout.failure = failure
        self.rollout.reward = None
        self.rollout.status = Status.FAILED

    async def _advance(self) -> None:
        """Take the next step of the rollout, whichever it is."""
        if self.aborted():
            await self._settle_snapshot()
            raise Cut
        self._patience.check()
        environment = await self._open()
        turn = self.rollout.open_turn
        if turn is not None and turn.phase is Phase.ACTING:
            await self._settle_snapshot()
            await self._act(environment)
        elif self._is_out_of_room() or (turn is None and len(self.rollout.turns) >= self.rules.max_turns):
            await self._settle_snapshot()
            await self._score(environment, Status.TRUNCATED)
        else:
            await self._generate()

    async def _open(self) -> Environment:
        if self._environment is not None:
            return self._environment
        rollout = self.rollout
        if self.keeps_environment and rollout.snapshot is None and rollout.turns:
            left = rollout.rewind_to_snapshot()
            self.sink.rewrite(rollout)
            await give_up(self.environments, self.release(left))
        goes_on = rollout.status is Status.ABORTED and bool(rollout.turns)
        if self.keeps_environment and rollout.snapshot is not None:
            environment = await self._patience.for_environment(self._restored(rollout.snapshot))
            self._environment = environment
        else:
            environment, first = await self._patience.for_environment(self._begun())
            self._environment = environment
            if not rollout.tokens and first:
                self._observe(first, seconds=0.0)
            self._snapshot_behind()
        rollout.resumes += goes_on
        self._is_again = goes_on or rollout.discarded_tokens > 0
        rollout.status = Status.PENDING
        return environment

    async def _restored(self, snapshot_id: str) -> Environment:
        try:
            return await self.environments.resume(self.task, self.rollout.snapshots[snapshot_id])
        except _UNUSABLE as failure:
            _logger.warning("snapshot %s cannot be restored, going back before it: %s", snapshot_id, failure)
            lost = self.rollout.snapshots[snapshot_id]
            self.rollout.forget(snapshot_id)
            await give_up(self.environments, self.release([lost]))
            raise

    async def _begun(self) -> tuple[Environment, str]:
        environment = await self.environments.start(self.task)
        try:
            return environment, (await environment.reset(self.task)).text
        except BaseException:
            await environment.close()
            raise

    async def _generate(self) -> None:
        """Generate the open turn's action, or the rest of it where it was cut off."""
        rollout = self.rollout
        if rollout.open_turn is None:
            rollout.begin_turn()
        room = self._room()
        generation = await self._patience.for_engine(
            self.engine.generate(
                rollout.prompt_tokens + rollout.tokens,
                {**self.sampling_params, "max_new_tokens": room},
                aborted=self.aborted,
                routing_key=self.routing_key,
                again=self._is_again,
            )
        )
        self._is_again = False
        rollout.append_action(generation.tokens, generation.log_probs, generation.spans)
        self.sink.append_action(generation)
        if generation.finish == "abort":
            # Somebody else may abort the engine; then there is no batch to leave for, and the action goes on.
            if not self.aborted():
                await asyncio.sleep(ABORT_POLL_S)
                return
            await self._settle_snapshot()
            raise Cut
        # The engine may stop before it has made all that was asked for: its context is full.
        self._context_is_full = generation.finish == "length" and len(generation.tokens) < room
        if generation.finish == "stop" or not self._is_out_of_room():
            rollout.finish_action()

    async def _act(self, environment: Environment) -> None:
        """Execute the complete action; score where it ends the episode."""
        rollout = self.rollout
        turn = rollout.turns[-1]
        text = self.tokenizer.decode(rollout.tokens[turn.start : turn.action_end], skip_special_tokens=True)
        started = asyncio.get_running_loop().time()
        step, reward = await self._patience.for_environment(self._step(environment, self.rules.action(text)))
        seconds = asyncio.get_running_loop().time() - started
        if step.done:
            rollout.append_observation([], seconds=seconds)
            rollout.reward = reward
            rollout.status = Status.COMPLETED
            return
        self._observe(step.observation, seconds)
        self._snapshot_behind()

    async def _step(self, environment: Environment, action: str) -> tuple[Step, float | None]:
        # The last step and its score are one unit: cut off in between, both run again on resume.
        step = await environment.step(action)
        if not step.done:
            return step, None
        return step, step.reward if step.reward is not None else await environment.score()

    async def _score(self, environment: Environment, status: Status) -> None:
        self.rollout.reward = await self._patience.for_environment(environment.score())
        self.rollout.status = status

    def _observe(self, observation: str, seconds: float) -> None:
        text = self.rules.observation_template.format(observation=observation)
        tokens = self.tokenizer.encode(text, add_special_tokens=False)[: max(self._budget(), 0)]
        self.rollout.append_observation(tokens, seconds=seconds)
        self.sink.append_observation(tokens, text)

    def _is_out_of_room(self) -> bool:
        return self._budget() <= 0 or self._context_is_full

    def _budget(self) -> int:
        """Tokens that the whole response may still get."""
        return self.max_response_tokens - len(self.rollout.tokens)

    def _room(self) -> int:
        """Tokens that the open turn's action may still get, at least one."""
        if self.rules.max_tokens_per_turn is None:
            return self._budget()
        turn = self.rollout.turns[-1]
        return max(1, min(self._budget(), self.rules.max_tokens_per_turn - (turn.action_end - turn.start)))

    def _snapshot_behind(self) -> None:
        """Snapshot the environment while the engine generates the next action."""
        self._snapshotting = asyncio.create_task(self._snapshot())

    async def _snapshot(self) -> None:
        assert self._environment is not None
        snapshot = await self._environment.snapshot()
        self.rollout.enter(snapshot)

    async def _settle_snapshot(self) -> None:
        if self._snapshotting is not None:
            snapshotting, self._snapshotting = self._snapshotting, None
            loop = asyncio.get_running_loop()
            began = loop.time()
            try:
                await self._patience.for_environment(snapshotting)
            finally:
                self.rollout.snapshot_wait_s += loop.time() - began

    async def _rest(self) -> None:
        """Leave the environment, and the snapshot to go on from, where the rollout can find them again."""
        if not (self.may_go_on and self.keeps_environment):
            await self._give_up()
            return
        keep = getattr(self.environments, "keep", None)
        if self.goes_back and keep is not None:
            await asyncio.shield(released(keep(list(self.rollout.snapshots.values()))))
        rest = getattr(self._environment, "rest", None)
        if rest is not None:
            self._environment = None
            await asyncio.shield(released(rest()))

    async def _give_up(self) -> None:
        """Tell the environments that nobody will resume from this rollout's snapshots."""
        await self._close()
        await give_up(self.environments, self.release(self.rollout.snapshots.values()))

    async def _close(self) -> None:
        if self._snapshotting is not None:
            await over(self._snapshotting)
            self._snapshotting = None
        if self._environment is not None:
            environment, self._environment = self._environment, None
            await released(environment.close())
