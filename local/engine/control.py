"""What a job asks of a running server beside tokens: whether it serves, and other weights."""

import json
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from midstream.local.engine.flags import EngineAddress

_PROBE_TIMEOUT_S = 5.0
_PUSH_TIMEOUT_S = 120.0
"""A push waits for the requests in flight; where they were aborted it takes hundredths of a second."""


class ServerError(RuntimeError):
    """The server cannot be started, has died, or refused a request; the message says which and what to do."""


class EngineControl:
    """Calls of a server's control routes. A broken connection raises OSError or HTTPException."""

    def __init__(self, address: EngineAddress) -> None:
        self._address = address

    def serves(self) -> bool:
        """Whether it answers that it is healthy; False where nothing listens."""
        try:
            status, _ = self._request("GET", "/health", timeout_s=_PROBE_TIMEOUT_S)
        except (OSError, HTTPException):
            return False
        return status == 200

    def push_weights(self, path: Path, version: int) -> None:
        """Have it serve the checkpoint at `path` as policy version `version`. Raises ServerError."""
        self._ask(
            "POST",
            "/update_weights_from_disk",
            {"model_path": str(path), "weight_version": str(version), "flush_cache": True},
        )
        self.check_version(version)

    def flush(self) -> None:
        """Empty the KV cache. Raises ServerError while requests are running."""
        self._ask("POST", "/flush_cache", {})

    def check_version(self, expected: int) -> None:
        """Raise ServerError unless it serves policy version `expected`."""
        info = json.loads(self._ask("GET", "/model_info"))
        if info["weight_version"] != str(expected):
            raise ServerError(
                f"{self._address.url} serves policy version {info['weight_version']} instead of {expected}; "
                "does something else use this server or its port?"
            )

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        status, answer = self._request(method, path, body, timeout_s=_PUSH_TIMEOUT_S)
        if status != 200:
            said = answer.decode(errors="replace")
            raise ServerError(f"{method} {self._address.url}{path} answered {status}: {said}")
        return answer

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float
    ) -> tuple[int, bytes]:
        connection = HTTPConnection(self._address.host, self._address.port, timeout=timeout_s)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()
