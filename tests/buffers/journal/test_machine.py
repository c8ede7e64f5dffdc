"""Whatever happens to groups, in any order and with kills between: the journal and a simple model of it agree.

`MIDSTREAM_SOAK=20 python -m pytest tests/buffers` plays so many times 60 runs.
"""

import copy
import os
import shutil
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from midstream.buffers.journal.errors import JournalError, OwnershipError
from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.records import Group, Member, Summary

KEEP = 2
EXAMPLES = 60 * int(os.environ.get("MIDSTREAM_SOAK", "1"))
Members = list[Member]


@dataclass
class Held:
    """What the model knows of a group."""

    state: str
    members: Members
    place: int
    step: int | None = None


@dataclass
class Model:
    held: dict[str, Held] = field(default_factory=dict)
    trained: int = 0
    dropped: int = 0

    def snapshots(self) -> set[str]:
        return {s for held in self.held.values() for member in held.members for s in member.summary.snapshots}


payloads = st.one_of(st.binary(max_size=20), st.integers(1, 3).map(lambda n: bytes([n]) * 30_000))
members = st.builds(
    Member,
    payloads,
    st.builds(
        Summary,
        tokens=st.integers(0, 9),
        turns=st.integers(0, 3),
        snapshots=st.lists(st.integers(0, 5).map(str), max_size=3, unique=True).map(tuple),
    ),
)
some_members = st.lists(members, min_size=1, max_size=3)
draws = st.integers(0, 1_000_000)


class AnyJournal(RuleBasedStateMachine):
    """Take, update, buffer, resume, fork, hand, train, drop, checkpoint, roll back, close, and kill."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="midstream-journal-"))
        self.directory = self.root / "0"
        self.model = Model()
        self.checkpoints: dict[int, Model] = {}
        self.made = self.opened = self.step = self.places = 0
        self.in_use: set[str] = set()
        self.released: frozenset[str] | None = None

    @initialize()
    def begin(self) -> None:
        self.journal = Journal(self.directory, keep_checkpoints=KEEP)

    def teardown(self) -> None:
        self.journal.close()
        with closing(sqlite3.connect(self.directory / "journal.sqlite")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            unused = "SELECT * FROM payloads WHERE member NOT IN (SELECT id FROM members)"
            assert connection.execute(unused).fetchall() == []
        shutil.rmtree(self.root)

    def among(self, draw: int, *states: str) -> str | None:
        keys = [key for key, held in self.model.held.items() if held.state in states]
        return keys[draw % len(keys)] if keys else None

    def place(self) -> int:
        self.places += 1
        return self.places

    @rule(new=some_members)
    def take(self, new: Members) -> None:
        self.made += 1
        self.released = self.journal.taken([Group(f"g{self.made}", tuple(new))])
        self.model.held[f"g{self.made}"] = Held("taken", new, self.place())

    @rule(draw=draws, changed=members)
    def update(self, draw: int, changed: Member) -> None:
        if key := self.among(draw, "taken", "buffered"):
            held = self.model.held[key]
            position = draw % len(held.members)
            self.released = self.journal.updated(key, {position: changed})
            held.members = [*held.members[:position], changed, *held.members[position + 1 :]]

    @rule(draw=draws, new=st.none() | some_members)
    def buffer(self, draw: int, new: Members | None) -> None:
        if key := self.among(draw, "taken", "handed"):
            held = self.model.held[key]
            self.released = self.journal.buffered([Group(key, None if new is None else tuple(new))])
            self.model.held[key] = Held("buffered", held.members if new is None else new, self.place())

    @rule(draw=draws, new=st.none() | some_members)
    def resume(self, draw: int, new: Members | None) -> None:
        if key := self.among(draw, "buffered"):
            held = self.model.held[key]
            self.released = self.journal.taken([Group(key, None if new is None else tuple(new))])
            self.model.held[key] = Held("taken", held.members if new is None else new, held.place)

    @rule(draw=draws)
    def fork(self, draw: int) -> None:
        if key := self.among(draw, "taken", "buffered"):
            self.made += 1
            forks = self.model.held[key].members[:1] * 2
            self.released = self.journal.buffered([Group(f"g{self.made}", tuple(forks))])
            self.model.held[f"g{self.made}"] = Held("buffered", forks, self.place())

    @rule(draw=draws, ahead=st.integers(0, 2))
    def hand(self, draw: int, ahead: int) -> None:
        if key := self.among(draw, "taken", "buffered"):
            self.journal.handed([key], self.step + ahead)
            held = self.model.held[key]
            held.state, held.step = "handed", self.step + ahead

    @rule()
    def train(self) -> None:
        self.released = self.journal.trained(self.step)
        self.train_in_model(self.step)
        self.step += 1

    def train_in_model(self, step: int) -> None:
        for key, held in list(self.model.held.items()):
            if held.state == "handed" and held.step is not None and held.step <= step:
                del self.model.held[key]
                self.model.trained += 1

    @rule(draw=draws)
    def drop(self, draw: int) -> None:
        if key := self.among(draw, "taken", "buffered", "handed"):
            self.released = self.journal.dropped([key], "stale")
            del self.model.held[key]
            self.model.dropped += 1

    @rule(draw=draws)
    def ask_for_what_cannot_be(self, draw: int) -> None:
        with pytest.raises(JournalError, match="has no checkpoint 999"):
            self.journal.roll_back(999)
        if key := self.among(draw, "taken", "handed"):
            with pytest.raises(OwnershipError, match=key):
                # What came before it in the same call does not happen either.
                self.journal.taken([Group("new", (Member(b""),)), Group(key)])

    @rule(draw=draws, load=st.booleans())
    def save_or_load(self, draw: int, load: bool) -> None:
        if load and self.checkpoints:
            self.roll_back(list(self.checkpoints)[-1 - draw % len(self.checkpoints)])
        else:
            self.checkpoint()

    def checkpoint(self) -> None:
        self.released = self.journal.checkpoint(self.step)
        self.checkpoints.pop(self.step, None)
        self.checkpoints[self.step] = copy.deepcopy(self.model)
        while len(self.checkpoints) > KEEP:
            del self.checkpoints[next(iter(self.checkpoints))]

    def roll_back(self, step: int) -> None:
        restored = self.journal.roll_back(step)
        assert restored.damaged == ()
        self.model = copy.deepcopy(self.checkpoints[step])
        while next(reversed(self.checkpoints)) != step:
            self.checkpoints.popitem()
        self.train_in_model(step)
        for held in self.model.held.values():
            held.state, held.step = "buffered", None
        self.step = step + 1
        assert [waiting.key for waiting in restored.waiting] == self.in_order()

    @rule(killed=st.booleans(), afresh=st.integers(0, 5).map(lambda n: n == 0))
    def open_again(self, killed: bool, afresh: bool) -> None:
        self.opened += 1
        after = self.root / str(self.opened)
        if killed:
            # The files are those that a killed process would leave.
            shutil.copytree(self.directory, after)
        self.journal.close()
        self.directory = after if killed else self.directory
        self.journal = Journal(self.directory, keep_checkpoints=KEEP)
        if afresh:
            assert self.journal.roll_back(-1).waiting == ()
            self.model, self.checkpoints = Model(), {}

    def in_order(self) -> list[str]:
        waiting = [(held.place, key) for key, held in self.model.held.items() if held.state == "buffered"]
        return [key for _, key in sorted(waiting)]

    @invariant()
    def the_same_groups_wait_in_the_same_order(self) -> None:
        waiting = self.journal.waiting()
        assert [group.key for group in waiting] == self.in_order()
        for group in waiting:
            assert list(group.members) == [member.summary for member in self.model.held[group.key].members]

    @invariant()
    def every_group_has_its_records(self) -> None:
        for key, held in self.model.held.items():
            assert list(self.journal.load(key)) == held.members

    @invariant()
    def counts_agree(self) -> None:
        status = self.journal.status()
        states = [held.state for held in self.model.held.values()]
        assert status.taken.groups == states.count("taken")
        assert status.buffered.groups == states.count("buffered")
        assert status.handed.groups == states.count("handed")
        assert status.trained.groups == self.model.trained
        assert sum(dropped.groups for dropped in status.dropped.values()) == self.model.dropped
        assert status.checkpoints == tuple(self.checkpoints)

    @invariant()
    def snapshots_in_use_stay_and_no_others(self) -> None:
        in_use = self.model.snapshots().union(*(model.snapshots() for model in self.checkpoints.values()))
        assert self.journal.snapshots_in_use() == in_use
        if self.released is not None:
            assert self.released == self.in_use - in_use
        self.in_use, self.released = in_use, None


TestAnyJournal = AnyJournal.TestCase
TestAnyJournal.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
