"""Which flags and environment the server gets on a CPU and on a GPU."""

from pathlib import Path

from midstream.conf.schema import ServerConfig
from midstream.local.engine.flags import EngineAddress, engine_environment, engine_flags
from midstream.local.engine.shims import CPU_SHIMS_ENV


def flags(config: ServerConfig, *, has_cuda: bool) -> dict[str, str]:
    """Flag to value; a switch has an empty value."""
    listed = engine_flags(
        config,
        EngineAddress("127.0.0.1", 4321),
        model_path=Path("/models/a b"),
        weight_version=7,
        random_seed=3,
        has_cuda=has_cuda,
    )
    return dict(flag.partition("=")[::2] for flag in listed)


def test_configuration_reaches_the_flags() -> None:
    config = ServerConfig(mem_fraction_static=0.4, max_total_tokens=1000, max_running_requests=5)
    given = flags(config, has_cuda=False)
    assert given["--model-path"] == "/models/a b"
    assert (given["--host"], given["--port"], given["--weight-version"]) == ("127.0.0.1", "4321", "7")
    assert given["--mem-fraction-static"] == "0.4"
    assert (given["--max-total-tokens"], given["--max-running-requests"]) == ("1000", "5")


def test_log_probs_are_float32_on_both_devices() -> None:
    for has_cuda in (False, True):
        given = flags(ServerConfig(), has_cuda=has_cuda)
        assert (given["--dtype"], given["--attention-backend"]) == ("float32", "torch_native")


def test_a_gpu_needs_none_of_what_a_cpu_needs() -> None:
    assert flags(ServerConfig(), has_cuda=False)["--device"] == "cpu"
    assert "--device" not in flags(ServerConfig(), has_cuda=True)
    on_cpu = engine_environment(ServerConfig(threads=2), temporary_dir=Path("/t"), has_cuda=False)
    on_gpu = engine_environment(ServerConfig(threads=2), temporary_dir=Path("/t"), has_cuda=True)
    assert (on_cpu[CPU_SHIMS_ENV], on_cpu["OMP_NUM_THREADS"], on_cpu["SGLANG_USE_CPU_ENGINE"]) == (
        "1",
        "2",
        "1",
    )
    assert on_gpu.keys().isdisjoint((CPU_SHIMS_ENV, "OMP_NUM_THREADS", "SGLANG_USE_CPU_ENGINE"))
    assert on_cpu["TMPDIR"] == on_gpu["TMPDIR"] == "/t"
