"""Between a host's ``Sample`` and our record of the rollout.

Tokens, log-probs and masks live in the sample's own fields, where the host needs them; the rest of the
record lies in ``sample.metadata["midstream"]``. Both survive the host's buffer, pickling and dumps.
"""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from midstream.buffers.rollout import COLUMNS, PartialRollout, RecordError, Status
from midstream.envs.protocol import Task
from midstream.hooks.answers import Generation
from midstream.hooks.rules import Tokenizer

RECORD_KEY = "midstream"
# Fields of the record that the sample holds under its own names.
_IN_SAMPLE = (*COLUMNS, "status", "reward")

# A host's group: samples of one prompt, or lists of samples where a rollout was split into several.
Group = list[Any]


def task_of(sample: Any) -> Task:
    """The task that a sample asks for, without the record that midstream keeps in its metadata."""
    metadata = {key: value for key, value in sample.metadata.items() if key != RECORD_KEY}
    metadata.pop("start_rollout_id", None)
    return Task(prompt=_prompt_text(sample.prompt), label=sample.label, metadata=metadata)


def samples_of(group: Group) -> Iterator[Any]:
    """The samples of a group, those of a rollout that was split into several included."""
    for member in group:
        if isinstance(member, list):
            yield from samples_of(member)
        else:
            yield member


def recorded_rollout(sample: Any, *, shared: bool = False) -> PartialRollout | None:
    """Return the rollout that ``sample`` carries a record of, None where there is none.

    Where it is ``shared``, its log-probs and mask are the sample's own lists, which spares copies of what may be
    long: nothing may be appended to it.

    Raises:
        RecordError: the sample disagrees with its record.
    """
    record = (sample.metadata or {}).get(RECORD_KEY)
    if record is None:
        return None
    split = len(sample.tokens) - sample.response_length
    log_probs = sample.rollout_log_probs or []
    loss_mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    return PartialRollout.from_json(
        {
            **record,
            "prompt_tokens": sample.tokens[:split],
            "tokens": sample.tokens[split:],
            "log_probs": log_probs if shared else list(log_probs),
            "loss_mask": loss_mask if shared else list(loss_mask),
            "status": sample.status.value,
            "reward": sample.reward,
        }
    )


def was_stopped(sample: Any) -> bool:
    """Whether ``sample`` ended because its group was given up; opens no record."""
    return ((sample.metadata or {}).get(RECORD_KEY) or {}).get("failure") == "stopped"


def begin_rollout(sample: Any, task: Task, tokenizer: Tokenizer) -> PartialRollout:
    """Return a rollout at its start, and put the prompt's tokens where the host expects them.

    Raises:
        RecordError: the sample has response tokens already, which no record explains.
    """
    if sample.response_length:
        raise RecordError(
            f"sample {sample.index} has {sample.response_length} response tokens but no midstream record: all "
            "generation of a job must go through midstream's generate, or none"
        )
    if not sample.tokens:
        sample.tokens = tokenizer.encode(task.prompt, add_special_tokens=False)
    return PartialRollout(task.key, str(sample.group_index), prompt_tokens=list(sample.tokens))


def no_reward(args: Namespace) -> Any:
    """What a host that asks every sample for a number finds in one that has none: 0, under each name it asks by."""
    names = [getattr(args, name, None) for name in ("reward_key", "eval_reward_key")]
    return {name: 0.0 for name in names if name} or 0.0


def store(sample: Any, rollout: PartialRollout, nothing: Any = 0.0) -> None:
    """Write the record, status and reward of ``rollout`` into ``sample``; its tokens are there already.

    A rollout that failed for reasons of infrastructure is taken out of the loss; it carries ``nothing``, as
    ``no_reward`` makes it, where its record does not have that already.
    """
    rollout.check()
    if sample.tokens != rollout.prompt_tokens + rollout.tokens:
        raise RecordError(f"sample {sample.index}: its tokens differ from the record's")
    sample.metadata[RECORD_KEY] = rollout.to_json(without=_IN_SAMPLE)
    sample.reward = rollout.reward
    if rollout.status is Status.FAILED:
        sample.remove_sample = True
        sample.reward = nothing if rollout.reward is None else rollout.reward
        # Hosts decide by the first sample whether a batch has log-probs; one without a token has none yet.
        sample.rollout_log_probs = sample.rollout_log_probs or []
        sample.loss_mask = sample.loss_mask or []
    # Last: to other threads, whoever has ended is whole.
    sample.status = type(sample).Status(rollout.status.value)


def rewrite(sample: Any, rollout: PartialRollout, response: str, source: Any = None) -> None:
    """Make the sample's arrays those of a rollout that has lost tokens at its end.

    ``source`` is the sample whose first tokens the rollout has, where that is another one.
    """
    source = sample if source is None else source
    length = len(rollout.tokens)
    sample.tokens = rollout.prompt_tokens + rollout.tokens
    sample.response = response
    sample.response_length = length
    sample.loss_mask = list(rollout.loss_mask) if length else None
    sample.rollout_log_probs = list(rollout.log_probs) if length else None
    if getattr(source, "rollout_top_p_token_offsets", None) is not None:
        offsets = source.rollout_top_p_token_offsets[: length + 1]
        sample.rollout_top_p_token_ids = (
            source.rollout_top_p_token_ids[: int(offsets[-1])] if length else None
        )
        sample.rollout_top_p_token_offsets = offsets if length else None
    if source.rollout_routed_experts is not None:
        sample.rollout_routed_experts = (
            source.rollout_routed_experts[: len(sample.tokens) - 1] if length else None
        )
    sample.weight_versions = list(source.weight_versions) if length else []


class SampleSink:
    """Appends tokens to a host's sample the way that host does it."""

    def __init__(self, args: Namespace, sample: Any, tokenizer: Tokenizer) -> None:
        self._args = args
        self._sample = sample
        self._tokenizer = tokenizer

    def append_action(self, generation: Generation) -> None:
        """Append model tokens with what the engine said about them."""
        # A request that was aborted in the queue has no completion to account for.
        meta_info = generation.meta_info if "finish_reason" in generation.meta_info else None
        if hasattr(self._sample, "append_response_tokens"):
            self._sample.append_response_tokens(
                self._args,
                tokens=generation.tokens,
                log_probs=generation.log_probs,
                trainable=True,
                meta_info=meta_info,
                text=generation.text,
            )
            return
        self._extend(generation.tokens, generation.log_probs, generation.text, mask=1)
        if meta_info is not None:
            self._sample.update_from_meta_info(self._args, meta_info)

    def append_observation(self, tokens: list[int], text: str) -> None:
        """Append environment tokens, which no loss may touch."""
        if hasattr(self._sample, "append_response_tokens"):
            self._sample.append_response_tokens(self._args, tokens=tokens, trainable=False, text=text)
        else:
            self._extend(tokens, [0.0] * len(tokens), text, mask=0)

    def rewrite(self, rollout: PartialRollout) -> None:
        """Cut the sample back to ``rollout``."""
        rewrite(self._sample, rollout, self._tokenizer.decode(rollout.tokens, skip_special_tokens=False))

    def _extend(self, tokens: list[int], log_probs: list[float], text: str, *, mask: int) -> None:
        sample = self._sample
        sample.loss_mask = (sample.loss_mask or []) + [mask] * len(tokens)
        sample.rollout_log_probs = (sample.rollout_log_probs or []) + log_probs
        sample.tokens = sample.tokens + tokens
        sample.response_length += len(tokens)
        sample.response += text


def routing_key(args: Namespace, sample: Any) -> str | None:
    """What keeps the calls of this sample on one worker, where the router hashes."""
    policy = getattr(args, "router_policy", None) or getattr(args, "sglang_router_policy", None)
    return sample.session_id if policy == "consistent_hashing" else None


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    raise TypeError(
        f"the prompt is a {type(prompt).__name__}; midstream needs text: pass --apply-chat-template, "
        "or plain prompts"
    )
