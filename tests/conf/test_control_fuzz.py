"""Ten thousand malformed or hostile control files change nothing and stop nothing.

`MIDSTREAM_SOAK=20 python -m pytest tests/conf/test_control_fuzz.py` tries so many times as many.
"""

import contextlib
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.conf.control.changes import path_of
from midstream.conf.schema import LayerConfig
from tests.conf.tuned import control_of, layer_config, tuned, write

SOAK = int(os.environ.get("MIDSTREAM_SOAK", "1"))
MUTATIONS = 9_500 * SOAK
DRAWN = 500 * SOAK
SOUND = {
    "time": "2026-01-01T00:00:00+00:00",
    "who": "ann@node7",
    "changes": {"bounds.token": {"old": 16, "new": 8}},
    "values": {
        "bounds.token": 8,
        "bounds.deadline_s": 99.5,
        "curriculum.gate.by": "thompson",
        "curriculum.sampler.weights": {"math": 2.0, "später": 1},
        "curriculum.forget.surprise": None,
    },
    "undoes": None,
}
NASTY = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 30, "9" * 5000, "-0", "1.0", "1e2", "0x10", "01", "true",
    "null", "[]", "{}", '""', '"8"', '"\\ud800"', '"\\u0000"', '"\\u202e"', "[[8]]", '{"a": NaN}', '{"\\ud800": 1}',
    "[" * 20 + "]" * 20, "[" * 100 + "]" * 100, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000, "8, 9", "8 // 9",
)  # fmt: skip
"""In place of a value."""


class Job:
    """One that looks after each file; what is in force is checked against what the file says to a plain reader."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.base = run_dir, layer_config(run_dir)
        self.control = control_of(run_dir)
        tuned(run_dir, "bounds.token=12")
        self.settled = self.control.read()
        self.taken = self.tried = 0

    @property
    def version(self) -> int:
        """Of the next file."""
        return self.settled.version + 1

    def sound(self) -> bytes:
        return json.dumps({"version": self.version, **SOUND}).encode()

    def meets(self, content: bytes) -> None:
        """The job looks while a file holds this."""
        before = self.settled
        path = write(self.run_dir, self.version, content)
        self.settled = self.control.read()
        path.unlink()
        self.tried += 1
        if self.settled.changed:
            self.taken += 1
            said = json.loads(content, parse_constant=refuse)
            json.dumps(said, ensure_ascii=False).encode()
            assert said["version"] == self.settled.version == before.version + 1
            assert self.settled.layer == with_values(self.base, said["values"])
            assert self.settled.alarms == ()
        else:
            assert self.settled.layer is before.layer
            assert self.settled.version == before.version

    def looks(self) -> None:
        """The job looks at a folder as it is, which says nothing that may be taken up."""
        settled = self.control.read()
        assert not settled.changed and settled.layer is self.settled.layer


@dataclass
class Changed:
    """A sound file with other parts in it."""

    parts: dict[str, Any]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} was taken up")


def with_values(base: LayerConfig, values: dict[str, Any]) -> LayerConfig:
    told = base.model_dump()
    for key, value in values.items():
        *sections, name = key.split(".")
        part = told
        for section in sections:
            part = part[section]
        assert name in part
        part[name] = value
    return LayerConfig.model_validate(told)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("fuzzed") / "run")


def mutated(sound: bytes, chance: random.Random) -> bytes:
    """What is left of a sound file after one to three accidents."""
    content = bytearray(sound)
    for _ in range(chance.randint(1, 3)):
        if not content:
            break
        at, to = sorted(chance.choices(range(len(content)), k=2))
        match chance.randrange(6):
            case 0:
                content[at] = chance.randrange(256)
            case 1:
                content[at] ^= 1 << chance.randrange(8)
            case 2:
                del content[at:to]
            case 3:
                content[at:at] = content[at:to]
            case 4:
                content[at:at] = chance.randbytes(chance.randint(1, 8))
            case _:
                content[at] = chance.choice(b'0123456789-.eE"{}[],: ntf')
    return bytes(content)


def test_a_sound_file_is_taken_up(job: Job) -> None:
    taken = job.taken
    job.meets(job.sound())
    assert job.taken == taken + 1 and job.settled.layer.curriculum.sampler.weights == {"math": 2, "später": 1}


def test_a_file_cut_off_anywhere_changes_nothing(job: Job) -> None:
    taken, sound = job.taken, job.sound()
    for length in range(len(sound)):
        job.meets(sound[:length])
        job.meets(sound[:length] + bytes(len(sound) - length))
    assert job.taken == taken


def test_accidents_to_a_sound_file(job: Job) -> None:
    chance = random.Random(0)
    taken, tried = job.taken, job.tried
    for _ in range(MUTATIONS):
        job.meets(mutated(job.sound(), chance))
    # A digit of a date, or of a value within its range.
    assert 0 < job.taken - taken < (job.tried - tried) / 2


@pytest.mark.parametrize("key", ["version", *SOUND, *SOUND["values"], "new", "math"])
def test_nasty_values_in_each_place(job: Job, key: str) -> None:
    for value in NASTY:
        marked = json.loads(
            job.sound(), object_hook=lambda part: {**part, **({key: "HERE"} if key in part else {})}
        )
        job.meets(json.dumps(marked).replace('"HERE"', value).encode())
    assert job.control.read().version == job.settled.version


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 4096,
        b"\xef\xbb\xbf{}",
        '{"version": 1}'.encode("utf-16"),
        b'{"a": 1}' * 2,
        b"[" * 500_000,
        b'{"x":1,' + b",".join(b'"%d":1' % n for n in range(90_000)) + b"}",
        b'{"values": {' + b",".join(b'"%d":1' % n for n in range(90_000)) + b"}}",
        b'{"' + b"x" * 1_000_000 + b'": 1}',
        b" " * (1 << 24),
    ],
    ids=["empty", "zeros", "bom", "utf-16", "twice", "deep", "keys", "values", "long key", "large"],
)
def test_whole_files_of_nonsense(job: Job, content: bytes) -> None:
    taken = job.taken
    job.meets(content)
    assert job.taken == taken


def test_twins_and_strangers_in_a_sound_file(job: Job) -> None:
    taken = job.taken
    for more in ('"values": {}, ', '"version": 1, ', '"stranger": 1, '):
        job.meets(job.sound().replace(b'"time"', more.encode() + b'"time"'))
    job.meets(job.sound().replace(b'"bounds.token": 8', b'"bounds.token": 7, "bounds.token": 8'))
    assert job.taken == taken


plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["mean", "drop", 8])
)  # fmt: skip
anything = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
keys = st.sampled_from([*SOUND["values"], "bounds.beyond", "max_attempts", "bounds", "", "."])
values = st.dictionaries(keys, anything, max_size=3).map(lambda drawn: {"values": drawn})
confused = st.dictionaries(st.sampled_from(["version", *SOUND, "more"]), anything, min_size=1, max_size=2)


@settings(max_examples=DRAWN, deadline=None, database=None)
@given(drawn=st.binary(max_size=32) | anything | values.map(Changed) | confused.map(Changed))
def test_whatever_else_there_may_be(job: Job, drawn: Any) -> None:
    if isinstance(drawn, Changed):
        drawn = json.loads(job.sound()) | drawn.parts
    job.meets(drawn if isinstance(drawn, bytes) else json.dumps(drawn).encode())


def strange_names(chance: random.Random) -> Iterator[str]:
    for _ in range(300):
        name = "".join(chance.choices("0123456789٠²-+. \n\x1b\udcff'\"%", k=chance.randint(1, 12)))
        yield name + chance.choice([".json", ".JSON", ".json.json", "", "\u200b.json"])
    yield from (
        "9" * 200 + ".json",
        "000000.json",
        "-00001.json",
        "1e3.json",
        "０００００９.json",
        "00000x.json",
    )


def test_files_with_strange_names(job: Job) -> None:
    sound = job.sound()
    made = set()
    for name in strange_names(random.Random(1)):
        path = job.run_dir / "control" / name
        if (
            name not in (".", "..")
            and path not in made
            and path.name not in ("base.json", "acknowledged.json")
        ):
            path.write_bytes(sound)
            made.add(path)
    made.discard(path_of(job.run_dir, job.version))
    job.looks()
    job.control.acknowledge(7)
    for path in made:
        path.unlink()
    job.looks()


def test_links_pipes_and_folders_in_all_places(job: Job) -> None:
    folder = job.run_dir / "control"
    for number in range(60):
        path = path_of(job.run_dir, job.version + number)
        match number % 4:
            case 0:
                path.mkdir()
            case 1:
                os.mkfifo(path)
            case 2:
                path.symlink_to(path.name)
            case _:
                path.symlink_to(folder)
    job.looks()
    for number in range(60):
        path = path_of(job.run_dir, job.version + number)
        with contextlib.suppress(IsADirectoryError):
            path.unlink()
        if number % 4 == 0:
            path.rmdir()
    job.looks()
