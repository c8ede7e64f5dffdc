"""Which way a group may go from one owner to the next."""

from midstream.buffers.journal.change import Change
from midstream.buffers.journal.errors import OwnershipError
from midstream.buffers.journal.reading import group_of
from midstream.buffers.journal.records import State
from midstream.buffers.journal.schema import GroupRow

# From where a group may come to each state. None: the journal does not have it.
_FROM: dict[State, frozenset[State | None]] = {
    State.TAKEN: frozenset({None, State.BUFFERED}),
    State.BUFFERED: frozenset({None, State.TAKEN, State.HANDED}),
    State.HANDED: frozenset({State.TAKEN, State.BUFFERED}),
    State.DROPPED: frozenset({State.TAKEN, State.BUFFERED, State.HANDED}),
}
# Where its records may change.
CHANGEABLE = (State.TAKEN, State.BUFFERED)


def coming_to(change: Change, key: str, state: State) -> tuple[int, GroupRow] | None:
    """The group's row in force, None where it is new. Raises OwnershipError unless it may come to the state."""
    present = group_of(change.connection, key)
    if (None if present is None else State(present[1].state)) not in _FROM[state]:
        raise OwnershipError(
            f"group {key!r} is to be {state.value}, but {_where(present)}: each group has one owner at a time, and its"
            " key names no other group of the run"
        )
    return present


def present_in(change: Change, key: str, states: tuple[State, ...]) -> tuple[int, GroupRow]:
    """The group's row in force. Raises OwnershipError unless it is in one of the states."""
    present = group_of(change.connection, key)
    if present is None or State(present[1].state) not in states:
        wanted = " or ".join(state.value for state in states)
        raise OwnershipError(f"group {key!r} is to be changed while it is {wanted}, but {_where(present)}")
    return present


def _where(present: tuple[int, GroupRow] | None) -> str:
    if present is None:
        return "the journal does not have it: it was trained or dropped, or never taken"
    row = present[1]
    return f"is {row.state}" + ("" if row.step is None else f" to step {row.step}")
