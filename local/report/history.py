"""What a run's curriculum did in each step and what it believed, as the run has written it down.

A line of the history is one step (`buffers/curriculum/history.py` writes it). All counts are of that step alone.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeGuard

from midstream.buffers.curriculum.history import FOLDER, HISTORY
from midstream.buffers.curriculum.tally import BINS
from midstream.local.events import RunEvents
from midstream.local.report import words
from midstream.local.summary import number


@dataclass(frozen=True)
class SourceStep:
    """One source in one step."""

    prompts: int = 0
    known: int = 0
    """Prompts of which something has been observed."""
    pass_rates: tuple[int, ...] = (0,) * BINS
    """The known prompts by the pass rate that is believed of them, in equal bins from 0 to 1."""
    calibration: tuple[tuple[float, float, float], ...] = ((0.0, 0.0, 0.0),) * BINS
    """By the predicted pass rate: the sum of the predicted ones, of the observed ones, and the number of groups."""
    played: int = 0
    """Groups that were begun."""
    ended: int = 0
    informative: int = 0
    """Groups that ended, with rewards that differ."""
    skipped: int = 0
    """Prompts that came up and were passed over."""
    explored: int = 0
    """Groups begun with prompts that would have been passed over, to see whether that is still right."""
    relaxed: int = 0
    """Groups begun for which the gate had to open, so that the step ends."""
    stopped: int = 0
    """Groups that were given up on the way."""
    tokens_saved: float = 0.0
    """What these would have cost beyond what they did."""


@dataclass(frozen=True)
class History:
    """By step, and in it by source; `left_out` and `damaged` say which lines do not count, and why."""

    strategy: str
    steps: Mapping[int, Mapping[str, SourceStep]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()

    @property
    def sources(self) -> list[str]:
        """Those with most groups played first."""
        played: dict[str, int] = {}
        for step in self.steps.values():
            for name, part in step.items():
                played[name] = played.get(name, 0) + part.played
        return sorted(played, key=lambda name: (-played[name], name))


def read_history(strategy_dir: Path, run: RunEvents) -> History | None:
    """The history of the steps that `run` has finished; None where no curriculum has written one.

    Of a step that was done again the last line counts. Lines that cannot be read are left out.
    """
    path = strategy_dir / FOLDER / HISTORY
    if not path.exists():
        return None
    found, faults, is_torn = _read(path)
    finished = {step["step"] for step in run.steps}
    counted = [(step, sources) for step, sources in found if step in finished]
    steps = dict(sorted(dict(counted).items()))
    reasons = {
        "of steps that were done again after a resume": len(counted) - len(steps),
        "of steps that the run has not finished": len(found) - len(counted),
        "that cannot be read": len(faults),
        "torn at the end of the file": int(is_torn),
    }
    left_out = [f"{_lines(count)} {what}" for what, count in reasons.items() if count]
    missing = len(finished) - len(steps)
    if missing:
        left_out.append(f"{words.count(missing)} of {words.count(len(finished))} steps, which have no line")
    damaged = [f"{path}, {faults[0]} ({_lines(len(faults))} left out)"] if faults else []
    return History(run.strategy, steps, tuple(left_out), tuple(damaged))


def merged(parts: Iterable[SourceStep]) -> SourceStep:
    """Several sources as one, or several steps of one; of steps, prompts and beliefs count as often as they come."""
    parts = list(parts)
    return SourceStep(
        pass_rates=tuple(sum(part.pass_rates[bin_] for part in parts) for bin_ in range(BINS)),
        calibration=tuple(
            (
                sum(part.calibration[bin_][0] for part in parts),
                sum(part.calibration[bin_][1] for part in parts),
                sum(part.calibration[bin_][2] for part in parts),
            )
            for bin_ in range(BINS)
        ),
        **{name: sum(getattr(part, name) for part in parts) for name in _COUNTS},
    )


def gathered(history: History, most: int) -> History:
    """At most so many sources: of more than that, those that played least become one."""
    names = history.sources
    if len(names) <= most:
        return history
    shown = names[: most - 1]
    rest = f"{len(names) - len(shown)} other sources"
    steps = {
        step: {name: part for name, part in sources.items() if name in shown}
        | {rest: merged(part for name, part in sources.items() if name not in shown)}
        for step, sources in history.steps.items()
    }
    return History(history.strategy, steps, history.left_out, history.damaged)


def of_source(history: History, source: str | None) -> dict[int, SourceStep]:
    """One source by step, None: all of them as one; steps without it are left out."""
    if source is None:
        return {step: merged(sources.values()) for step, sources in history.steps.items()}
    return {step: sources[source] for step, sources in history.steps.items() if source in sources}


def calibration_error(bins: Sequence[tuple[float, float, float]]) -> float | None:
    """Mean distance of predicted and observed pass rates by bin, weighted by groups; None without groups."""
    groups = sum(count for _, _, count in bins)
    if not groups:
        return None
    return sum(abs(predicted - observed) for predicted, observed, _ in bins) / groups


_COUNTS = tuple(each.name for each in fields(SourceStep) if each.name not in ("pass_rates", "calibration"))


def _read(path: Path) -> tuple[list[tuple[int, Mapping[str, SourceStep]]], list[str], bool]:
    """The steps in the order of writing, what is wrong with which other lines, and whether the end is torn."""
    found: list[tuple[int, Mapping[str, SourceStep]]] = []
    faults: list[str] = []
    with path.open("rb") as lines:
        for line_number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return found, faults, True
            try:
                found.append(_parsed(line))
            except ValueError as error:
                faults.append(f"line {line_number}: {error}")
    return found, faults, False


def _parsed(line: bytes) -> tuple[int, dict[str, SourceStep]]:
    """The step and its sources. Raises ValueError, saying what is wrong with the line."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(value, dict) or not isinstance(value.get("sources"), dict):
        raise ValueError("no object with 'step' and 'sources'")
    return _count(value, "step"), {name: _source(part) for name, part in value["sources"].items()}


def _source(value: Any) -> SourceStep:
    if not isinstance(value, dict):
        raise ValueError("a source is no object")
    rates, calibration = value.get("pass_rates"), value.get("calibration")
    if not _is_list_of(rates, BINS) or not _is_list_of(calibration, BINS):
        raise ValueError(f"'pass_rates' and 'calibration' have not {BINS} entries each")
    if not all(_is_list_of(entry, 3) for entry in calibration):
        raise ValueError("an entry of 'calibration' has not 3 numbers")
    counts: dict[str, Any] = {name: _count(value, name) for name in _COUNTS if name != "tokens_saved"}
    return SourceStep(
        pass_rates=tuple(int(_amount(rate, "pass_rates")) for rate in rates),
        calibration=tuple(
            (_amount(p, "calibration"), _amount(o, "calibration"), _amount(n, "calibration"))
            for p, o, n in calibration
        ),
        tokens_saved=_amount(value.get("tokens_saved"), "tokens_saved"),
        **counts,
    )


def _is_list_of(value: Any, length: int) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and len(value) == length


def _count(value: Mapping[str, Any], name: str) -> int:
    return int(_amount(value.get(name), name))


def _amount(value: Any, name: str) -> float:
    known = number(value)
    if known is None or known < 0:
        raise ValueError(f"{name!r} is {value!r}, not a number from 0 on")
    return known


def _lines(count: int) -> str:
    return f"{words.count(count)} {'line' if count == 1 else 'lines'}"
