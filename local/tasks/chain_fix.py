"""chain-fix: the demo's tasks, in the JSONL shape of a coding agent's data.

A workspace holds one-line files, `ok next f5` or `bad end`. The prompt names the start of a hidden chain of
them. The agent reads a file (`cat f3`), toggles its state (`fix f3`, which tells the new state and not the
next file) and ends with `submit`. It succeeds when it has submitted, every file of the chain is ok and every
other file is as it was.

Chain lengths have a heavy tail, and so has the time of a `fix`, a build and test run in miniature: it grows
with the chain and with the file's own Pareto factor. Long tasks are the harder and the slower ones, so what
is cut off for being slow is not a fair sample of the work.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from midstream.local.tasks.lines import TaskLine, write_lines

FILES = tuple(f"f{i}" for i in range(8))
SUBMIT = "submit"  # the configuration's `done_command` for these tasks
MARKER = ".submitted"  # what `submit` leaves for the check

MAX_IDEAL_TURNS = 12  # no task needs more turns than this: one `cat` a link, one `fix` a bad link, `submit`
BAD_PROBABILITY = 0.5
CHAIN_TAIL = 1.2  # Pareto index of the chain length before it is rounded down and capped
FIX_TAIL = 1.2  # Pareto index of the time of a `fix`
MIN_FIX_S = 0.02  # fastest `fix` of a one-link chain at difficulty 1
MAX_FIX_S = 2.0

Split = Literal["train", "held_out", "demonstrations"]


@dataclass(frozen=True)
class ChainTask:
    """One task: the chain from its start, each file's line, and the seconds that fixing each file takes."""

    chain: tuple[str, ...]
    lines: dict[str, str]
    fix_s: dict[str, float]

    @property
    def bad_links(self) -> tuple[str, ...]:
        return tuple(name for name in self.chain if self.lines[name].startswith("bad "))

    @property
    def prompt(self) -> str:
        return f"start {self.chain[0]} <act>"

    def solution(self) -> list[str]:
        """The shortest list of actions that succeeds."""
        actions = []
        for name in self.chain:
            actions.append(f"cat {name}")
            if name in self.bad_links:
                actions.append(f"fix {name}")
        return [*actions, SUBMIT]

    def solved_lines(self) -> dict[str, str]:
        return {
            name: line.replace("bad ", "ok ") if name in self.chain else line
            for name, line in self.lines.items()
        }

    def to_json(self) -> TaskLine:
        """The task as a line of the tasks file: `prompt`, `label`, `metadata`."""
        solution = self.solution()
        return {
            "prompt": self.prompt,
            "label": " ; ".join(solution),
            "metadata": {
                "files": {".bashrc": _bashrc(self.fix_s)} | {n: f"{s}\n" for n, s in self.lines.items()},
                "pre_commands": [],
                "eval_cmd": _eval_cmd(self.solved_lines()),
                "workdir": ".",
                "chain_length": len(self.chain),
                "ideal_turns": len(solution),
            },
        }


def chain_tasks(*, seed: int, difficulty: float, split: Split = "train") -> Iterator[ChainTask]:
    """Yield tasks without end; the same arguments yield the same tasks.

    `difficulty` in [0, 1] lengthens the chains and slows every `fix`. Tasks of different seeds or splits are
    drawn independently.
    """
    if not 0.0 <= difficulty <= 1.0:
        raise ValueError(f"difficulty is {difficulty}; it must lie between 0 (easiest) and 1 (hardest)")
    draw = random.Random(f"chain-fix/{split}/{seed}/{difficulty}")
    while True:
        yield _draw_task(draw, difficulty)


def write_tasks(path: Path, count: int, *, seed: int, difficulty: float, split: Split = "train") -> Path:
    """Write `count` tasks as JSONL to `path`, whole or not at all, and return it."""
    if count < 1:
        raise ValueError(f"the number of tasks is {count}; at least 1 is needed")
    tasks = chain_tasks(seed=seed, difficulty=difficulty, split=split)
    return write_lines(path, (task.to_json() for task in islice(tasks, count)))


def _draw_task(draw: random.Random, difficulty: float) -> ChainTask:
    length = min(len(FILES), int((1.0 + difficulty) * draw.paretovariate(CHAIN_TAIL)))
    chain = tuple(draw.sample(FILES, length))
    lines = {}
    for name, successor in zip(chain, (*chain[1:], None), strict=True):
        lines[name] = f"{_draw_bad_or_ok(draw)} {f'next {successor}' if successor else 'end'}"
    _make_worthwhile(draw, chain, lines)
    for name in FILES:
        if name not in lines:
            pointer = draw.choice(["end", *(f"next {other}" for other in FILES if other != name)])
            lines[name] = f"{_draw_bad_or_ok(draw)} {pointer}"
    shortest_s = MIN_FIX_S * max(difficulty, 0.1) * length
    fix_s = {n: round(min(MAX_FIX_S, shortest_s * draw.paretovariate(FIX_TAIL)), 4) for n in FILES}
    return ChainTask(chain, {name: lines[name] for name in FILES}, fix_s)


def _draw_bad_or_ok(draw: random.Random) -> str:
    return "bad" if draw.random() < BAD_PROBABILITY else "ok"


def _make_worthwhile(draw: random.Random, chain: tuple[str, ...], lines: dict[str, str]) -> None:
    """Leave at least one bad link, and no more than `MAX_IDEAL_TURNS` has room for."""
    bad = [name for name in chain if lines[name].startswith("bad ")]
    if not bad:
        name = draw.choice(chain)
        lines[name] = lines[name].replace("ok ", "bad ")
    surplus = len(chain) + len(bad) + 1 - MAX_IDEAL_TURNS
    for name in draw.sample(bad, max(surplus, 0)):
        lines[name] = lines[name].replace("bad ", "ok ")


def _bashrc(fix_s: dict[str, float]) -> str:
    """The commands as shell functions on builtins: only a `fix` starts a process, which sleeps.

    A `fix` that is killed while it sleeps has written nothing.
    """
    seconds = " ".join(f"[{name}]={fix_s[name]}" for name in FILES)
    return f"""\
declare -gA fix_s=({seconds})
command_not_found_handle() {{ echo error; return 127; }}
cat() {{
  local line
  if [[ $# != 1 || ! -f $1 ]]; then echo error; return 1; fi
  read -r line <"$1"
  echo "$line"
}}
fix() {{
  local state pointer
  if [[ $# != 1 || ! -f $1 ]]; then echo error; return 1; fi
  read -r state pointer <"$1"
  if [[ $state == ok ]]; then state=bad; else state=ok; fi
  sleep "${{fix_s[$1]}}"
  echo "$state $pointer" >"$1"
  echo "$state"
}}
{SUBMIT}() {{
  : >{MARKER}
  echo done
}}
"""


def _eval_cmd(solved_lines: dict[str, str]) -> str:
    expected = "\n".join(solved_lines[name] for name in FILES)
    return f'test -e {MARKER} && test "$(cat {" ".join(FILES)})" = "{expected}"'
