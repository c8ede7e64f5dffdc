"""What an SGLang server answers, in our words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from midstream.buffers.rollout import Span


@dataclass(frozen=True)
class Generation:
    """What one call of the engine made.

    ``tokens`` and ``log_probs`` have one entry per new token; ``spans`` tile them by policy version,
    relative to the first. ``finish`` is ``abort`` where the engine or the caller cut the call off.
    """

    tokens: list[int]
    log_probs: list[float]
    text: str
    finish: Literal["stop", "length", "abort"]
    spans: tuple[Span, ...]
    meta_info: dict[str, Any]


ABORTED_BEFORE_DISPATCH = Generation([], [], "", "abort", (), {})


def policy_version(weight_version: Any) -> int:
    """Turn SGLang's ``weight_version`` into an integer; a server that was never updated is version 0."""
    text = str(weight_version)
    return int(text) if text.isdecimal() else 0


def read_generation(answer: Mapping[str, Any], dispatch_version: int | None) -> Generation:
    """Translate a ``/generate`` answer.

    An aborted request that was still queued comes back without tokens and without several keys. The
    policy version of each token is the engine's own record (``weight_versions``, SGLang >= 0.5.2x).
    Older engines give only the version at completion: tokens keep the version at dispatch, where it is
    known, since a version that came later did not make the first of them.
    """
    meta_info = dict(answer.get("meta_info") or {})
    pairs = meta_info.get("output_token_logprobs") or []
    if not pairs and answer.get("output_ids"):
        raise ValueError("tokens without output_token_logprobs")
    log_probs = [float(pair[0]) for pair in pairs]
    tokens = [int(pair[1]) for pair in pairs]
    reason = (meta_info.get("finish_reason") or {}).get("type", "abort")
    return Generation(
        tokens=tokens,
        log_probs=log_probs,
        text=str(answer.get("text") or ""),
        finish=reason if reason in ("stop", "length") else "abort",
        spans=_spans(meta_info, len(tokens), dispatch_version),
        meta_info=meta_info,
    )


def read_log_probs(answer: Mapping[str, Any], tokens: Sequence[int]) -> list[float] | None:
    """The log-probs of the last ``tokens`` of a request's input, from its answer; None where it was aborted."""
    meta_info = dict(answer.get("meta_info") or {})
    pairs = (meta_info.get("input_token_logprobs") or [])[-len(tokens) :] if tokens else []
    if not pairs and (meta_info.get("finish_reason") or {}).get("type", "abort") == "abort":
        return None
    if [int(pair[1]) for pair in pairs] != list(tokens):
        raise ValueError(f"input_token_logprobs of {len(pairs)} tokens where {len(tokens)} were asked for")
    return [float(pair[0]) for pair in pairs]


def _spans(meta_info: Mapping[str, Any], length: int, dispatch_version: int | None) -> tuple[Span, ...]:
    if length == 0:
        return ()
    if dispatch_version is None:
        dispatch_version = policy_version(meta_info.get("weight_version"))
    spans: list[Span] = []
    position = 0
    for entry in meta_info.get("weight_versions") or ():
        end = min(int(entry["end"]), length)
        if end > position:
            spans.append(Span(policy_version(entry["version"]), position, end))
            position = end
    if position < length:
        # The record stops short of the tokens: what follows was made under its last version.
        spans.append(Span(spans[-1].version if spans else dispatch_version, position, length))
    return tuple(spans)
