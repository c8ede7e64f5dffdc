"""What a comparison shows, in sentences computed from its numbers; and what a reader must be warned of."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from midstream.local.events import RunEvents
from midstream.local.report import words
from midstream.local.summary import number, total

Run = Mapping[str, Any]

HOW_IT_ENDED = {"interrupted": "was interrupted", "failed": "failed", "unfinished": "has recorded no end"}


def findings(runs: Sequence[Run]) -> list[str]:
    """Sentences over the `runs` entries of `compare.json`; one whose numbers are missing is left out."""
    sentences = (_pace(runs), _reward(runs), _waste(runs), _restores(runs))
    return [sentence for sentence in sentences if sentence]


def warnings(events: Sequence[RunEvents], runs: Sequence[Run]) -> list[str]:
    """Everything that makes a run less than what was asked for, one sentence each."""
    found = []
    for run in runs:
        if run["status"] != "ok":
            what = HOW_IT_ENDED.get(run["status"], run["status"])
            found.append(
                f"{run['strategy']} {what} after {run['steps']} steps: its numbers cover only those."
            )
        if run["restores_bad"]:
            found.append(
                f"{run['strategy']}: {words.count(run['restores_bad'])} of "
                f"{words.count(run['restores_checked'])} restored environments differed from their snapshot."
            )
    steps = {run["steps"] for run in runs if run["status"] == "ok"}
    if len(steps) > 1:
        found.append("The runs differ in length, so times and totals cannot be compared directly.")
    for run_events in events:
        found += [_resumed(run_events)] if len(run_events.parts) > 1 else []
        found += [
            f"{run_events.strategy}, {_at(alarm)}: {alarm.get('message', '')}" for alarm in run_events.alarms
        ]
    return found


def chance_difference(reward: float, rollouts: float) -> float | None:
    """A difference of two mean rewards that chance alone exceeds in one of twenty comparisons, at most.

    For rewards between 0 and 1 the variance is at most m·(1 − m) at mean m; None outside that range.
    """
    if not 0 <= reward <= 1 or rollouts <= 0:
        return None
    return 1.96 * math.sqrt(2 * reward * (1 - reward) / rollouts)


def _pace(runs: Sequence[Run]) -> str:
    paces = [(run["trained_rollouts"] / run["wall_s"], run["strategy"]) for run in runs if run["wall_s"]]
    paces = sorted((pace for pace in paces if pace[0]), reverse=True)
    if not paces:
        return ""
    best, fastest = paces[0]
    others = [f"{words.ratio(best / pace)} the pace of {strategy}" for pace, strategy in paces[1:]]
    beside = f", {words.listed(others)}" if others else ""
    return f"Pace: {fastest} trained on {words.decimal(best)} rollouts a second{beside}."


def _reward(runs: Sequence[Run]) -> str:
    known = [run for run in runs if number(run["reward_last"]) is not None and run["steps"]]
    if not known:
        return ""
    gains = [
        f"{run['strategy']} {words.decimal(run['reward_first'])} → {words.decimal(run['reward_last'])}"
        for run in known
    ]
    sentence = f"Reward, first to last fifth of the steps: {', '.join(gains)}."
    fewest = min(run["trained_rollouts"] / run["steps"] * max(1, run["steps"] // 5) for run in known)
    middle = sum(run["reward_last"] for run in known) / len(known)
    chance = chance_difference(middle, fewest)
    if len(known) > 1 and chance:
        sentence += (
            f" With {words.count(fewest)} rollouts behind each last value, differences below {chance:.2f} "
            "can be chance, and this is one seed."
        )
    return sentence


def _waste(runs: Sequence[Run]) -> str:
    known = [run for run in runs if number(run["wasted_fraction"]) is not None]
    if not known:
        return ""
    shares = sorted((run["wasted_fraction"], run["strategy"]) for run in known)
    parts = [f"{words.percent(share)} with {strategy}" for share, strategy in shares]
    return f"Generated for nothing: {words.listed(parts)}."


def _restores(runs: Sequence[Run]) -> str:
    checked = sum(run["restores_checked"] for run in runs)
    if not checked:
        return ""
    bad = sum(run["restores_bad"] for run in runs)
    verdict = (
        "all were equal to their snapshot" if not bad else f"{words.count(bad)} differed from their snapshot"
    )
    return f"Environments restored and checked by content: {words.count(checked)}; {verdict}."


def _resumed(events: RunEvents) -> str:
    times = "once" if len(events.parts) == 2 else f"{len(events.parts) - 1} times"
    steps = f"{len(events.lost)} recorded {'step' if len(events.lost) == 1 else 'steps'}"
    lost = words.count(total(events.lost, "generated_tokens"))
    return (
        f"{events.strategy} was stopped and resumed {times}: {steps} with {lost} tokens came after a checkpoint and "
        "were done again, and count in no figure but the wall-clock."
    )


def _at(alarm: Mapping[str, Any]) -> str:
    time = number(alarm.get("t"))
    return "at an unknown time" if time is None else f"at {words.seconds(time)}"
