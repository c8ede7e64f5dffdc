"""A server that another process started and keeps: a job pushes its weights to it, and leaves it running."""

import socket
from http.client import HTTPException
from pathlib import Path

from midstream.local.engine.control import EngineControl, ServerError
from midstream.local.engine.flags import EngineAddress

_PROBE_TIMEOUT_S = 1.0


class AttachedServer:
    """What a run asks of an `EngineServer`, of one that is not its own: it cannot be started again from here."""

    def __init__(self, address: EngineAddress, log_path: Path) -> None:
        """`log_path` is named in messages."""
        self.log_path = log_path
        self._address = address
        self._control = EngineControl(address)

    @property
    def host(self) -> str:
        return self._address.host

    @property
    def port(self) -> int:
        return self._address.port

    def alive(self) -> bool:
        """Whether something listens there; a server that is busy does."""
        try:
            socket.create_connection((self.host, self.port), _PROBE_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    def push_weights(self, path: Path, version: int) -> None:
        """As of `EngineServer`."""
        try:
            self._control.push_weights(path, version)
        except (OSError, HTTPException) as fault:
            raise ServerError(f"{self._address.url}: {type(fault).__name__}: {fault}") from fault

    def restart(self, model_path: Path, weight_version: int) -> None:
        """Raises ServerError: who started the server has to start it again, and then resume the run."""
        raise ServerError(
            f"the server at {self._address.url}, which another process keeps, has died: start it again, and resume "
            f"the run; its log: {self.log_path}"
        )
