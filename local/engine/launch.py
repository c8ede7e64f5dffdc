"""The engine's main module: `python -P -m midstream.local.engine.launch <SGLang's own flags>`.

SGLang starts its scheduler and detokenizer with multiprocessing's spawn method, which imports the main
module (as `__mp_main__`) in every child before anything else. So what stands at this module's top level is
in force in each of the engine's processes, and needs no `sitecustomize` or `.pth` file that could clash with
another one.
"""

import os
import sys

from midstream.local.engine.lifeline import die_with_children, die_with_parent
from midstream.local.engine.shims import CPU_SHIMS_ENV, install_cpu_shims


def serve(arguments: list[str]) -> None:
    """Run SGLang's HTTP server in this process until it ends."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(arguments))


if __name__ in ("__main__", "__mp_main__"):
    # SGLang binds its children to their parent too, but only after its imports, which take seconds.
    die_with_parent()
    if os.environ.get(CPU_SHIMS_ENV) == "1":
        install_cpu_shims()

if __name__ == "__main__":
    die_with_children()
    serve(sys.argv[1:])
