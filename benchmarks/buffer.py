"""What the buffer costs a job while many rollouts wait in it: who goes next, and who owns which on disk.

The journal holds so many rollouts of so many tokens while single groups are taken, updated, buffered, handed to
training and dropped; as many wait in memory (`waiting.py`), taken and added again. Beside them: a rollout turned
into the journal's bytes and back, and one file of all, as a host's own save would be. Records are random, as are
their log-probs, in single precision; only a few differ, which is nothing to the journal, and in memory the others
share their lists. The process's memory is compared after three times as much history of both.

    python benchmarks/buffer.py [--json] [--quick] [--rollouts N] [--tokens T] [--operations K]
"""

import argparse
import gc
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

from result import publish, target
from rollouts import Rollouts, random_rollout
from waiting import TIMED, Waiters

from midstream.buffers.journal.encoding import decode, encode
from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.records import Group, Member
from midstream.buffers.rollout import PartialRollout
from midstream.envs.pool.metrics import percentile

ROLLOUTS, QUICK_ROLLOUTS = 10_000, 500
TOKENS, QUICK_TOKENS = 32_768, 4_096
OPERATIONS, QUICK_OPERATIONS = 1_000, 300
# So many different records; each is used for many rollouts, of which the journal does not know.
RECORDS = 16
ROUNDS = 3
TOP_MS, TOP_GROWTH = 1.0, 1.05

OPERATIONS_TIMED = ("take", "update", "buffer", "take again", "hand", "drop")
# Of a rollout that has no tokens yet.
NEW_BYTES = 2_000
# The one file of all is measured with at most so many rollouts, and scaled.
MOST_SAVED = 500

Entries = list[dict[str, Any]]
Times = dict[str, list[float]]
P = ParamSpec("P")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--quick", action="store_true", help="a minute's version: 500 rollouts of 4,096 tokens"
    )
    parser.add_argument("--rollouts", type=int, default=None, help="that wait (default 10000, quick 500)")
    parser.add_argument("--tokens", type=int, default=None, help="of each (default 32768, quick 4096)")
    parser.add_argument("--operations", type=int, default=None, help="of each kind (default 1000, quick 300)")
    options = parser.parse_args()
    rollouts = options.rollouts or (QUICK_ROLLOUTS if options.quick else ROLLOUTS)
    tokens = options.tokens or (QUICK_TOKENS if options.quick else TOKENS)
    operations = options.operations or (QUICK_OPERATIONS if options.quick else OPERATIONS)
    records = [random_rollout(seed, tokens) for seed in range(RECORDS)]
    with tempfile.TemporaryDirectory(prefix="midstream-buffer-") as scratch:
        targets, rows = measure(Path(scratch), records, rollouts, operations)
    publish(targets, rows, as_json=options.json)


def fill(journal: Journal, rollouts: Rollouts, count: int) -> None:
    for number in range(count):
        journal.buffered([Group(f"waits-{number}", (rollouts.next(),))])


def play(journal: Journal, rollouts: Rollouts, step: int, operations: int) -> Times:
    """The way of so many groups through the buffer, each on its own; as many wait afterwards as before."""
    times: Times = {name: [] for name in OPERATIONS_TIMED}
    new = (Member(bytes(NEW_BYTES)),)
    for number in range(operations):
        key, cut_off, later = f"{step}-{number}", rollouts.next(), rollouts.next()
        times["take"].append(ms(journal.taken, [Group(key, new)]))
        times["update"].append(ms(journal.updated, key, {0: cut_off}))
        times["buffer"].append(ms(journal.buffered, [Group(key, (later,))]))
        times["take again"].append(ms(journal.taken, [Group(key)]))
        if number % 2:
            times["hand"].append(ms(journal.handed, [key], step))
        else:
            times["drop"].append(ms(journal.dropped, [key], "stale"))
    return times


def translate(records: list[PartialRollout]) -> Times:
    """Between rollouts and the bytes that the journal keeps."""
    payloads = [encode(record) for record in records]
    return {
        "encode": [ms(encode, record) for record in records],
        "decode": [ms(decode, payload) for payload in payloads],
    }


def save_one_file(path: Path, records: list[PartialRollout], count: int) -> None:
    """What a host's own save does: every waiting group goes into one file."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        for number in range(count):
            pickle.dump([records[number % len(records)].to_json()], file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def measure(
    scratch: Path, records: list[PartialRollout], waiting: int, operations: int
) -> tuple[Entries, Entries]:
    """Targets and rows, with so many rollouts waiting and so many operations of a kind in a round."""
    rollouts, waiters = Rollouts(records), Waiters(records, waiting)
    translated = [translate(records) for _ in range(ROUNDS)]
    with Journal(scratch / "journal") as journal:
        filled_ms = ms(fill, journal, rollouts, waiting)
        played, queued, resident, ended = [], [], [], []
        # A round before, which nobody counts, fills caches.
        for step in range(ROUNDS + 1):
            played.append(play(journal, rollouts, step, operations))
            queued.append(waiters.play(operations))
            ended.append(
                {
                    "what": "step",
                    "number": step,
                    "trained": operations // 2,
                    "train_ms": round(ms(journal.trained, step), 2),
                    "checkpoint_ms": round(ms(journal.checkpoint, step), 2),
                }
            )
            resident.append(resident_bytes())
        del played[0], queued[0]
        rolled_back_ms = ms(journal.roll_back, ROUNDS)
        status = journal.status()
    saved = min(waiting, MOST_SAVED)
    saved_ms = ms(save_one_file, scratch / "all.pkl", records, saved)
    timed = merged(played) | merged(queued) | merged(translated)
    rows: Entries = [row_of(name, values) for name, values in timed.items()]
    rows += ended
    rows.append(
        {
            "what": "journal",
            "rollouts": waiting,
            "tokens": len(records[0].tokens),
            "record_bytes": len(encode(records[0])),
            "file_bytes": status.file_bytes,
            "filled_s": round(filled_ms / 1000, 2),
            "roll_back_s": round(rolled_back_ms / 1000, 2),
            "resident_mib": [size >> 20 for size in resident],
        }
    )
    rows.append(
        {
            "what": "one file of all, at each save",
            "rollouts": waiting,
            "bytes": (scratch / "all.pkl").stat().st_size * waiting // saved,
            "seconds": round(saved_ms / 1000 * waiting / saved, 2),
            "measured_with": saved,
        }
    )
    return targets_of(played, queued, translated, resident), rows


def targets_of(
    played: list[Times], queued: list[Times], translated: list[Times], resident: list[int]
) -> Entries:
    both = [
        median(times["encode"]) + median(step["buffer"])
        for times, step in zip(translated, played, strict=True)
    ]
    growth = [resident[-1] / resident[1]]
    return [
        *(
            target(f"{name}, median", [median(times[name]) for times in rounds], "ms", "<=", TOP_MS)
            for names, rounds in ((OPERATIONS_TIMED, played), (TIMED, queued))
            for name in names
        ),
        target("encode and buffer, median", both, "ms", "<=", TOP_MS),
        target(f"memory after {ROUNDS} times the history / once", growth, "ratio", "<=", TOP_GROWTH),
    ]


def row_of(name: str, values: list[float]) -> dict[str, Any]:
    ordered = sorted(values)
    return {
        "what": name,
        "count": len(ordered),
        "p50_ms": round(percentile(ordered, 0.5), 3),
        "p99_ms": round(percentile(ordered, 0.99), 3),
        "max_ms": round(ordered[-1], 3),
    }


def ms(operation: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> float:
    """How many milliseconds the call takes."""
    started = time.perf_counter()
    operation(*arguments, **named)
    return (time.perf_counter() - started) * 1000


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def merged(rounds: list[Times]) -> Times:
    return {name: [value for each in rounds for value in each[name]] for name in rounds[0]}


def median(values: list[float]) -> float:
    return percentile(sorted(values), 0.5)


if __name__ == "__main__":
    main()
