"""What goes into a journal and what it answers: plain data."""

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Who owns a group. Of those that are trained or dropped the journal keeps counts only."""

    TAKEN = "taken"  # in flight: somebody generates it
    BUFFERED = "buffered"  # waits to go on
    HANDED = "handed"  # given to a training step that is not over yet
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(frozen=True)
class Summary:
    """What the journal knows of one rollout without reading its payload.

    ``tokens`` are those of the response, the versions those of the policies that made them (None before
    the first token), ``snapshots`` the ids of all snapshots that the payload refers to, ``status`` a word
    of the caller's.
    """

    tokens: int = 0
    turns: int = 0
    oldest_version: int | None = None
    newest_version: int | None = None
    snapshots: tuple[str, ...] = ()
    status: str = ""


@dataclass(frozen=True)
class Member:
    """One rollout of a group: its record as bytes, which the journal does not look into."""

    payload: bytes
    summary: Summary = Summary()


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt. ``key`` names it, and no other group of the run.

    ``members`` is None where they are as the journal has them already.
    """

    key: str
    members: tuple[Member, ...] | None = None


@dataclass(frozen=True)
class Waiting:
    """A group that waits to go on, without its payloads.

    ``begun_s`` is when it was first taken, ``since_s`` since when it waits, in seconds of the clock.
    """

    key: str
    members: tuple[Summary, ...]
    begun_s: float
    since_s: float


@dataclass(frozen=True)
class Restored:
    """What waits after a roll-back, in order, and the keys of the groups that damage cost."""

    waiting: tuple[Waiting, ...]
    damaged: tuple[str, ...]


@dataclass(frozen=True)
class Owned:
    """Groups, their rollouts, and what these sum up to."""

    groups: int = 0
    rollouts: int = 0
    tokens: int = 0
    turns: int = 0
    payload_bytes: int = 0


@dataclass(frozen=True)
class JournalStatus:
    """A journal at one moment.

    ``taken``, ``buffered`` and ``handed`` are there now; ``trained`` and ``dropped`` (by reason) are what
    has become of the others since the run began. The rest is of the groups that wait: their ages in
    seconds since they were first taken, the tokens of their rollouts, the policy versions that made them
    (None without any), and their snapshots. ``snapshots_in_use`` counts those that anything refers to,
    the checkpoints' past included; ``file_bytes`` is what all lies in.
    """

    taken: Owned
    buffered: Owned
    handed: Owned
    trained: Owned
    dropped: dict[str, Owned]
    oldest_age_s: float
    median_age_s: float
    median_tokens: float
    most_tokens: int
    oldest_version: int | None
    newest_version: int | None
    snapshots: tuple[str, ...]
    snapshots_in_use: int
    checkpoints: tuple[int, ...]
    file_bytes: int
