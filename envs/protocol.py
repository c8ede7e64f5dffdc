"""What an environment is, to the layers above: records and protocols.

Every record is a frozen dataclass whose `to_json` gives JSON-able values and whose `from_json` takes them
back. Nothing here holds a live handle, so records survive pickling and a restart of the job.
"""

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, cast

from midstream.conf.schema import LayerConfig

ChangeKind = Literal["created", "modified", "deleted"]


@dataclass(frozen=True)
class Task:
    """One problem for the agent: `metadata` holds what the environment needs to set it up and to score it."""

    prompt: str
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """Content hash, 32 hex digits: equal for equal tasks in every process and on every host."""
        canonical = json.dumps([self.prompt, self.label, self.metadata], sort_keys=True)
        return hashlib.blake2b(canonical.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "label": self.label, "metadata": self.metadata}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Task":
        return cls(value["prompt"], value["label"], dict(value["metadata"]))


@dataclass(frozen=True)
class Observation:
    """What the agent sees before its first action."""

    text: str


@dataclass(frozen=True)
class Step:
    """The environment's answer to one action. `reward` is None where only `score` gives one."""

    observation: str
    done: bool = False
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """One path that differs from the parent snapshot. `bytes` is its new size, 0 where it has no content.

    `path` is relative to the root of the tree; bytes that are not UTF-8 appear as surrogate escapes. `before`
    and `after` are short digests (16 hex digits) of the node, kind, mode and content, in the parent and now:
    "" where it is absent. Comparing the first `before` with the last `after` tells whether a path differs
    from the start after many turns.
    """

    path: str
    kind: ChangeKind
    bytes: int
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class Snapshot:
    """An immutable copy of an environment's state between two turns.

    `id` names the record in its store; `digest` is equal for equal states, however and whenever they were
    reached; `bytes` is the content of all files; `changes` is relative to `parent` (to nothing where None).
    `version` and `turn` say which policy's turn led here; whoever plays the rollout fills them in, and both
    are None for the task's start.
    """

    id: str
    digest: str
    parent: str | None = None
    changes: tuple[Change, ...] = ()
    bytes: int = 0
    version: int | None = None
    turn: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "digest": self.digest,
            "parent": self.parent,
            "changes": [[c.path, c.kind, c.bytes, c.before, c.after] for c in self.changes],
            "bytes": self.bytes,
            "version": self.version,
            "turn": self.turn,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Snapshot":
        return cls(**{**value, "changes": tuple(Change(*change) for change in value["changes"])})


class Environment(Protocol):
    """One live world. A single coroutine at a time may use it; any method may raise EnvironmentFailure."""

    async def reset(self, task: Task) -> Observation: ...

    async def step(self, action: str) -> Step: ...

    async def snapshot(self) -> Snapshot:
        """The state now; only between steps. The previous snapshot itself where nothing changed."""
        ...

    async def score(self) -> float | None:
        """The reward of the state that the agent left; None where the host has to find it."""
        ...

    async def close(self) -> None:
        """Release everything. Can be called at any time, also twice and after a cancelled step."""
        ...


class EnvironmentFactory(Protocol):
    """Starts environments. What else a factory or an environment has of these is used:

    - `async environment.rest()`, in place of `close`, where the host cut the rollout off and it will be
      resumed from the last snapshot: the environment may be kept until then.
    - `async factory.keep(snapshots)`: somebody may resume from these after a crash, not from the last alone.
    - `async factory.forget(snapshots)`: nobody will resume from these.
    - `factory.adopt(ids) -> set of ids`: a restarted job needs these snapshots and no others of its run;
      returns those that are missing.
    - `factory.metrics() -> dict[str, float]`: logged with each step, by these names.
    - `async factory.close()`: the job ends.
    """

    async def start(self, task: Task) -> Environment:
        """An environment at the task's beginning, ready to step."""
        ...

    async def resume(self, task: Task, snapshot: Snapshot) -> Environment:
        """A new environment in the state of the snapshot; called several times, a fork."""
        ...


def load_factory(config: LayerConfig) -> EnvironmentFactory:
    """The factory that `environment.factory` names, called with the config. Raises what `find_factory` does."""
    return cast(EnvironmentFactory, find_factory(config)(config))


def find_factory(config: LayerConfig) -> Callable[[LayerConfig], object]:
    """What `environment.factory` names as "module:Class".

    Raises ValueError, naming the setting, where the name has another form or leads to nothing callable.
    """
    name = config.environment.factory
    module_name, separator, attribute = name.partition(":")
    if not (separator and module_name and attribute):
        raise ValueError(f"environment.factory={name!r} is not of the form 'package.module:Class'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.split(".")[: error.name.count(".") + 1] == error.name.split("."):
            raise ValueError(
                f"environment.factory={name!r}: no module {error.name!r}; install it or put it on PYTHONPATH"
            ) from error
        raise
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ValueError(f"environment.factory={name!r}: {module_name!r} has no class {attribute!r}")
    return cast(Callable[[LayerConfig], object], factory)
