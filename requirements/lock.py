"""Print the versions installed beside this interpreter as pip constraints.

Left out: midstream itself, what has no version of its own to choose (triton and the CUDA libraries follow
torch's build), and torch's build tag, so that the CPU and the CUDA build satisfy the same line.
"""

import re
from importlib.metadata import distributions

UNPINNED = re.compile(r"midstream|pip|triton|nvidia-.*|cuda-.*")

versions = {
    re.sub(r"[-_.]+", "-", distribution.name).lower(): distribution.version.partition("+")[0]
    for distribution in distributions()
}
print("# Written by `make lock`: the versions that the tests passed with.")
for name, version in sorted(versions.items()):
    if not UNPINNED.fullmatch(name):
        print(f"{name}=={version}")
