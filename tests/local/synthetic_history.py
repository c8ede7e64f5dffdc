"""Writes what a curriculum would write of a run, so that its part of the report can be tested without one."""

import json
import random
from pathlib import Path
from typing import Any

from midstream.buffers.curriculum.history import FOLDER, HISTORY
from midstream.buffers.curriculum.tally import BINS

_COUNTS = ("prompts", "known", "played", "ended", "informative", "skipped", "explored", "relaxed", "stopped")
KINDS = {"easy": (70, 0.96), "medium": (40, 0.3), "hopeless": (18, 0.02)}
"""Prompts and first pass rate."""


def source(**counts: Any) -> dict[str, Any]:
    """A source in one step, of which nothing has happened but what is said."""
    nothing = dict.fromkeys(_COUNTS, 0) | {"tokens_saved": 0.0}
    return nothing | {"pass_rates": [0] * BINS, "calibration": [[0.0, 0.0, 0]] * BINS} | counts


def line(step: int, **sources: dict[str, Any]) -> str:
    return json.dumps({"step": step, "version": step, "sources": sources}) + "\n"


def append(strategy_dir: Path, *lines: str) -> Path:
    path = strategy_dir / FOLDER / HISTORY
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(lines)
    return path


def write_history(strategy_dir: Path, steps: int) -> Path:
    """A run in which what is uninformative is found, and medium prompts are learnt."""
    draw = random.Random(0)
    lines = []
    for step in range(steps):
        learnt = 0.5 * step / max(1, steps)
        lines.append(line(step, **{name: _source(draw, name, step, learnt) for name in KINDS}))
    return append(strategy_dir, *lines)


def _source(draw: random.Random, name: str, step: int, learnt: float) -> dict[str, Any]:
    prompts, rate = KINDS[name]
    rate = rate + learnt if name == "medium" else rate
    known = min(prompts, 4 * (step + 1))
    rates = [0] * BINS
    for _ in range(known):
        believed = draw.gauss(rate, 0.15)
        rates[min(BINS - 1, max(0, int(BINS * believed)))] += 1
    played = 6 if name == "medium" else 2 if step < 3 else 1
    calibration = [[0.0, 0.0, 0] for _ in range(BINS)]
    for _ in range(played):
        predicted = min(0.99, max(0.0, draw.gauss(rate, 0.1)))
        entry = calibration[int(BINS * predicted)]
        entry[0] += predicted
        entry[1] += sum(draw.random() < rate for _ in range(8)) / 8
        entry[2] += 1
    return source(
        prompts=prompts,
        known=known,
        pass_rates=rates,
        calibration=calibration,
        played=played,
        ended=played,
        informative=played if name == "medium" else 0,
        skipped=0 if name == "medium" else 5 * min(step, 6),
        explored=int(name != "medium" and step >= 3),
        tokens_saved=0.0 if name == "medium" else 400.0 * min(step, 6),
    )
