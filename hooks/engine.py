"""The client of the generator: one SGLang server or router that speaks ``/generate``."""

import asyncio
import json
import logging
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import aiohttp

from midstream.hooks.answers import (
    ABORTED_BEFORE_DISPATCH,
    Generation,
    policy_version,
    read_generation,
    read_log_probs,
)

_RETRY_FIRST_S = 0.25
_RETRY_LONGEST_S = 1.0  # no longer, so that an abort is noticed in a wait
# The answers with which a proxy or an engine that starts, stops or is paused says "not now".
_RETRIED_STATUSES = frozenset({429, 500, 502, 503, 504})
_ASK_S = 5.0  # for an engine to say its version
_ERROR_BODY_CHARACTERS = 500

Answer = TypeVar("Answer")

_logger = logging.getLogger(__name__)


class EngineUnavailable(Exception):
    """The engine did not answer for longer than a job is willing to wait."""


class EngineRejected(Exception):
    """The engine refuses the request; asking again would not help."""


@dataclass
class EngineCounters:
    """What an engine client has done since it was made.

    ``reprefilled_tokens`` went through the engine before and had to go through it again, because a rollout went on
    after a cut or began anew, or to compare its tokens with the weights of the day; what the engine had in its
    cache does not count.
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

    After a restart of the job an engine may count its versions anew: see ``go_on_after``.
    """

    url: str
    retry_s: float = 120.0
    request_timeout_s: float = 600.0
    version: int | None = None
    counters: EngineCounters = field(default_factory=EngineCounters)
    _before: int | None = field(default=None, repr=False)
    _offset: int = field(default=0, repr=False)
    _session: aiohttp.ClientSession | None = field(default=None, repr=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False)

    def go_on_after(self, version: int) -> None:
        """Have versions follow ``version``, the newest that an earlier process of this job has recorded.

        An engine whose first answer is of a newer version counts on by itself. One that counts anew is now
        at the version after that one, since the host has loaded weights that were trained since.
        """
        self._before, self.version = version, version + 1

    def ask_version(self) -> None:
        """Learn the version that the engine serves now, from outside of a loop.

        Blocks for as long as one token of prefill takes, at most for ``_ASK_S``. An engine that does not answer
        changes nothing.
        """
        body = json.dumps({"input_ids": [0], "sampling_params": {"max_new_tokens": 0}}).encode()
        request = urllib.request.Request(f"{self.url}/generate", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_ASK_S) as answer:
                found = json.load(answer)["meta_info"]["weight_version"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            _logger.info("the engine at %s did not say its version: %s", self.url, error)
            return
        self.version = self._counted_on(found)

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
        generation = await self._answer(payload, self._read, aborted, routing_key)
        if generation is None:
            return ABORTED_BEFORE_DISPATCH
        self._count(generation, again)
        return generation

    async def log_probs(
        self,
        tokens: Sequence[int],
        start: int,
        *,
        aborted: Callable[[], bool] = lambda: False,
        routing_key: str | None = None,
    ) -> list[float] | None:
        """Log-prob of each of ``tokens[start:]`` given those before it, under the weights of the day.

        At temperature 1, whatever the tokens were sampled at. ``start`` is 1 or more: before the first token
        is nothing. None where the request was aborted, by the caller or by somebody else.

        Raises:
            EngineUnavailable, EngineRejected: as ``generate`` does.
        """
        payload = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            # The engine says nothing about the first token from here on.
            "logprob_start_len": start - 1,
        }
        wanted = list(tokens[start:])

        def read(answer: Mapping[str, Any], _: int | None) -> list[float] | None:
            found = read_log_probs(answer, wanted)
            self._count_prompt(answer.get("meta_info") or {}, again=True)
            return found

        return await self._answer(payload, read, aborted, routing_key)

    async def _answer(
        self,
        payload: dict[str, Any],
        read: Callable[[Mapping[str, Any], int | None], Answer],
        aborted: Callable[[], bool],
        routing_key: str | None,
    ) -> Answer | None:
        """What ``read`` makes of the engine's answer and the version at dispatch; None once ``aborted``."""
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
                return read(answer, dispatch_version)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise EngineRejected(
                    f"{self.url}/generate answered what no SGLang answers ({type(error).__name__}: {error}); "
                    "is something else listening there?"
                ) from error
        return None

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

    def _counted_on(self, answered: Any) -> int:
        """The version of an answer, as versions are counted over restarts of the job."""
        version = policy_version(answered)
        if self._before is not None:
            self._offset = self._before + 1 - version if version <= self._before else 0
            self._before = None
        return version + self._offset

    def _read(self, answer: Mapping[str, Any], dispatch_version: int | None) -> Generation:
        """The answer, with versions as they are counted over restarts of the job."""
        answered = (answer.get("meta_info") or {}).get("weight_version")
        if answered is not None:
            self._counted_on(answered)
        known = None if dispatch_version is None else dispatch_version - self._offset
        generation = read_generation(answer, known)
        if not self._offset:
            return generation
        spans = (replace(span, version=span.version + self._offset) for span in generation.spans)
        return replace(generation, spans=tuple(spans))

    def _count_prompt(self, meta_info: Mapping[str, Any], *, again: bool) -> None:
        prompt_tokens = meta_info.get("prompt_tokens", 0)
        self.counters.prompt_tokens += prompt_tokens
        if again:
            self.counters.reprefilled_tokens += prompt_tokens - meta_info.get("cached_tokens", 0)

    def _count(self, generation: Generation, again: bool) -> None:
        self.counters.generated_tokens += len(generation.tokens)
        self._count_prompt(generation.meta_info, again=again)
        if generation.spans:
            answered = generation.meta_info.get("weight_version")
            self.version = generation.spans[-1].version if answered is None else self._counted_on(answered)


def _excerpt(body: bytes) -> str:
    return body[:_ERROR_BODY_CHARACTERS].decode(errors="replace")
