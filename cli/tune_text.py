"""What `midstream tune` has to say, as people read it and as JSON."""

from dataclasses import asdict
from typing import Any

from midstream.cli.tune_of_run import Outcome, unknown_sources
from midstream.cli.units import columns
from midstream.conf.control.changes import Change, Entry
from midstream.conf.control.live import live_settings, value_at, value_text
from midstream.conf.control.tuning import Chain
from midstream.local.report.words import percent, printable

LIST_HEADER = ("key", "value", "default", "range")


def listed(chain: Chain) -> dict[str, Any]:
    """What can be changed; `own` is the value in the job's own configuration."""
    return {
        "run_dir": str(chain.run_dir),
        "version": chain.version,
        "settings": [
            {
                "key": key,
                "value": value_at(chain.layer, key),
                "own": value_at(chain.base, key),
                "default": setting.field.get_default(call_default_factory=True, validated_data={}),
                "range": setting.range,
                "meaning": setting.meaning,
            }
            for key, setting in live_settings().items()
        ],
    }


def list_text(chain: Chain) -> str:
    lines = [LIST_HEADER]
    for key, setting in live_settings().items():
        value, own = value_text(value_at(chain.layer, key)), value_text(value_at(chain.base, key))
        shown = value if value == own else f"{value} (the job's own: {own})"
        lines.append((key, printable(shown), setting.default, setting.range))
    return "\n".join([f"{_head(chain)}: version {chain.version}", *columns(lines)])


def logged(chain: Chain) -> dict[str, Any]:
    """All changes, oldest first; those that cannot be used have a `problem`."""
    said = chain.acknowledgement
    return {
        "run_dir": str(chain.run_dir),
        "version": chain.version,
        "acknowledged": None if said is None else said.model_dump(mode="json"),
        "changes": [
            {"version": entry.version, "problem": entry.problem}
            if entry.change is None
            else {**entry.change.model_dump(mode="json"), "problem": None}
            for entry in chain.entries
        ],
    }


def log_text(chain: Chain) -> str:
    said = chain.acknowledgement
    lines = [*map(_entry, chain.entries)] or ["nothing was changed"]
    if said is not None:
        lines.append(f"the job has taken up version {said.version}, seen at step {said.step}, {said.time}")
        lines += [f"it refuses {refusal.file}: {refusal.problem}" for refusal in said.refused]
    return "\n".join([_head(chain), *map(printable, lines)])


def told(outcome: Outcome) -> dict[str, Any]:
    """What became of a change."""
    change, answer = outcome.change, outcome.answer
    names = ("before", "after")
    return {
        "run_dir": str(outcome.chain.run_dir),
        "dry_run": outcome.dry_run,
        "version": outcome.chain.version if change is None else change.version,
        "changes": {} if change is None else change.model_dump(mode="json")["changes"],
        "undoes": None if change is None else change.undoes,
        "effect": None
        if outcome.effect is None
        else {name: asdict(preview) for name, preview in zip(names, outcome.effect, strict=True)},
        "acknowledged": None if answer is None else answer.acknowledgement.model_dump(mode="json"),
        "refused": None if answer is None else answer.problem,
    }


def outcome_text(outcome: Outcome) -> str:
    chain, change, answer = outcome.chain, outcome.change, outcome.answer
    if change is None:
        return f"{_head(chain)}: nothing changes, all is so already"
    lines = [f"{_head(chain)}: {_title(outcome, change)}", *_deltas(change), *_idle(outcome, change)]
    if outcome.dry_run:
        lines += _effect(outcome, change)
    elif answer is not None:
        said = answer.acknowledgement
        where = f"at step {said.step}, in process {said.pid} on {printable(said.host)}"
        if answer.problem is not None:
            lines.append(f"refused by the job {where}: {printable(answer.problem)}")
        elif said.version > change.version:
            lines.append(
                f"taken up {where}, with version {said.version}, which somebody has made on top of it"
            )
        else:
            lines.append(f"taken up {where}")
    elif outcome.waited:
        lines.append(f"not taken up in time; {written(chain, change)}")
    return "\n".join(lines)


def written(chain: Chain, change: Change) -> str:
    """What holds for a change that the job has not answered yet."""
    return (
        f"version {change.version} stands, and the job takes it up at its next step or start: "
        f"midstream tune {printable(str(chain.run_dir))} --log shows it, --undo takes it back"
    )


def _head(chain: Chain) -> str:
    return printable(str(chain.run_dir))


def _title(outcome: Outcome, change: Change) -> str:
    undoing = f", which undoes version {change.undoes}" if change.undoes is not None else ""
    return f"version {change.version}{undoing}" + (", would be" if outcome.dry_run else "")


def _deltas(change: Change) -> list[str]:
    lines = [(f"  {key}", printable(delta.told)) for key, delta in change.changes.items()]
    return columns(lines) if lines else ["  nothing changes"]


def _entry(entry: Entry) -> str:
    change = entry.change
    if change is None:
        return f"{entry.version}  changes nothing: {entry.problem}"
    undoing = f"undoes version {change.undoes}: " if change.undoes is not None else ""
    return f"{change.version}  {change.time}  {change.who}  {undoing}{change.told}"


def _idle(outcome: Outcome, change: Change) -> list[str]:
    if not _is_of_curriculum(change):
        return []
    if outcome.chain.base.curriculum.enabled:
        unknown, known = unknown_sources(outcome.chain, change)
        if not unknown:
            return []
        there = f"the run has {', '.join(known)}"
        return [
            printable(
                f"no prompt is of the source {', '.join(unknown)}, whose weight counts for nothing: {there}"
            )
        ]
    return [
        "this job has no curriculum, so that of it changes nothing: it needs midstream.curriculum.enabled"
    ]


def _is_of_curriculum(change: Change) -> bool:
    return any(key.startswith("curriculum.") for key in change.changes)


def _effect(outcome: Outcome, change: Change) -> list[str]:
    if not _is_of_curriculum(change) or not outcome.chain.base.curriculum.enabled:
        return []
    if outcome.effect is None:
        return ["what comes of it cannot be foretold: the run has kept no statistics of its prompts yet"]
    before, after = outcome.effect
    lines = [
        ("  groups that inform, of those played", before.informative, after.informative),
        ("  prompts played, of those that come up", before.played, after.played),
    ]
    return [
        f"foretold from what is known of {after.known:,} of {after.prompts:,} prompts:",
        *columns([(name, f"{percent(was)} → {percent(becomes)}") for name, was, becomes in lines]),
    ]
