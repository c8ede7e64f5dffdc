"""``--custom-generate-function-path midstream.hooks.slime.generate.generate``"""

import functools
import re
from argparse import Namespace
from contextlib import nullcontext
from typing import Any

from midstream.buffers.policies.base import CutOff
from midstream.buffers.rollout import Status
from midstream.conf.schema import LayerConfig
from midstream.hooks.release import give_up
from midstream.hooks.rules import TurnRules
from midstream.hooks.slime.host import host_of
from midstream.hooks.slime.ratio import measurements_of
from midstream.hooks.slime.sample import (
    SampleSink,
    begin_rollout,
    no_reward,
    recorded_rollout,
    routing_key,
    store,
    task_of,
)
from midstream.hooks.slime.settings import (
    abandoned_of,
    engine_of,
    environments_of,
    holds_of,
    layer_of,
    policy_of,
    steering_of,
    tally_of,
)
from midstream.hooks.slime.siblings import beside_siblings
from midstream.hooks.turns import Play


async def generate(
    args: Namespace, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    """Play one rollout in its environment, from where it stands, until it ends or the host aborts.

    ``sampling_params["max_new_tokens"]`` is the budget of the whole response, over all resumes.
    Returns ``sample`` itself: COMPLETED or TRUNCATED with a reward where the environment gives one,
    ABORTED where the host cut it off, FAILED (and out of the loss) where the environment failed, the
    deadline passed or its group was given up.
    """
    layer = layer_of(args)
    policy = policy_of(args)
    await give_up_abandoned(args)
    if not evaluation:
        await measurements_of(args).settle(sample)
    state = host_of(sample).generate_state(args)
    task = task_of(sample)
    rollout = recorded_rollout(sample) or begin_rollout(sample, task, state.tokenizer)
    if rollout.status.finished or rollout.failure is not None:
        # A host may ask again for what has FAILED, when it waited for the rest of its group, and may have called it
        # aborted meanwhile.
        if not rollout.status.finished:
            rollout.status = Status.FAILED
            store(sample, rollout, no_reward(args))
        return sample
    play = Play(
        rollout=rollout,
        task=task,
        engine=engine_of(args),
        environments=environments_of(args),
        tokenizer=state.tokenizer,
        sampling_params=sampling_params,
        max_response_tokens=_budget(args, sampling_params, len(rollout.prompt_tokens), evaluation),
        rules=_rules(layer),
        sink=SampleSink(args, sample, state.tokenizer),
        # An evaluation is not part of the batch that a host completes by aborting.
        aborted=(lambda: False) if evaluation else (lambda: state.aborted),
        routing_key=routing_key(args, sample),
        keeps_environment=policy.keeps_environment,
        may_go_on=policy.cut_off in (CutOff.KEPT, CutOff.NOTHING),
        goes_back=policy.goes_back,
        deadline_s=steering_of(args).layer().bounds.deadline_s,
        release=holds_of(args).release,
    )
    try:
        with nullcontext() if evaluation else beside_siblings(args, sample, play):
            await play.run()
    finally:
        # The sample has the tokens already; without its record nobody could go on from them.
        store(sample, rollout, no_reward(args))
    tally_of(args).stuck += rollout.failure == "deadline"
    return sample


async def give_up_abandoned(args: Namespace) -> None:
    """Tell the environments of snapshots that nobody resumes from; a host that ends does so a last time."""
    # One by one: a host may call its data source from another thread.
    abandoned, snapshots = abandoned_of(args), []
    while abandoned:
        snapshots.append(abandoned.pop())
    await give_up(environments_of(args), snapshots)


@functools.cache
def _pattern(pattern: str | None) -> re.Pattern[str] | None:
    return None if pattern is None else re.compile(pattern, re.DOTALL)


def _rules(layer: LayerConfig) -> TurnRules:
    return TurnRules(
        max_turns=layer.turns.max_turns,
        max_tokens_per_turn=layer.turns.max_tokens_per_turn,
        observation_template=layer.turns.observation_template,
        action_pattern=_pattern(layer.turns.action_pattern),
        abort_grace_s=layer.turns.abort_grace_s,
        max_attempts=layer.max_attempts,
    )


def _budget(args: Namespace, sampling_params: dict[str, Any], prompt_tokens: int, evaluation: bool) -> int:
    budget = int(sampling_params["max_new_tokens"])
    context = getattr(args, "eval_max_context_len" if evaluation else "rollout_max_context_len", None)
    return budget if context is None else min(budget, int(context) - prompt_tokens)
