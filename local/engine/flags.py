"""How an SGLang server is called: its flags and its environment, as pure functions of the configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from midstream.conf.schema import ServerConfig
from midstream.local.engine.shims import CPU_SHIMS_ENV


@dataclass(frozen=True)
class EngineAddress:
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def engine_flags(
    config: ServerConfig,
    address: EngineAddress,
    *,
    model_path: Path,
    weight_version: int,
    random_seed: int,
    has_cuda: bool,
) -> list[str]:
    """The flags of a server whose log-probs the trainer can reproduce to 1e-4.

    float32 throughout: SGLang would cast a float32 checkpoint to float16. Of its attention backends only
    `torch_native` runs without kernels of its own and computes float32 exactly, on a CPU as on a GPU.
    """
    flags = [
        f"--model-path={model_path}",
        f"--host={address.host}",
        f"--port={address.port}",
        f"--weight-version={weight_version}",
        f"--random-seed={random_seed}",
        f"--mem-fraction-static={config.mem_fraction_static}",
        f"--max-total-tokens={config.max_total_tokens}",
        f"--max-running-requests={config.max_running_requests}",
        "--dtype=float32",
        "--attention-backend=torch_native",
        "--sampling-backend=pytorch",
        # The log is for faults: a line for each request and batch costs time and buries them.
        "--log-level=warning",
    ]
    if has_cuda:
        return flags
    return [
        *flags,
        "--device=cpu",
        "--cuda-graph-backend-decode=disabled",
        "--cuda-graph-backend-prefill=disabled",
        "--disable-overlap-schedule",
        # Without it an idle scheduler spins on most of a core, which the trainer needs.
        "--sleep-on-idle",
    ]


def engine_environment(config: ServerConfig, *, temporary_dir: Path, has_cuda: bool) -> Mapping[str, str]:
    """What the server's processes need in their environment beside the job's own.

    `temporary_dir` takes SGLang's socket files, which it leaves behind when it is killed. Their paths must
    fit into a socket address, which is about 100 bytes.
    """
    environment = {
        "TMPDIR": str(temporary_dir),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # Otherwise /health generates a token: it takes a second and answers 503 while the engine is paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
    if has_cuda:
        return environment
    return environment | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": str(config.threads),
        CPU_SHIMS_ENV: "1",
    }
