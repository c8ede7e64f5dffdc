"""Whether overlay workspaces work on this machine, found by having one."""

import json
import os
import subprocess
from pathlib import Path

from midstream.envs.sandboxes.directories import give_tree
from midstream.envs.sandboxes.isolation.base import PATH, Isolation
from midstream.envs.sandboxes.overlay.mounts import Mounted, Mounts
from midstream.envs.sandboxes.overlay.places import LayerPlaces

PROBE_TIMEOUT_S = 20.0
# What an agent does to files of the layer below: change one, delete one, put a folder in place of another.
_WORK = (
    "echo ready; read -r _; cd -- /workspace && echo 2 >> changed && chmod 700 changed && rm deleted && "
    "rm -r folder && mkdir folder && mv changed folder/moved && echo done"
)
_LEFT = {"folder": "", "folder/moved": "1\n2\n"}


def overlay_fault(root: Path, isolation: Isolation) -> str | None:
    """Why sandboxes of this isolation cannot have overlays of layers below `root`; None where they can.

    Makes layers and a sandbox there and removes them again, in some 30 ms.
    """
    if not isolation.has_namespaces:
        return f"isolation={isolation.name} has no namespaces to mount in"
    try:
        places = LayerPlaces(root / "layers")
    except OSError as error:
        return str(error)
    try:
        mounts = Mounts(places.path)
        try:
            return _fault(places, mounts, isolation)
        finally:
            mounts.close()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        places.close()


def _fault(places: LayerPlaces, mounts: Mounts, isolation: Isolation) -> str | None:
    base, live = _base(places, isolation.owner), places.new_live()
    mount = mounts.new_mount([base], live)
    try:
        said = _worked(mount, isolation, places.path / places.new_layer())
    finally:
        os.close(mount)
    if said != "done":
        return f"commands in the overlay failed: {said}"
    if not places.written(live).exists():
        return "what was written to the overlay is not in its upper layer"
    places.close_layer(live)
    mount = mounts.new_mount([base, live], places.new_live())
    try:
        left = _content(Path(f"/proc/self/fd/{mount}"))
    finally:
        os.close(mount)
    return None if left == _LEFT else f"after changes the overlay holds {left} instead of {_LEFT}"


def _base(places: LayerPlaces, owner: tuple[int, int] | None) -> str:
    base = places.new_layer()
    workspace = places.workspace(base)
    (workspace / "folder").mkdir(parents=True)
    for name in ("changed", "deleted", "folder/below"):
        (workspace / name).write_text("1\n")
    if owner is not None:
        give_tree(workspace, owner)
    return base


def _worked(mount: int, isolation: Isolation, directory: Path) -> str:
    """What a sandbox says of its work in the mount: "done", or what went wrong."""
    info, its_info = os.pipe()
    shell = ["bash", "--norc", "--noprofile", "-c", f"{isolation.preamble()}; {_WORK}"]
    launch = isolation.launch(directory, shell, its_info)
    process = subprocess.Popen(
        launch.argv,
        cwd="/",
        env={"PATH": PATH, **launch.environment},
        pass_fds=(*launch.fds, its_info),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    os.close(its_info)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        if first != "ready\n":
            return first.strip() or "the sandbox did not start"
        with os.fdopen(info, closefd=False) as file:
            init_pid = json.load(file)["child-pid"]
        isolation.attach(directory, init_pid)
        Mounted(init_pid).cover(directory.stat(), mount)
        return process.communicate("\n", timeout=PROBE_TIMEOUT_S)[0].strip()
    finally:
        os.close(info)
        process.kill()
        process.communicate()


def _content(top: Path) -> dict[str, str]:
    """What is below a directory: the content of files, "" for folders, by relative path."""
    return {str(path.relative_to(top)): "" if path.is_dir() else path.read_text() for path in top.rglob("*")}
