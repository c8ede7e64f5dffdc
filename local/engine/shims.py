"""What SGLang imports but does not need when it serves on a CPU without its kernel package.

SGLang's CPU engine imports names from `sgl_kernel` for speculative decoding, and imports `torchvision` for
multimodal models. A text model uses neither. Both imports must succeed in every SGLang process.
"""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

CPU_SHIMS_ENV = "MIDSTREAM_ENGINE_CPU_SHIMS"
"""Set to "1" in the environment of the engine's processes where the shims are needed."""

_BOX_SUPPRESSION_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def install_cpu_shims() -> None:
    """Make `import sgl_kernel` and `import torchvision` work in this process; real ones are left alone."""
    stand_in_for_sgl_kernel()
    declare_torchvision_operators()


def stand_in_for_sgl_kernel() -> None:
    """Put a module under the name `sgl_kernel` whose `*_cpu` functions raise NotImplementedError when called.

    `torch.ops.sgl_kernel` stays empty, so SGLang takes its native torch path for everything that runs.
    """
    if "sgl_kernel" in sys.modules or find_spec("sgl_kernel") is not None:
        return
    module = ModuleType("sgl_kernel", "Stand-in: the kernels of SGLang's CPU build are not installed.")
    module.__spec__ = ModuleSpec("sgl_kernel", loader=None)
    module.__getattr__ = _missing_kernel  # type: ignore[method-assign]
    sys.modules["sgl_kernel"] = module


def _missing_kernel(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"the stand-in for sgl_kernel has no {name!r}")

    def kernel(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: SGLang's CPU kernels are not installed")

    return kernel


def declare_torchvision_operators() -> None:
    """Declare the operators that `import torchvision` expects of its C extension, where that does not load.

    torchvision's wheel on the package index is a CUDA build: beside a CPU build of torch its extension fails
    to load, and the import then fails where it registers fake kernels for operators that nobody declared.
    """
    import torch

    torchvision = find_spec("torchvision")
    if torchvision is None or torchvision.origin is None or "torchvision" in sys.modules:
        return
    try:
        torch.ops.load_library(Path(torchvision.origin).with_name("_C.so"))
    except OSError:
        for operator in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, operator):
                torch.library.define(f"torchvision::{operator}", _BOX_SUPPRESSION_SCHEMA)
