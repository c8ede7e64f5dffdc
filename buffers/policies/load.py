"""From the job's settings to its resume policy."""

import importlib
from typing import Any

from midstream.buffers.policies.base import CutOff, Policy
from midstream.buffers.policies.builtin import MAKERS
from midstream.conf.errors import ConfigError, Problem
from midstream.conf.schema import LayerConfig

_KEY = "midstream.resume_policy"


def load_policy(layer: LayerConfig) -> Policy:
    """The policy that ``layer.resume_policy`` names, with its own parameters.

    Raises:
        ConfigError: a ``module:Class`` that is not there, is no ``Policy``, or does not take
            ``policies.custom``.
    """
    name = layer.resume_policy
    if name in MAKERS:
        return MAKERS[name](layer.policies)
    policy_class = _policy_class(name)
    parameters = layer.policies.custom
    try:
        policy = policy_class(**parameters)
    except TypeError as error:
        fix = f"give its class what it takes under midstream.policies.custom, now {parameters} ({error})"
        raise ConfigError([Problem(_KEY, name, fix)]) from error
    if not isinstance(policy.cut_off, CutOff):
        raise ConfigError([Problem(_KEY, name, f"its cut_off is {policy.cut_off!r}, use a member of CutOff")])
    policy.name = name
    return policy


def _policy_class(name: str) -> type[Policy]:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{module_name}.".startswith(f"{missing}."):
            raise  # the module is there and misses something of its own
        fix = f"there is no module {missing!r}: install it, or put its folder on PYTHONPATH"
        raise ConfigError([Problem(_KEY, name, fix)]) from error
    found: Any = getattr(module, attribute, None)
    if found is None:
        raise ConfigError([Problem(_KEY, name, f"{module_name!r} has no class {attribute!r}")])
    if not (isinstance(found, type) and issubclass(found, Policy)):
        fix = "derive it from midstream.buffers.policies.base.Policy"
        raise ConfigError([Problem(_KEY, name, fix)])
    return found
