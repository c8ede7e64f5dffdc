"""The client of the generator: one SGLang server or router that speaks ``/generate``."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from midstream.buffers.rollout import Span

_RETRY_FIRST_S = 0.25
_RETRY_LONGEST_S = 1.0  # no longer, so that an abort is noticed in a wait
# The answers with which a proxy or an engine that starts, stops or is paused says "not now".
_RETRIED_STATUSES = frozenset({429, 500, 502, 503, 504})
_ERROR_BODY_CHARACTERS = 500


class EngineUnavailable(Exception):
    """The engine did not answer for longer than a job is willing to wait."""


class EngineRejected(Exception):
    """The engine refuses the request; asking again would not help."""


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


@dataclass
class EngineCounters:
    """What an engine client has done since it was made.

    ``reprefilled_tokens`` went through the engine before and had to go through it again, because a rollout went on
    after a cut or began anew; what the engine had in its cache does not count.
    """

    requests: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    reprefilled_tokens: int = 0
    retries: int = 0
    in_flight: int = 0


@dataclass
class Engine:
    """Generates tokens over HTTP and survives a restart of the server.

    A call that finds no server is repeated until one answers, for at most ``retry_s``; the caller
    loses nothing but time. ``version`` is the policy version that answered last, None before the first
    answer. Safe to use from several event loops in turn: a session belongs to the loop that opened it.
    """

    url: str
    retry_s: float = 120.0
    request_timeout_s: float = 600.0
    version: int | None = None
    counters: EngineCounters = field(default_factory=EngineCounters)
    _session: aiohttp.ClientSession | None = field(default=None, repr=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False)

    async def generate(
        self,
        input_tokens: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        aborted: Callable[[], bool] = lambda: False,
        routing_key: str | None = None,
        again: bool = False,
    ) -> Generation:
        """Continue ``input_tokens``.

        ``aborted`` is asked before each attempt; once it is true nothing more is dispatched.
        ``routing_key`` keeps the calls of one rollout on one worker behind a consistent-hashing router.
        ``again`` says that an engine has had ``input_tokens`` before.

        Raises:
            EngineUnavailable: the engine has failed to answer for ``retry_s``. How long a generation took
                before that does not count.
            EngineRejected: the engine refuses the request (a 4xx answer), or its answer makes no sense.
        """
        payload = {
            "input_ids": list(input_tokens),
            "sampling_params": dict(sampling_params),
            "return_logprob": True,
        }
        headers = {"X-SMG-Routing-Key": routing_key} if routing_key else None
        loop = asyncio.get_running_loop()
        give_up_at: float | None = None
        pause_s = _RETRY_FIRST_S
        while not aborted():
            dispatch_version = self.version
            try:
                answer = await self._post(payload, headers)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                give_up_at = give_up_at or loop.time() + self.retry_s
                if loop.time() + pause_s > give_up_at:
                    raise EngineUnavailable(
                        f"no answer from the engine at {self.url} within {self.retry_s:g} s "
                        f"({type(error).__name__}: {error}); is the server up? "
                        "midstream.engine.retry_s says how long a job waits for it"
                    ) from error
                self.counters.retries += 1
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _RETRY_LONGEST_S)
                continue
            try:
                generation = read_generation(answer, dispatch_version)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise EngineRejected(
                    f"{self.url}/generate answered what no SGLang answers ({type(error).__name__}: {error}); "
                    "is something else listening there?"
                ) from error
            self._count(generation, again)
            return generation
        return ABORTED_BEFORE_DISPATCH

    async def close(self) -> None:
        """Close the connections of this loop's session."""
        if self._session is not None and self._loop is asyncio.get_running_loop():
            await self._session.close()
        self._session = None

    async def _post(self, payload: dict[str, Any], headers: dict[str, str] | None) -> dict[str, Any]:
        self.counters.requests += 1
        self.counters.in_flight += 1
        try:
            async with self._open_session().post(
                f"{self.url}/generate", json=payload, headers=headers
            ) as response:
                body = await response.read()
                if response.status in _RETRIED_STATUSES:
                    raise aiohttp.ClientResponseError(
                        response.request_info, (), status=response.status, message=_excerpt(body)
                    )
                if response.status != 200:
                    raise EngineRejected(f"{self.url}/generate answered {response.status}: {_excerpt(body)}")
        finally:
            self.counters.in_flight -= 1
        try:
            answer: dict[str, Any] = json.loads(body)
        except ValueError as error:
            raise aiohttp.ClientPayloadError(f"not JSON: {_excerpt(body)}") from error
        return answer

    def _open_session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            # The host bounds how many rollouts run at once; a second bound here would only hide it.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=self.request_timeout_s),
            )
            self._loop = loop
        return self._session

    def _count(self, generation: Generation, again: bool) -> None:
        self.counters.generated_tokens += len(generation.tokens)
        prompt_tokens = generation.meta_info.get("prompt_tokens", 0)
        self.counters.prompt_tokens += prompt_tokens
        if again:
            self.counters.reprefilled_tokens += prompt_tokens - generation.meta_info.get("cached_tokens", 0)
        if generation.spans:
            self.version = policy_version(
                generation.meta_info.get("weight_version", generation.spans[-1].version)
            )


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


def _excerpt(body: bytes) -> str:
    return body[:_ERROR_BODY_CHARACTERS].decode(errors="replace")
