"""The comparison as rows of numbers: the same table for the page and for the terminal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from midstream.local.report import words
from midstream.local.summary import number

REFERENCE = "discard"
"""The strategy that ratios refer to: dropping what is unfinished is what most jobs do today."""


@dataclass(frozen=True)
class Measure:
    """One row: where its number comes from, how it is written, which direction is better (None: neither).

    One that is optional is left out where no run has its number.
    """

    label: str
    value: Callable[[Mapping[str, Any]], float | None]
    text: Callable[[float | None], str]
    better: Literal["high", "low"] | None = None
    has_ratio: bool = False
    is_optional: bool = False


@dataclass(frozen=True)
class Cell:
    text: str
    ratio: str = ""
    best: bool = False


@dataclass(frozen=True)
class Row:
    label: str
    cells: tuple[Cell, ...]


def _field(name: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda run: number(run.get(name))


def _rollouts_per_s(run: Mapping[str, Any]) -> float | None:
    rollouts, wall_s = number(run.get("trained_rollouts")), number(run.get("wall_s"))
    return None if rollouts is None or not wall_s else rollouts / wall_s


HELD_OUT = Measure(
    "Reward, held-out tasks", _field("reward_held_out"), words.decimal, "high", is_optional=True
)
MEASURES = (
    Measure("Training steps", _field("steps"), words.count),
    Measure("Reward, first fifth", _field("reward_first"), words.decimal),
    Measure("Reward, last fifth", _field("reward_last"), words.decimal, "high"),
    HELD_OUT,
    Measure("Wall-clock", _field("wall_s"), words.seconds, "low", True),
    Measure("Trainer waiting", _field("trainer_wait_fraction"), words.percent, "low"),
    Measure("Trained rollouts", _field("trained_rollouts"), words.count),
    Measure("Trained rollouts per second", _rollouts_per_s, words.decimal, "high", True),
    Measure("Generated tokens", _field("generated_tokens"), words.count, None, True),
    Measure("Wasted tokens", _field("wasted_tokens"), words.count, "low", True),
    Measure("Wasted share", _field("wasted_fraction"), words.percent, "low"),
    Measure("Tokens per trained rollout", _field("mean_response_tokens"), words.decimal, None, True),
    Measure("Resumes", _field("resumes"), words.count),
    Measure("Restores checked", _field("restores_checked"), words.count),
    Measure("Restores that differed", _field("restores_bad"), words.count),
    Measure("Failed rollouts", _field("failed_rollouts"), words.count),
    Measure("Largest fresh log-prob gap", _field("max_logprob_gap_fresh"), words.tiny),
)


def comparison(runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows over the `runs` entries, one cell a run, in the order of `runs`.

    The best is marked only among finished runs of equal length, and only where they differ.
    """
    measures = [part for measure in MEASURES for part in (measure, *_by_source(measure, runs))]
    return [_row(measure, runs) for measure in measures if not _is_left_out(measure, runs)]


def _by_source(measure: Measure, runs: Sequence[Mapping[str, Any]]) -> list[Measure]:
    """The held-out reward again for each source of tasks, where there are several."""
    if measure is not HELD_OUT:
        return []
    names = dict.fromkeys(name for run in runs for name in run.get("reward_held_out_sources") or {})
    if len(names) < 2:
        return []
    return [
        replace(measure, label=f"Reward, held-out tasks: {name}", value=_reward_of_source(name))
        for name in names
    ]


def _reward_of_source(name: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda run: number((run.get("reward_held_out_sources") or {}).get(name))


def _is_left_out(measure: Measure, runs: Sequence[Mapping[str, Any]]) -> bool:
    return measure.is_optional and all(measure.value(run) is None for run in runs)


def _row(measure: Measure, runs: Sequence[Mapping[str, Any]]) -> Row:
    values = [measure.value(run) for run in runs]
    best = _best(measure, values, runs)
    reference = next(
        (value for value, run in zip(values, runs, strict=True) if run.get("strategy") == REFERENCE), None
    )
    cells = []
    for run, value in zip(runs, values, strict=True):
        text = measure.text(value)
        compared = measure.has_ratio and run.get("strategy") != REFERENCE
        cells.append(
            Cell(
                text=text,
                ratio=words.ratio(value / reference) if compared and reference and value is not None else "",
                best=text == best and _complete(run, runs),
            )
        )
    return Row(measure.label, tuple(cells))


def _best(measure: Measure, values: Sequence[float | None], runs: Sequence[Mapping[str, Any]]) -> str | None:
    """The best value as it is written, so that values that look equal are equally good."""
    rivals = [v for v, run in zip(values, runs, strict=True) if v is not None and _complete(run, runs)]
    if measure.better is None or len(set(map(measure.text, rivals))) < 2:
        return None
    return measure.text(max(rivals) if measure.better == "high" else min(rivals))


def _complete(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> bool:
    longest = max((number(other.get("steps")) or 0 for other in runs), default=0)
    return run.get("status", "ok") == "ok" and number(run.get("steps")) == longest
