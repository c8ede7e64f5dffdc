"""Checkpoints of a journal, and the way back to one."""

import json
from typing import Any

from midstream.buffers.journal.change import Change
from midstream.buffers.journal.errors import JournalError
from midstream.buffers.journal.reading import check_file, checkpoints, groups_in, is_whole
from midstream.buffers.journal.records import State
from midstream.buffers.journal.schema import CHECKPOINTS, GROUPS, MEMBERS, CheckpointRow, sealed

DAMAGED = "damaged"
_LIVE = (State.TAKEN, State.BUFFERED, State.HANDED)


def mark(change: Change, rollout_id: int, keep: int, note: str) -> None:
    """Makes this transaction the checkpoint `rollout_id`, and deletes what only older ones than `keep` needed."""
    tallies = change.connection.execute("SELECT * FROM tallies").fetchall()
    row = CheckpointRow(rollout_id, change.number, json.dumps(tallies), note)
    for table in CHECKPOINTS:
        change.connection.execute(f"DELETE FROM {table.name} WHERE id = ?", (rollout_id,))
        change.connection.execute(table.insert, sealed(row))
        oldest = f"SELECT id FROM {table.name} ORDER BY mark DESC LIMIT -1 OFFSET ?"
        change.connection.execute(f"DELETE FROM {table.name} WHERE id IN ({oldest})", (keep,))
    needed = "EXISTS (SELECT 1 FROM checkpoints WHERE mark >= since AND mark < until)"
    for rows in (GROUPS.name, MEMBERS.name):
        change.delete(rows, f"until IS NOT NULL AND NOT {needed}")
    change.mark = change.number


def roll_back(change: Change, rollout_id: int | None) -> list[str]:
    """Returns to the checkpoint; returns the keys of the groups that are damaged, which are dropped.

    Raises:
        JournalError: there is no such checkpoint.
        JournalDamaged: rows have to be left out first, see `rebuild`.
    """
    chosen = _chosen(change, rollout_id)
    check_file(change.connection)
    change.connection.execute("REINDEX")
    _undo(change, chosen)
    damaged = _drop_damaged(change)
    for number, row in groups_in(change.connection, (State.TAKEN, State.HANDED)):
        if chosen is not None and row.step is not None and row.step <= chosen.id:
            change.end_group(number, row, State.TRAINED)
        else:
            waits = row._replace(since=change.number, state=State.BUFFERED.value, step=None)
            change.put_group(waits, (number, row))
    return damaged


def _chosen(change: Change, rollout_id: int | None) -> CheckpointRow | None:
    if rollout_id is None or rollout_id < 0:
        return None
    found = checkpoints(change.connection)
    for row in found:
        if row.id == rollout_id:
            return row
    present = ", ".join(str(row.id) for row in found) or "none"
    raise JournalError(
        f"the journal has no checkpoint {rollout_id}, only {present}: load one of these, keep more with"
        " midstream.journal.keep_checkpoints, or set another run_dir to begin with an empty buffer"
    )


def _undo(change: Change, chosen: CheckpointRow | None) -> None:
    """Deletes what came into force after the checkpoint, and revives what went out of force after it."""
    change.mark = 0 if chosen is None else chosen.mark
    for table in CHECKPOINTS:
        change.connection.execute(f"DELETE FROM {table.name} WHERE mark > ?", (change.mark,))
    for name in (GROUPS.name, MEMBERS.name):
        change.delete(name, "since > ?", (change.mark,))
    for values in change.connection.execute(f"{GROUPS.select} WHERE until > ?", (change.mark,)).fetchall():
        change.set_until(GROUPS, *GROUPS.parse(values), None)
    for values in change.connection.execute(f"{MEMBERS.select} WHERE until > ?", (change.mark,)).fetchall():
        change.set_until(MEMBERS, *MEMBERS.parse(values), None)
    change.connection.execute("DELETE FROM tallies")
    tallies: list[list[Any]] = [] if chosen is None else json.loads(chosen.tallies)
    change.connection.executemany("INSERT INTO tallies VALUES (?, ?, ?, ?, ?, ?, ?)", tallies)


def _drop_damaged(change: Change) -> list[str]:
    """Drops the groups that are not whole, and what is left of those whose state is lost."""
    orphans = "until IS NULL AND key NOT IN (SELECT key FROM groups WHERE until IS NULL)"
    query = f"SELECT DISTINCT key FROM members WHERE {orphans}"
    damaged = [key for (key,) in change.connection.execute(query)]
    change.delete(MEMBERS.name, orphans)
    change.connection.execute("DELETE FROM payloads WHERE member NOT IN (SELECT id FROM members)")
    for number, row in groups_in(change.connection, _LIVE):
        if not is_whole(change.connection, row):
            change.end_group(number, row, State.DROPPED, DAMAGED)
            damaged.append(row.key)
    return damaged
