"""One rollout step of the local job, in slime's order and with slime's hooks.

data source, generate, reward, dynamic filter, abort, all-samples process; what was cut off goes back to
the data source where the job asks for partial rollout.
"""

import asyncio
import inspect
import logging
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from midstream.hooks.slime.host import load_function
from midstream.local.sample import Sample

_logger = logging.getLogger(__name__)

Group = list[Sample]
# A filter that has dropped so many batches in one step will never let one pass.
_DROPPED_BATCHES = 20
_DONE = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED)


@dataclass(frozen=True)
class DynamicFilterOutput:
    """A filter's verdict on a group."""

    keep: bool
    reason: str | None = None


@dataclass
class GenerateState:
    """What the running step shares with the hooks; ``aborted`` says that the batch is complete."""

    tokenizer: Any
    concurrency: asyncio.Semaphore
    aborted: bool = False


@dataclass
class RolloutBatch:
    """What a step made: the groups to train on, and the groups that nobody will train on."""

    samples: list[Group]
    dropped: list[Group] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)


async def generate_rollout(args: Namespace, rollout_id: int, data_source: Any) -> RolloutBatch:
    """Complete ``args.rollout_batch_size`` groups; what else was launched is cut off.

    Unfinished groups go to ``data_source.add_samples`` with ``args.partial_rollout``, and are dropped
    without. As in slime, groups that finished when the batch was full already are dropped either way.
    """
    state: GenerateState = args.generate_state
    state.aborted = False
    keep = _dynamic_filter(args)
    pending: set[asyncio.Task[Group]] = set()
    batch: list[Group] = []
    finished: list[Group] = []
    dropped: list[Group] = []
    reasons: Counter[str] = Counter()
    try:
        while len(batch) < args.rollout_batch_size:
            while len(batch) + len(pending) < args.rollout_batch_size:
                groups = data_source.get_samples(args.over_sampling_batch_size)
                pending |= {asyncio.create_task(_generate_group(args, group)) for group in groups}
            if len(dropped) > _DROPPED_BATCHES * args.rollout_batch_size:
                raise RuntimeError(
                    f"{len(dropped)} groups were dropped and {len(batch)} kept in one step ({dict(reasons)}): "
                    "with these tasks and this filter no batch will be full"
                )
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for group in [task.result() for task in done]:
                finished.append(group)
                verdict = keep(group)
                if not verdict.keep:
                    dropped.append(group)
                    reasons[f"rollout/dynamic_filter/drop_{verdict.reason}"] += 1
                elif len(batch) < args.rollout_batch_size:
                    batch.append(group)
                else:
                    dropped.append(group)
        leftovers = await _abort(args, rollout_id, pending)
    except BaseException:
        await _cancel(pending)
        raise
    finally:
        state.aborted = False
    if args.rollout_all_samples_process_path is not None:
        load_function(args.rollout_all_samples_process_path)(args, finished, data_source.get_samples)
    batch.sort(key=_index)
    if args.partial_rollout and leftovers:
        data_source.add_samples(leftovers)
        return RolloutBatch(batch, dropped, dict(reasons))
    return RolloutBatch(batch, dropped + leftovers, dict(reasons))


async def _generate_group(args: Namespace, group: Group) -> Group:
    members = [asyncio.create_task(_generate_and_reward(args, sample)) for sample in group]
    try:
        return list(await asyncio.gather(*members))
    except BaseException:
        await _cancel(members)
        raise


async def _generate_and_reward(args: Namespace, sample: Sample) -> Sample:
    if sample.status in _DONE:
        return sample
    state: GenerateState = args.generate_state
    async with state.concurrency:
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        generate = load_function(args.custom_generate_function_path)
        sample = await generate(args, sample, sampling_params(args))
    if sample.status in _DONE:
        sample.reward = await reward_of(args, sample)
    return sample


async def reward_of(args: Namespace, sample: Sample) -> float:
    """The reward that the environment gave, else that of ``args.custom_rm_path``.

    Raises:
        ValueError: there is neither.
    """
    if sample.reward is not None:
        return sample.reward
    if args.custom_rm_path is None:
        raise ValueError(
            "the environment gave no reward (no eval_cmd?) and rollout.custom_rm_path is not set: "
            "set one of them"
        )
    reward = load_function(args.custom_rm_path)(args, sample)
    return float(await reward if inspect.isawaitable(reward) else reward)


def sampling_params(args: Namespace) -> dict[str, Any]:
    """What slime passes to a generate function."""
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def _dynamic_filter(args: Namespace) -> Callable[[Group], DynamicFilterOutput]:
    if args.dynamic_sampling_filter_path is None:
        return lambda group: DynamicFilterOutput(keep=True)
    chosen = load_function(args.dynamic_sampling_filter_path)

    def keep(group: Group) -> DynamicFilterOutput:
        verdict = chosen(args, group)
        return verdict if isinstance(verdict, DynamicFilterOutput) else DynamicFilterOutput(bool(verdict))

    return keep


async def _abort(args: Namespace, rollout_id: int, pending: set[asyncio.Task[Group]]) -> list[Group]:
    """Cut off what still runs and return its groups, each rollout as far as it came."""
    if not pending:
        return []
    args.generate_state.aborted = True
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/abort_request"
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json={"abort_all": True}) as response,
        ):
            response.raise_for_status()
    except (aiohttp.ClientError, OSError) as error:
        # Calls to a dead server end by themselves, and the job restarts it.
        _logger.warning("could not abort at %s: %s", url, error)
    groups: list[Group] = list(await asyncio.gather(*pending))
    for sample in (sample for group in groups for sample in group):
        if sample.response:
            sample.metadata.setdefault("start_rollout_id", rollout_id)
    return groups


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _index(group: Group) -> int:
    return group[0].index or 0
