"""What a job's ``args`` say about midstream, and the parts that are made from it once per process."""

import functools
import json
from argparse import Namespace
from collections import Counter
from typing import TypeVar

from midstream.buffers.holds import Holds
from midstream.buffers.ledger import Ledger
from midstream.buffers.policies.base import Policy
from midstream.buffers.policies.load import load_policy
from midstream.buffers.tally import Tally
from midstream.conf.compose import layer_config
from midstream.conf.schema import LayerConfig
from midstream.envs.protocol import EnvironmentFactory, Snapshot, load_factory
from midstream.hooks.credit.estimates import FALLBACKS
from midstream.hooks.engine import Engine
from midstream.hooks.siblings import Siblings
from midstream.hooks.slime.curriculum import SlimeCurriculum
from midstream.hooks.slime.host import is_stepwise
from midstream.hooks.slime.sample import Group
from midstream.hooks.slime.steering import Steering

_Part = TypeVar("_Part")
_ledgers: dict[str, Ledger[Group]] = {}
_curricula: dict[str, SlimeCurriculum] = {}


def layer_of(args: Namespace) -> LayerConfig:
    """The checked settings of this job: ``midstream:`` in the file of ``--custom-config-path``."""
    return _layer(_settings_of(args))


def engine_of(args: Namespace) -> Engine:
    """The client of this job's router; one per process."""
    engine = layer_of(args).engine
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    return _engine(url, engine.retry_s, engine.request_timeout_s)


def environments_of(args: Namespace) -> EnvironmentFactory:
    """The environments of this job; one factory per process."""
    return _environments(_settings_of(args))


def policy_of(args: Namespace) -> Policy:
    """The resume policy of this job; one per process."""
    return _policy(_settings_of(args))


def tally_of(args: Namespace) -> Tally:
    """What became of the rollouts that waited; one per process."""
    return _tally(_settings_of(args))


def credit_counts_of(args: Namespace) -> Counter[str]:
    """How many rollouts lacked what their estimator compares with, by what they lacked; one per process."""
    return _credit_counts(_settings_of(args))


def steering_of(args: Namespace) -> Steering:
    """Which settings are in force in this job, those changed in mid-run included; one per process."""
    return _steering(_settings_of(args))


def holds_of(args: Namespace) -> Holds:
    """Which snapshots must outlast the rollouts that made them; one per process."""
    return _holds(_settings_of(args))


def siblings_of(args: Namespace) -> Siblings:
    """Who of a group plays, has ended or was stopped; one per process."""
    return _siblings(_settings_of(args))


def ledger_of(args: Namespace) -> Ledger[Group] | None:
    """The ledger that the data source of this process keeps; None where it keeps none."""
    return _ledgers.get(_settings_of(args))


def host_keeps_groups(args: Namespace) -> bool:
    """Whether groups may stay with the rollout function from one step to the next, outside the buffer."""
    said = layer_of(args).journal.host_keeps_groups
    return not is_stepwise(args) if said is None else said


def keep_ledger(args: Namespace, ledger: Ledger[Group] | None) -> None:
    """Make a ledger the one that ``ledger_of`` returns from now on; None: it is closed."""
    _keep(_ledgers, args, ledger)


def curriculum_of(args: Namespace) -> SlimeCurriculum | None:
    """The curriculum that the data source of this process follows; None where it follows none."""
    return _curricula.get(_settings_of(args))


def keep_curriculum(args: Namespace, curriculum: SlimeCurriculum | None) -> None:
    """Make a curriculum the one that ``curriculum_of`` returns from now on; None: it is over."""
    _keep(_curricula, args, curriculum)


def abandoned_of(args: Namespace) -> list[Snapshot]:
    """Snapshots that nobody will resume from and the environments were not told of yet; one per process.

    The data source, which the host calls from anywhere, adds to it; ``generate``, which runs in the loop that
    the environments live in, takes all.
    """
    return _abandoned(_settings_of(args))


def _keep(parts: dict[str, _Part], args: Namespace, part: _Part | None) -> None:
    if part is None:
        parts.pop(_settings_of(args), None)
    else:
        parts[_settings_of(args)] = part


def _settings_of(args: Namespace) -> str:
    """The job's own words, as a key for what is made from them."""
    return json.dumps(getattr(args, "midstream", None) or {}, sort_keys=True, default=str)


@functools.cache
def _layer(settings: str) -> LayerConfig:
    return layer_config(json.loads(settings))


@functools.cache
def _engine(url: str, retry_s: float, request_timeout_s: float) -> Engine:
    return Engine(url, retry_s, request_timeout_s)


@functools.cache
def _environments(settings: str) -> EnvironmentFactory:
    return load_factory(_layer(settings))


@functools.cache
def _policy(settings: str) -> Policy:
    return load_policy(_layer(settings))


@functools.cache
def _tally(settings: str) -> Tally:
    return Tally()


@functools.cache
def _credit_counts(settings: str) -> Counter[str]:
    return Counter(dict.fromkeys(FALLBACKS, 0))


@functools.cache
def _steering(settings: str) -> Steering:
    return Steering(_layer(settings))


@functools.cache
def _holds(settings: str) -> Holds:
    return Holds()


@functools.cache
def _siblings(settings: str) -> Siblings:
    return Siblings(None)


@functools.cache
def _abandoned(settings: str) -> list[Snapshot]:
    return []
