"""Who made the workspaces: rollouts that were trained on and their blame, for the page and for the terminal."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from midstream.envs.lineage import Write
from midstream.hooks.credit.blame import Rest
from midstream.hooks.credit.kept import KeptRollout, kept_rollouts
from midstream.local.report import words

ROLLOUTS_SHOWN = 3
"""Of each strategy, on the page."""
PATHS_SHOWN = 8
"""Of each rollout, on the page."""


@dataclass(frozen=True)
class Part:
    """What one policy version wrote of a workspace; `lag` in versions, None where nobody signed it."""

    version: str
    lag: int | None
    share: float


@dataclass(frozen=True)
class Row:
    """One write that survives, or a sum of those that are not named; `lag` as in `Part`."""

    lag: int | None
    version: str
    turn: str
    change: str
    size: str
    share: str
    path: str


@dataclass(frozen=True)
class Workspace:
    """A rollout as it is told: what is known of it, each version's part, oldest first, and the writes."""

    index: str
    facts: str
    parts: tuple[Part, ...]
    rows: tuple[Row, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Workspaces:
    """The oldest workspaces of a run's rollouts, of all the `kept` ones; `damaged` says what could not be read."""

    strategy: str
    kept: int = 0
    oldest: tuple[Workspace, ...] = ()
    damaged: tuple[str, ...] = ()


def read_workspaces(run_dir: Path, strategy: str) -> Workspaces:
    """Those of several versions first, then by the largest lag of the environment, then by the mean one."""
    damaged: list[str] = []
    kept = 0

    def counted() -> Iterator[KeptRollout]:
        nonlocal kept
        for rollout in kept_rollouts(run_dir, lambda error: damaged.append(str(error))):
            kept += 1
            if rollout.lags.environment > 0 and rollout.blame.paths:
                yield rollout

    oldest = heapq.nlargest(ROLLOUTS_SHOWN, counted(), key=_age)
    told = tuple(workspace(rollout, most_paths=PATHS_SHOWN) for rollout in oldest)
    return Workspaces(strategy, kept, told, tuple(damaged))


def workspace(rollout: KeptRollout, most_paths: int | None = None) -> Workspace:
    """How a rollout is told, with the heaviest writes first."""
    blame = rollout.blame
    parts = tuple(
        Part(_number(version), _lag(rollout, version), share) for version, share in blame.shares.items()
    )
    return Workspace(
        index=_number(rollout.index),
        facts=_facts(rollout),
        parts=parts,
        rows=tuple(_rows(rollout, most_paths)),
        remarks=tuple(_remarks(rollout)),
    )


def lag_text(lag: int | None) -> str:
    """How old a write is, in policy versions."""
    if lag is None:
        return "unknown"
    return "current" if lag == 0 else f"{lag} {'version' if lag == 1 else 'versions'} old"


def _rows(rollout: KeptRollout, most_paths: int | None) -> Iterator[Row]:
    blame = rollout.blame
    for write in blame.writes[:most_paths]:
        yield Row(
            lag=_lag(rollout, write.version),
            version=_number(write.version),
            turn=_number(write.turn),
            change=write.kind,
            size=words.size(write.bytes),
            share=words.percent(blame.share(write)),
            path=words.printable(write.path),
        )
    if most_paths is not None and blame.paths > most_paths:
        others: list[Write | Rest] = [*blame.writes[most_paths:], *blame.rest]
        share = words.percent(sum(blame.share(part) for part in others))
        size = words.size(sum(part.bytes for part in others))
        yield Row(None, "", "", "", size, share, _more(blame.paths - len(blame.writes[:most_paths])))
        return
    for rest in blame.rest:
        yield Row(
            lag=_lag(rollout, rest.version),
            version=_number(rest.version),
            turn=_number(rest.turn),
            change="",
            size=words.size(rest.bytes),
            share=words.percent(blame.share(rest)),
            path=_more(rest.paths),
        )


def _facts(rollout: KeptRollout) -> str:
    lags = rollout.lags
    facts = [
        "waits to go on" if rollout.step is None else f"trained in step {words.count(rollout.step)}",
        f"reward {words.decimal(rollout.reward)}",
        rollout.status,
        f"{_counted(rollout.tokens, 'token')} in {_counted(rollout.turns, 'turn')}",
        _counted(rollout.resumes, "resume"),
        f"lag of its first token {lags.trajectory}, of its oldest token {lags.token}, of the oldest write that survives"
        f" {lags.environment}",
    ]
    return ", ".join(facts)


def _remarks(rollout: KeptRollout) -> Iterator[str]:
    blame = rollout.blame
    if blame.unknown is not None:
        yield f"Who wrote what is not known: {words.printable(blame.unknown)}."
    elif not blame.paths:
        yield "Nothing in its workspace differs from the task's start."
    if blame.unseen_turns:
        last = "last turn" if blame.unseen_turns == 1 else f"last {blame.unseen_turns} turns"
        yield f"What the {last} did is not in it: no state was recorded afterwards."
    if rollout.fault is not None:
        yield f"The agent made going on impossible: {words.printable(rollout.fault)}."


def _age(rollout: KeptRollout) -> tuple[bool, int, float]:
    return len(rollout.blame.shares) > 1, rollout.lags.environment, rollout.blame.mean_lag(rollout.version)


def _lag(rollout: KeptRollout, version: int | None) -> int | None:
    return None if version is None else max(0, rollout.version - version)


def _number(value: int | None) -> str:
    return words.MISSING if value is None else str(value)


def _more(paths: int) -> str:
    return f"{words.count(paths)} more {'path' if paths == 1 else 'paths'}"


def _counted(count: int, what: str) -> str:
    return f"{words.count(count)} {what}{'' if count == 1 else 's'}"
