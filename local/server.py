"""The generator of a local job: one SGLang server on this machine."""

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

import torch

from midstream.conf.schema import ServerConfig
from midstream.local.engine.control import EngineControl, ServerError
from midstream.local.engine.flags import EngineAddress, engine_environment, engine_flags
from midstream.local.engine.process import EngineProcess, make_temporary_dir

HOST = "127.0.0.1"

_HEALTH_PERIOD_S = 0.2
_DEATH_NOTICE_S = 5.0
"""The whole server ends within a second of the death of one of its processes (see `engine.lifeline`)."""

_PORT_LOST = "address already in use"
"""What the server logs where it cannot listen."""

_SHOWN_LOG_LINES = 25
_READ_LOG_BYTES = 16384


class EngineServer:
    """Starts, watches, restarts and stops one SGLang server; it dies with this process, even on SIGKILL.

    >>> with EngineServer(config, model_path=checkpoint, log_path=run_dir / "server.log") as server:
    ...     server.launch(weight_version=0)
    ...     trainer = build_trainer()   # meanwhile the server boots
    ...     server.wait_healthy()

    Calls block and are not thread-safe, except `alive`, which may be called from anywhere.
    """

    def __init__(
        self, config: ServerConfig, *, model_path: Path, log_path: Path, random_seed: int = 0
    ) -> None:
        """`model_path`: a checkpoint in Hugging Face layout. `random_seed`: of the server's sampling."""
        self.log_path = log_path
        self._config = config
        self._model_path = model_path
        self._random_seed = random_seed
        self._address: EngineAddress | None = None
        self._process: EngineProcess | None = None
        self._weight_version = 0
        self._launched_at = 0.0
        self._log_offset = 0

    def __enter__(self) -> "EngineServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def host(self) -> str:
        return HOST

    @property
    def port(self) -> int:
        """Known from the first launch on; the same after every restart."""
        return self._known_address().port

    @property
    def url(self) -> str:
        return self._known_address().url

    @property
    def pid(self) -> int | None:
        """Of the launcher, which leads the session that all of the server's processes are in."""
        return self._process.pid if self._process else None

    def start(self, weight_version: int, on_wait: Callable[[float], None] | None = None) -> None:
        """`launch` and `wait_healthy`."""
        self.launch(weight_version)
        self.wait_healthy(on_wait)

    def launch(self, weight_version: int) -> None:
        """Start the server's processes and return at once; it will serve policy version `weight_version`.

        Raises ServerError where SGLang or the checkpoint is missing, the port is in use, or this server runs.
        """
        if self.alive():
            raise ServerError(f"the server already runs at {self.url}; stop() it first or call restart()")
        if find_spec("sglang") is None:
            raise ServerError("SGLang is not installed in this environment; `make setup` installs it")
        if not (self._model_path / "config.json").is_file():
            raise ServerError(f"{self._model_path} is not a checkpoint: it has no config.json")
        self.stop()
        port = self._address.port if self._address else self._config.port
        self._address = EngineAddress(HOST, _usable_port(port))
        self._weight_version = weight_version
        self._log_offset = self.log_path.stat().st_size if self.log_path.exists() else 0
        self._launched_at = time.monotonic()
        has_cuda = torch.cuda.is_available()
        temporary_dir = make_temporary_dir()
        self._process = EngineProcess(
            engine_flags(
                self._config,
                self._address,
                model_path=self._model_path,
                weight_version=weight_version,
                random_seed=self._random_seed,
                has_cuda=has_cuda,
            ),
            engine_environment(self._config, temporary_dir=temporary_dir, has_cuda=has_cuda),
            temporary_dir=temporary_dir,
            log_path=self.log_path,
        )

    def wait_healthy(self, on_wait: Callable[[float], None] | None = None) -> None:
        """Block until the launched server serves.

        `on_wait` is called a few times a second with the seconds since the launch. Raises ServerError with
        the end of the log where the server died or `launch_timeout_s` passed. On this, as on any other fault
        (Ctrl-C included), the server is stopped.
        """
        try:
            while not self._control.serves():
                waited_s = time.monotonic() - self._launched_at
                if not self.alive():
                    raise ServerError(f"the server {self._end()} while starting.\n{self._log_excerpt()}")
                if _PORT_LOST in self._log_tail():
                    # It was free when it was chosen. The server lives on without it.
                    raise ServerError(
                        f"another process took port {self.port} while the server started: start again, or set "
                        "server.port to one that nobody else uses"
                    )
                if waited_s > self._config.launch_timeout_s:
                    raise ServerError(
                        f"the server did not serve within server.launch_timeout_s = "
                        f"{self._config.launch_timeout_s} s: on a slow or busy machine raise it. Its log ends with:\n"
                        f"{self._log_excerpt()}"
                    )
                if on_wait is not None:
                    on_wait(waited_s)
                time.sleep(_HEALTH_PERIOD_S)
            with self._death_noticed():
                self._control.check_version(self._weight_version)
        except BaseException:
            self.stop()
            raise

    def alive(self) -> bool:
        """Whether the server's main process runs; it ends within seconds of the death of any other one."""
        return self._process is not None and self._process.exit_code is None

    def restart(self, model_path: Path, weight_version: int) -> None:
        """Serve `model_path` as policy version `weight_version` on the same port, from whatever state."""
        self.stop()
        self._model_path = model_path
        self.start(weight_version)

    def stop(self) -> None:
        """End all of the server's processes; returns when they are gone. Safe to call again.

        Raises ServerError where some are still there after `stop_timeout_s`.
        """
        if self._process is None:
            return
        try:
            self._process.kill(self._config.stop_timeout_s)
        except TimeoutError as fault:
            raise ServerError(str(fault)) from fault
        self._process = None

    def push_weights(self, path: Path, version: int) -> None:
        """Load the weights of the checkpoint at `path` and serve them as policy version `version`.

        Waits for requests in flight and flushes the KV cache, so no token is made from mixed weights. Raises
        ServerError where the server has died (`alive()` is then False) or refused.
        """
        with self._death_noticed():
            self._control.push_weights(path, version)
        self._weight_version = version

    def flush(self) -> None:
        """Empty the KV cache. Raises ServerError while requests are running."""
        with self._death_noticed():
            self._control.flush()

    @property
    def _control(self) -> EngineControl:
        return EngineControl(self._known_address())

    def _known_address(self) -> EngineAddress:
        if self._address is None:
            raise ServerError("the server has no address before its first launch")
        return self._address

    @contextmanager
    def _death_noticed(self) -> Iterator[None]:
        """A broken connection is often the first sign of a death that shows in `alive` a moment later."""
        try:
            yield
        except (OSError, HTTPException) as fault:
            if self._process is None or self._process.wait(_DEATH_NOTICE_S):
                raise ServerError(f"the server {self._end()}; its log: {self.log_path}") from fault
            raise ServerError(f"{self.url}: {type(fault).__name__}: {fault}") from fault

    def _end(self) -> str:
        code = self._process.exit_code if self._process else None
        if code is None:
            return "is not running"
        return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"

    def _log_excerpt(self) -> str:
        """The last lines that this launch has logged."""
        lines = self._log_tail().splitlines()
        shown = "\n".join(f"  {line}" for line in lines[-_SHOWN_LOG_LINES:]) or "  (nothing)"
        return f"The last lines of {self.log_path}:\n{shown}"

    def _log_tail(self) -> str:
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_offset, end - _READ_LOG_BYTES))
            return log.read().decode(errors="replace")


def _usable_port(port: int | None) -> int:
    """`port` if a server can listen there, or any free one for None. Raises ServerError if it is in use."""
    with socket.socket() as probe:
        # As the server itself does: connections of a predecessor that are still closing are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port or 0))
        except OSError as fault:
            if fault.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise ServerError(
                f"port {port} cannot be used ({fault.strerror}): stop what listens there, set server.port to "
                "another one, or set server.port=null for any free one"
            ) from fault
        return int(probe.getsockname()[1])
