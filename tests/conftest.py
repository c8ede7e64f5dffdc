"""Fixtures that tests of more than one layer use."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from midstream.local.server import EngineServer


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of this repository."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def engine_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny randomly initialised Qwen3 with the demo's tokenizer, in Hugging Face layout."""
    # Here and below: tests of the lower layers must not pay for torch.
    from midstream.conf.compose import compose
    from midstream.local.model.checkpoint import build_hf_checkpoint

    return build_hf_checkpoint(
        tmp_path_factory.mktemp("engine") / "checkpoint", compose(["model=tiny"]).model
    )


@pytest.fixture(scope="session")
def engine_server(
    engine_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> "Iterator[EngineServer]":
    """A healthy SGLang server, started by the first test that asks for it and shared by all of them.

    Tests may push weights to it, so its policy version is the last one pushed.
    """
    from midstream.conf.schema import ServerConfig
    from midstream.local.server import EngineServer

    config = ServerConfig(launch_timeout_s=300)  # half a minute on two idle cores
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    with EngineServer(config, model_path=engine_checkpoint, log_path=log_path) as server:
        server.start(weight_version=0)
        yield server
