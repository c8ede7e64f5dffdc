"""What becomes of rollouts that a step cuts off: the policies by name, their parameters and the bounds on all."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from midstream.conf.errors import Problem, closest, refuse
from midstream.conf.schema.base import OBJECT_PATH, Count, Seconds, Section

CutOffWord = Literal["nothing", "dropped", "emptied", "kept"]

BUILT_IN: Mapping[str, CutOffWord] = {
    "wait": "nothing",
    "discard": "dropped",
    "restart": "emptied",
    "continue": "kept",
    "rewind": "kept",
    "anchor": "kept",
    "ladder": "kept",
    "naive": "kept",
}
"""The built-in policies, and what each does to a rollout at the moment that it is cut off."""
FORKS = ("anchor", "ladder")
"""Those that make continuations of one state of a group."""


def comes_back(policy: str) -> bool | None:
    """Whether what is cut off waits for another step, which slime calls partial rollout.

    None for a policy of the user's own: only its class knows.
    """
    return BUILT_IN[policy] in ("emptied", "kept") if policy in BUILT_IN else None


def _policy_name(text: str) -> str:
    if text not in BUILT_IN and not re.fullmatch(OBJECT_PATH, text):
        meant = closest(text, BUILT_IN)
        hint = f" (did you mean {meant!r}?)" if meant else ""
        names = ", ".join(map(repr, BUILT_IN))
        refuse([Problem("", text, f"use {names}, or package.module:Class for your own{hint}")])
    return text


PolicyName = Annotated[str, AfterValidator(_policy_name)]
"""A built-in policy, or `package.module:Class`."""


class RewindConfig(Section):
    """Parameters of the policy `rewind`."""

    max_lag: int = Field(default=8, ge=0)
    """In policy versions: what older policies than that did to the environment is undone."""


class AnchorConfig(Section):
    """Parameters of the policy `anchor`."""

    prefix: Literal["trained", "masked"] = "trained"
    """Whether what led to the state from which a group is forked counts in the loss: trained, once for the group,
    or masked."""


class LadderConfig(Section):
    """Parameters of the policy `ladder`; lags are in policy versions."""

    small_lag: int = Field(default=2, ge=0)
    """A group goes on as it is while none of its trained tokens is older; after that it is forked, and masked so
    far."""
    max_lag: int = Field(default=8, ge=0)
    """No group is forked from a state with an older write in it, but from before that."""
    max_log_ratio: float | None = Field(default=0.04, gt=0)
    """A group that would go on as it is is forked where the mean squared log-ratio of its trained tokens between
    the weights of the day and those that made them is larger. null: the lag alone decides."""


class PoliciesConfig(Section):
    """Parameters of the resume policies, each under its name; those of policies that are not chosen lie idle."""

    rewind: RewindConfig = Field(default_factory=RewindConfig)
    anchor: AnchorConfig = Field(default_factory=AnchorConfig)
    ladder: LadderConfig = Field(default_factory=LadderConfig)
    custom: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for a policy class of your own."""


Lag = Annotated[int, Field(ge=0)]


class BoundsConfig(Section):
    """Bounds that hold under every policy, each off where it is null; lags are in policy versions."""

    live: ClassVar[bool] = True

    trajectory: Lag | None = 16
    """The largest lag of a rollout's first token."""
    token: Lag | None = 16
    """The largest lag of any of its tokens."""
    environment: Lag | None = 16
    """The largest lag of a write that survives in its environment."""
    beyond: Literal["restart", "drop"] = "restart"
    """What becomes of a rollout beyond one of these: it starts anew, or its group is dropped."""
    passed_over: Count = 3
    """A group that others were preferred to so often goes before all others."""
    resumed_share: float = Field(default=1.0, gt=0, le=1)
    """At most that share of the groups that a step asks for has begun before; one group may always."""
    deadline_s: Seconds | None = None
    """A rollout that is played for longer in one go is given up and masked; time in the buffer does not count."""


class JournalConfig(Section):
    """The journal of unfinished rollouts, in the folder `buffer` of the run directory."""

    keep_checkpoints: int = Field(default=3, ge=2)
    """The host can go back to so many of its newest checkpoints with the buffer as it was; what they need stays."""
    host_keeps_groups: bool | None = None
    """Whether the rollout function keeps groups from one step to the next outside the buffer; null: only the host's
    default one is known not to."""


def bound_problems(policy: str, policies: PoliciesConfig, bounds: BoundsConfig) -> Iterator[Problem]:
    """What a policy lets pass must not be what a bound takes away."""
    cap = bounds.environment
    lag = {"rewind": policies.rewind.max_lag, "ladder": policies.ladder.max_lag}.get(policy)
    if lag is not None and cap is not None and lag > cap:
        fix = f"use at most midstream.bounds.environment={cap}: beyond it nothing is left to rewind"
        yield Problem(f"policies.{policy}.max_lag", lag, fix)
    small = policies.ladder.small_lag
    if policy == "ladder" and small > policies.ladder.max_lag:
        fix = f"use at most midstream.policies.ladder.max_lag={policies.ladder.max_lag}: the rungs are in this order"
        yield Problem("policies.ladder.small_lag", small, fix)


def measurement_problems(policy: str, policies: PoliciesConfig, temperature: float) -> Iterator[Problem]:
    """The engine measures given tokens at temperature 1, whatever they were sampled at."""
    if policy == "ladder" and policies.ladder.max_log_ratio is not None and temperature != 1:
        fix = (
            "use 1, at which the engine measures log-ratios, or set midstream.policies.ladder.max_log_ratio=null "
            "to go by the lag alone"
        )
        yield Problem("rollout.rollout_temperature", temperature, fix)


def deadline_problems(bounds: BoundsConfig, longest_s: float) -> Iterator[Problem]:
    """One command, or the check of a task, must fit: ``longest_s`` is how long they may take."""
    if bounds.deadline_s is not None and bounds.deadline_s <= longest_s:
        fix = (
            f"use more than {longest_s:g}, the longest that one command or check of the environment may take"
        )
        yield Problem("bounds.deadline_s", bounds.deadline_s, fix)
