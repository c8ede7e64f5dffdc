"""The real SGLang server: policy versions, aborts, and death in every way that a job can meet."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from midstream.buffers.rollout import PartialRollout
from midstream.conf.compose import compose
from midstream.conf.schema import ServerConfig
from midstream.hooks.engine import Engine
from midstream.hooks.ratio import mean_squared_log_ratio
from midstream.local.attached import AttachedServer
from midstream.local.engine.control import ServerError
from midstream.local.engine.flags import EngineAddress
from midstream.local.engine.process import session_pids
from midstream.local.model.checkpoint import build_hf_checkpoint
from midstream.local.server import EngineServer

PROMPT = [5, 6, 7]

JOB_THAT_HANGS = """
import sys, time
from pathlib import Path
from midstream.conf.schema import ServerConfig
from midstream.local.server import EngineServer

checkpoint, log = sys.argv[1:]
server = EngineServer(ServerConfig(launch_timeout_s=300), model_path=Path(checkpoint), log_path=Path(log))
server.launch(weight_version=0)
print(server.pid, flush=True)
time.sleep(600)
"""


def post(server: EngineServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    connection = HTTPConnection(server.host, server.port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse().read()
    connection.close()
    return json.loads(answer) if answer else {}


def generate(server: EngineServer, tokens: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    return post(
        server, "/generate", {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    )


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so after {timeout_s} s"
        time.sleep(0.05)


def process_named(session: int, name: bytes) -> int:
    return next(pid for pid in session_pids(session) if name in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.fixture
def make_server(engine_checkpoint: Path, tmp_path: Path) -> Callable[..., EngineServer]:
    def make(model_path: Path = engine_checkpoint, **settings: Any) -> EngineServer:
        return EngineServer(ServerConfig(**settings), model_path=model_path, log_path=tmp_path / "server.log")

    return make


def test_pushed_version_is_stamped_on_every_token(
    engine_server: EngineServer, engine_checkpoint: Path
) -> None:
    for version in (101, 102):
        engine_server.push_weights(engine_checkpoint, version)
        spans = generate(engine_server, tokens=6)["meta_info"]["weight_versions"]
        assert spans == [{"version": str(version), "start": 0, "end": 6}]


def test_push_of_a_missing_checkpoint_is_refused_and_changes_nothing(
    engine_server: EngineServer, engine_checkpoint: Path
) -> None:
    engine_server.push_weights(engine_checkpoint, 110)
    with pytest.raises(ServerError, match="/nowhere"):
        engine_server.push_weights(Path("/nowhere"), 111)
    assert engine_server.alive()
    assert generate(engine_server, tokens=2)["meta_info"]["weight_version"] == "110"


def test_abort_keeps_the_partial_tokens_and_flush_waits_for_idle(engine_server: EngineServer) -> None:
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(generate, engine_server, tokens=3000) for _ in range(2)]
        time.sleep(1.0)
        with pytest.raises(ServerError, match="answered 400"):
            engine_server.flush()
        post(engine_server, "/abort_request", {"abort_all": True})
        answers = [call.result(timeout=10) for call in calls]
    for answer in answers:
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) < 3000
        assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])
    engine_server.flush()


def test_death_of_one_process_ends_the_server_and_a_restart_keeps_the_port(
    engine_server: EngineServer, engine_checkpoint: Path
) -> None:
    port, session = engine_server.port, engine_server.pid
    assert session is not None
    os.kill(process_named(session, b"detokenizer"), signal.SIGKILL)
    wait_until(lambda: not engine_server.alive(), timeout_s=5)
    with pytest.raises(ServerError, match="exited with code 1"):
        engine_server.push_weights(engine_checkpoint, 120)
    engine_server.restart(engine_checkpoint, 121)
    assert not session_pids(session)
    assert engine_server.port == port
    assert generate(engine_server, tokens=2)["meta_info"]["weight_version"] == "121"


def test_port_in_use_is_named_and_nothing_is_launched(make_server: Callable[..., EngineServer]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = make_server(port=port)
        with pytest.raises(ServerError, match=rf"port {port} .*server\.port"):
            server.launch(weight_version=0)
    assert server.pid is None
    assert not server.log_path.exists()


def test_a_port_that_is_lost_while_the_server_starts_is_named(
    make_server: Callable[..., EngineServer],
) -> None:
    server = make_server()
    server.launch(weight_version=0)
    # It loads its model first, and listens half a minute later.
    with (
        socket.create_server(("127.0.0.1", server.port)),
        pytest.raises(ServerError, match=rf"another process took port {server.port}"),
    ):
        server.wait_healthy()
    assert not server.alive()


def test_missing_checkpoint_is_named(make_server: Callable[..., EngineServer]) -> None:
    with pytest.raises(ServerError, match=r"/nowhere .*config\.json"):
        make_server(Path("/nowhere")).launch(weight_version=0)


def test_failed_launch_shows_the_end_of_the_log(
    make_server: Callable[..., EngineServer], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    server = make_server(tmp_path)
    with pytest.raises(ServerError, match=r"(?s)exited with code 1 while starting.*no-such-model"):
        server.start(weight_version=0)
    assert not server.alive()


def test_launch_that_takes_too_long_is_ended(make_server: Callable[..., EngineServer]) -> None:
    server = make_server(launch_timeout_s=0.5)
    server.launch(weight_version=0)
    session = server.pid
    assert session is not None
    waited: list[float] = []
    with pytest.raises(ServerError, match=r"launch_timeout_s = 0\.5"):
        server.wait_healthy(waited.append)
    assert waited == sorted(waited)
    assert waited
    assert not session_pids(session)


def test_server_outlives_the_thread_that_launched_it_and_stops_twice(
    make_server: Callable[..., EngineServer],
) -> None:
    server = make_server()
    launching = threading.Thread(target=server.launch, args=(0,))
    launching.start()
    launching.join()
    session = server.pid
    assert session is not None
    time.sleep(1.0)  # a parent-death signal would have come by now
    assert server.alive()
    sockets = Path(Path(f"/proc/{session}/environ").read_text().partition("TMPDIR=")[2].partition("\0")[0])
    assert sockets.is_dir()
    server.stop()
    assert not session_pids(session)
    assert not sockets.exists()
    server.stop()
    assert not server.alive()


def test_nothing_outlives_a_job_that_is_killed_while_it_starts(
    engine_checkpoint: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", JOB_THAT_HANGS, str(engine_checkpoint), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        session = int(job.stdout.readline())
        job.kill()
    wait_until(lambda: not session_pids(session), timeout_s=10)


def test_the_log_probs_of_given_tokens_are_those_with_which_they_were_made(
    engine_server: EngineServer, engine_checkpoint: Path, tmp_path: Path
) -> None:
    model = compose(["model=tiny", "model.seed=99"]).model
    others = build_hf_checkpoint(tmp_path / "others", model)
    engine_server.push_weights(engine_checkpoint, 130)

    async def measure() -> tuple[float | None, float | None, int]:
        engine = Engine(f"http://{engine_server.host}:{engine_server.port}")
        rollouts = [PartialRollout("p", "g", prompt_tokens=list(PROMPT)) for _ in range(3)]
        for number, rollout in enumerate(rollouts):
            for turn in range(2):
                made = await engine.generate(
                    rollout.prompt_tokens + rollout.tokens,
                    {"max_new_tokens": 20 + number, "temperature": 1.0, "ignore_eos": True},
                )
                rollout.begin_turn()
                rollout.append_action(made.tokens, made.log_probs, made.spans)
                rollout.finish_action()
                rollout.append_observation([8, 9] if turn == 0 else [])
        keys = [None] * len(rollouts)
        same = await mean_squared_log_ratio(engine, rollouts, keys)
        engine_server.push_weights(others, 131)
        different = await mean_squared_log_ratio(engine, rollouts, keys)
        known = rollouts[0].prompt_tokens + rollouts[0].tokens
        after = await engine.generate(known, {"max_new_tokens": 1, "temperature": 1.0})
        await engine.close()
        return same, different, len(known) - after.meta_info["cached_tokens"]

    same, different, computed_again = asyncio.run(measure())
    assert same is not None and same < 1e-6
    assert different is not None and different > 1e-3
    assert computed_again <= 1, "who goes on finds what was measured in the engine's cache"


def test_a_job_that_attaches_pushes_weights_and_cannot_restart(
    engine_server: EngineServer, engine_checkpoint: Path
) -> None:
    attached = AttachedServer(EngineAddress(engine_server.host, engine_server.port), engine_server.log_path)
    assert attached.alive()
    attached.push_weights(engine_checkpoint, 201)
    assert generate(engine_server, 1)["meta_info"]["weight_version"] == "201"
    with pytest.raises(ServerError, match="/nowhere"):
        attached.push_weights(Path("/nowhere"), 202)
    with pytest.raises(ServerError, match="another process keeps"):
        attached.restart(engine_checkpoint, 202)


def test_an_attached_server_that_is_gone_is_not_alive(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = EngineAddress("127.0.0.1", closed.getsockname()[1])
    attached = AttachedServer(address, tmp_path / "server.log")
    assert not attached.alive()
    with pytest.raises(ServerError, match=address.url):
        attached.push_weights(tmp_path, 1)
