"""What goes into a journal and what it answers: plain data."""

from collections.abc import Iterable, Sequence
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
class GroupStatus:
    """A group that the journal has, whoever owns it. ``step`` is the training step that it was handed to.

    ``begun_s`` is when it was first taken, ``since_s`` since when its owner has it, in seconds of the clock.
    ``lost`` of its rollouts are not among ``members``, because of damage.
    """

    key: str
    state: State
    step: int | None
    begun_s: float
    since_s: float
    members: tuple[Summary, ...]
    payload_bytes: int
    lost: int = 0

    @property
    def tokens(self) -> int:
        return sum(member.tokens for member in self.members)

    @property
    def turns(self) -> int:
        return sum(member.turns for member in self.members)

    @property
    def versions(self) -> tuple[int, int] | None:
        """The oldest and the newest policy version that made its tokens, None before the first."""
        return versions_of(self.members)


@dataclass(frozen=True)
class JournalStatus:
    """A journal at one moment, ``at_s`` in seconds of the clock.

    ``groups`` are there now, in the order in which they go on; ``trained`` and ``dropped`` (by reason) are
    what has become of the others since the run began. ``newest_version`` is that of the newest policy that
    any record shows, ``snapshots_in_use`` all that anything refers to, the checkpoints' past included.
    ``damaged_rows`` do not match their seals and are left out. ``file_bytes`` is what all lies in.
    """

    at_s: float
    groups: tuple[GroupStatus, ...]
    trained: Owned
    dropped: dict[str, Owned]
    newest_version: int | None
    snapshots_in_use: frozenset[str]
    checkpoints: tuple[int, ...]
    damaged_rows: int
    file_bytes: int

    def among(self, state: State) -> tuple[GroupStatus, ...]:
        """The groups in this state."""
        return tuple(group for group in self.groups if group.state is state)

    @property
    def taken(self) -> Owned:
        return _sums(self.among(State.TAKEN))

    @property
    def buffered(self) -> Owned:
        return _sums(self.among(State.BUFFERED))

    @property
    def handed(self) -> Owned:
        return _sums(self.among(State.HANDED))

    @property
    def is_damaged(self) -> bool:
        return self.damaged_rows > 0 or any(group.lost for group in self.groups)


def versions_of(members: Iterable[Summary]) -> tuple[int, int] | None:
    """The oldest and the newest policy version that made these rollouts' tokens, None where there are none."""
    versions = [v for m in members for v in (m.oldest_version, m.newest_version) if v is not None]
    return (min(versions), max(versions)) if versions else None


def _sums(groups: Sequence[GroupStatus]) -> Owned:
    return Owned(
        len(groups),
        sum(len(group.members) for group in groups),
        sum(group.tokens for group in groups),
        sum(group.turns for group in groups),
        sum(group.payload_bytes for group in groups),
    )
