"""The slime-like host around a hook: slime, its fork, or a job of the same shape.

The hooks adapt by looking. A sample's class says which package made it; what that package offers is
looked up there, by names that the family shares.
"""

import importlib
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_FAMILY = ("slime", "miles")


def load_function(path: str) -> Callable[..., Any]:
    """Import a hook by its path, ``package.module.function``.

    Raises:
        ImportError: the module or the function does not exist.
    """
    module, _, name = path.rpartition(".")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except AttributeError:
        raise ImportError(f"hook {path}: module {module} has no {name}") from None
    return function


@dataclass(frozen=True)
class Host:
    """Where a host keeps what the hooks need: module names under its package."""

    package: str
    state: str = "rollout.sglang_rollout"  # GenerateState(args): .aborted, .tokenizer
    samples: str = "utils.types"  # Sample
    prompts: str = "rollout.data_source"  # RolloutDataSource(args)
    filters: str = "rollout.filter_hub.base_types"  # DynamicFilterOutput
    slices: str = "backends.megatron_utils.cp_utils"  # slice_log_prob_with_cp
    # The rollout function that has given back or given up, when it returns, all groups that it took.
    stepwise: str = "rollout.sglang_rollout.generate_rollout"

    def load(self, room: str, name: str) -> Any:
        """Return attribute ``name`` of the host's module for ``room`` (a field of this class)."""
        return getattr(importlib.import_module(f"{self.package}.{getattr(self, room)}"), name)

    def generate_state(self, args: Namespace) -> Any:
        """The host's state of the running rollout step, a singleton."""
        return self.load("state", "GenerateState")(args)


_hosts = {name: Host(name) for name in _FAMILY}


def register(host: Host) -> None:
    """Make a job of slime's shape known, so that the hooks find its parts."""
    _hosts[host.package] = host


def is_stepwise(args: Namespace) -> bool:
    """Whether the rollout function is known to keep no group from one call to the next.

    A host's own default is; any other may keep finished groups, and unfinished ones, for a later step.
    """
    host = running_host(args)
    return bool(args.rollout_function_path == f"{host.package}.{host.stepwise}")


def host_of(sample: Any) -> Host:
    """Return the host whose class ``sample`` is an instance of.

    Raises:
        LookupError: the class belongs to no known host.
    """
    for cls in type(sample).__mro__:
        for package, host in _hosts.items():
            if cls.__module__ == package or cls.__module__.startswith(package + "."):
                return host
    raise LookupError(
        f"{type(sample).__module__}.{type(sample).__qualname__} is not a sample of "
        f"{', '.join(sorted(_hosts))}: these hooks run inside a slime job"
    )


def running_host(args: Namespace) -> Host:
    """Return the host of this process: that of the rollout function, else the one that is loaded.

    Raises:
        LookupError: no host is loaded, or several and the rollout function belongs to none of them.
    """
    path = getattr(args, "rollout_function_path", None) or ""
    for package, host in _hosts.items():
        if path.startswith(package + "."):
            return host
    loaded = [host for package, host in _hosts.items() if f"{package}.{host.prompts}" in sys.modules]
    if len(loaded) != 1:
        raise LookupError(
            f"expected one host of {', '.join(sorted(_hosts))} in this process, found "
            f"{[host.package for host in loaded]}: these hooks run inside a slime job"
        )
    return loaded[0]
