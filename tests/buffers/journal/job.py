"""A job that a test kills: it takes, cuts off, resumes, trains and saves, until then.

Run as `python -m tests.buffers.journal.job DIRECTORY SEED`. It goes on from the last checkpoint that it has told of,
given as a third argument, and prints a line of JSON for each checkpoint once it is made: its number, and what each
group's rollouts must be after a roll-back to it.
"""

import json
import random
import sys
from pathlib import Path

from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.records import Group, Member, Summary

PAYLOAD_BYTES = 40_000


def payload(number: int) -> bytes:
    return number.to_bytes(8, "big") * (PAYLOAD_BYTES // 8)


def member(number: int) -> Member:
    return Member(payload(number), Summary(tokens=number, snapshots=(str(number), str(number - 1))))


def play(journal: Journal, draws: random.Random, step: int) -> None:
    held: dict[str, list[int]] = {
        waiting.key: [summary.tokens for summary in waiting.members] for waiting in journal.waiting()
    }
    number = 0
    while True:
        for _ in range(draws.randrange(1, 5)):
            number += 1
            key = f"{step}-{number}"
            held[key] = [draws.randrange(1_000_000) for _ in range(2)]
            journal.taken([Group(key, tuple(map(member, held[key])))])
            held[key][0] = draws.randrange(1_000_000)
            journal.updated(key, {0: member(held[key][0])})
            journal.buffered([Group(key)])
        gone = draws.sample(sorted(held), k=len(held) // 2)
        journal.taken([Group(key) for key in gone])
        journal.handed(gone, step)
        handed = {key: held.pop(key) for key in gone}
        if draws.random() < 0.5 and handed:
            journal.dropped([dropped := min(handed)], "stale")
            del handed[dropped]
        if draws.random() < 0.5:
            journal.trained(step)
        journal.checkpoint(step)
        print(json.dumps({"step": step, "held": held}), flush=True)
        step += 1


if __name__ == "__main__":
    with Journal(Path(sys.argv[1])) as opened:
        last = int(sys.argv[3]) if len(sys.argv) > 3 else -1
        opened.roll_back(last)
        play(opened, random.Random(sys.argv[2]), last + 1)
