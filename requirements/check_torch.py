"""Say so if the installed PyTorch is a CUDA build: it works on a CPU, but costs gigabytes for nothing."""

import torch

if torch.version.cuda and not torch.cuda.is_available():
    print(
        f"    note: PyTorch {torch.__version__} is a CUDA build and this machine has no CUDA device.\n"
        "    It works, but takes several gigabytes more. For the CPU build, name an index that has it:\n"
        "    make distclean && make setup TORCH_INDEX=URL"
    )
