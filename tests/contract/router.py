"""SGLang's own router in front of one engine, as a host finds it in a job."""

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
_POLL_S = 0.2
_LOCALHOST = "127.0.0.1"


@contextlib.contextmanager
def router_before(engine_url: str, log_path: Path) -> Iterator[tuple[str, int]]:
    """Run a router that knows the engine, and yield its (ip, port).

    Raises RuntimeError with the end of its log where it does not list the engine within READY_TIMEOUT_S.
    """
    port, metrics_port = _free_ports(2)
    command = [sys.executable, "-m", "sglang_router.launch_router"]
    command += ["--host", _LOCALHOST, "--port", str(port), "--prometheus-port", str(metrics_port)]
    command += ["--worker-urls", engine_url, "--policy", "round_robin", "--disable-circuit-breaker"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_until_listed(engine_url, port, process, log_path)
        yield _LOCALHOST, port
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_listed(engine_url: str, port: int, process: subprocess.Popen[bytes], log_path: Path) -> None:
    give_up_at = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < give_up_at and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://{_LOCALHOST}:{port}/workers", timeout=5) as answer:
                workers = json.load(answer)["workers"]
        except (urllib.error.URLError, TimeoutError):
            workers = []
        if any(worker["url"] == engine_url and worker.get("is_healthy", True) for worker in workers):
            return
        time.sleep(_POLL_S)
    raise RuntimeError(
        f"the router does not list {engine_url}; its log ends with:\n{log_path.read_text()[-2000:]}"
    )


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for open_socket in sockets:
            open_socket.bind((_LOCALHOST, 0))
        return [open_socket.getsockname()[1] for open_socket in sockets]
