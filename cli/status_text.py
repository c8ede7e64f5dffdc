"""What `midstream status` found, as people read it: what each state holds, then what waits, then where it lies."""

from collections.abc import Callable, Iterable, Sequence

from midstream.buffers.journal.records import GroupStatus, Owned, versions_of
from midstream.cli.status_of_run import STATES, FoundRun, snapshots_of, spread, sum_of
from midstream.cli.units import age, columns
from midstream.local.report.words import printable, size

NOTHING = "-"
PER_ROLLOUT = "median {}, most {} per rollout"
NO_CHECKPOINT = "none yet: a restart begins with an empty buffer"
COUNTED = ("rollouts", "tokens", "turns")
GROUP_HEADER = ("group", "state", *COUNTED, "versions", "lag", "age", "snapshots", "size")


def text_of(runs: Sequence[FoundRun], *, with_groups: bool, with_snapshots: bool) -> str:
    """All runs: where there are several, first a line for each."""
    parts = [_side_by_side(runs)] if len(runs) > 1 else []
    for run in runs:
        parts += [_run(run), *_groups(run, with_groups), *_snapshots(run, with_snapshots)]
    return "\n\n".join(parts)


def _side_by_side(runs: Sequence[FoundRun]) -> str:
    header = (
        "",
        *STATES.values(),
        "trained",
        "dropped",
        "oldest",
        "most tokens",
        "lag",
        "snapshots",
        "missing",
        "disk",
        "job",
    )
    return "\n".join(columns([header, *map(_line, runs)], str.rjust))


def _line(run: FoundRun) -> tuple[str, ...]:
    journal, rollouts = run.journal, [member for group in run.waiting for member in group.members]
    disk_bytes = journal.file_bytes + (run.presence.bytes if run.presence else 0)
    return (
        printable(run.run_dir.name),
        *(f"{len(journal.among(state)):,}" for state in STATES),
        f"{journal.trained.groups:,}",
        f"{sum_of(journal.dropped.values()).groups:,}",
        _most(map(run.age_s, run.waiting), age),
        _most((rollout.tokens for rollout in rollouts), _count),
        _most(_lags(run), _count),
        f"{len(journal.snapshots_in_use):,}",
        NOTHING if run.presence is None else f"{len(run.missing):,}",
        size(disk_bytes),
        NOTHING if run.holder is None else f"{run.holder.pid}@{printable(run.holder.host)}",
    )


def _run(run: FoundRun) -> str:
    journal = run.journal
    holder = "no job has it open"
    if run.holder is not None:
        holder = f"open in process {run.holder.pid} on {printable(run.holder.host)}"
    owned = [
        ("waiting", journal.buffered),
        ("in flight", journal.taken),
        ("in training", journal.handed),
        ("trained", journal.trained),
        ("dropped", sum_of(journal.dropped.values())),
        *((f"  {printable(reason)}", part) for reason, part in sorted(journal.dropped.items())),
    ]
    lines = [("", "groups", *COUNTED, "size"), *(_owned(*each) for each in owned)]
    facts = [(label, text) for label, text in _facts(run) if text]
    return "\n".join(
        [f"{printable(str(run.run_dir))}: {holder}", *columns(lines, str.rjust), "", *columns(facts)]
    )


def _owned(label: str, part: Owned) -> tuple[str, ...]:
    counts = (part.groups, part.rollouts, part.tokens, part.turns)
    return label, *map(_count, counts), size(part.payload_bytes)


def _facts(run: FoundRun) -> list[tuple[str, str]]:
    journal = run.journal
    rollouts = [member for group in run.waiting for member in group.members]
    return [
        ("age", _spread(map(run.age_s, run.waiting), age, "median {}, oldest {}")),
        ("tokens waiting", _spread((each.tokens for each in rollouts), _count, PER_ROLLOUT)),
        ("turns waiting", _spread((each.turns for each in rollouts), _count, PER_ROLLOUT)),
        ("policy versions", _versions(run)),
        ("lag", _spread(_lags(run), _count, "median {}, most {} per group")),
        ("snapshots", _snapshot_facts(run)),
        ("checkpoints", ", ".join(map(str, journal.checkpoints)) or NO_CHECKPOINT),
        ("on disk", _disk(run)),
        ("damaged", _damage(run)),
    ]


def _versions(run: FoundRun) -> str:
    found = versions_of(member for group in run.waiting for member in group.members)
    return "" if found is None else f"{found[0]} to {found[1]}, newest seen {run.journal.newest_version}"


def _snapshot_facts(run: FoundRun) -> str:
    waiting, in_use = len(snapshots_of(run.waiting)), len(run.journal.snapshots_in_use)
    text = f"{waiting:,} of what waits, {in_use:,} in use"
    if run.presence is None:
        return f"{text}; no store at {printable(str(run.store))}: name it with --store" if in_use else text
    if run.lost_packs:
        text += (
            f"; {len(run.lost_packs):,} files of contents are GONE from {printable(str(run.store))}: rollouts that rest"
            " on them go back before what they held"
        )
    elif not run.missing:
        return text + ", all in the store"
    if not run.missing:
        return text
    named = ", ".join(map(printable, sorted(run.missing)[:3]))
    more = ", …" if len(run.missing) > 3 else ""
    return (
        f"{text}, {len(run.missing):,} NOT IN {printable(str(run.store))} ({named}{more}): rollouts that rest on them"
        " start anew; where snapshots.path is elsewhere, name it with --store"
    )


def _disk(run: FoundRun) -> str:
    journal = f"journal {size(run.journal.file_bytes)}"
    return journal if run.presence is None else f"{journal}, snapshots {size(run.presence.bytes)}"


def _damage(run: FoundRun) -> str:
    if not run.journal.is_damaged:
        return ""
    lost = [printable(group.key) for group in run.journal.groups if group.lost]
    groups = f", groups that are not whole: {', '.join(lost)}" if lost else ""
    return (
        f"{run.journal.damaged_rows:,} rows{groups}; start the job again from its last checkpoint, which costs the"
        " damaged entries only"
    )


def _groups(run: FoundRun, asked: bool) -> list[str]:
    if not asked or not run.journal.groups:
        return []
    return ["\n".join(columns([GROUP_HEADER, *(_group(run, each) for each in run.journal.groups)]))]


def _group(run: FoundRun, group: GroupStatus) -> tuple[str, ...]:
    lag = run.lag(group)
    return (
        printable(group.key),
        STATES[group.state] + ("" if group.step is None else f" {group.step}"),
        _count(len(group.members)),
        _count(group.tokens),
        _count(group.turns),
        "{}-{}".format(*group.versions) if group.versions else NOTHING,
        NOTHING if lag is None else _count(lag),
        age(run.age_s(group)),
        _count(len(snapshots_of([group]))),
        size(group.payload_bytes),
    )


def _snapshots(run: FoundRun, asked: bool) -> list[str]:
    ids = sorted(snapshots_of(run.waiting) | run.missing) if asked else []
    lines = [printable(each) + ("  missing" if each in run.missing else "") for each in ids]
    return ["\n".join(lines)] if lines else []


def _lags(run: FoundRun) -> list[int]:
    return [lag for group in run.waiting if (lag := run.lag(group)) is not None]


def _spread(values: Iterable[float], text: Callable[[float], str], form: str) -> str:
    found = spread(values)
    return "" if found is None else form.format(text(found["median"]), text(found["most"]))


def _most(values: Iterable[float], text: Callable[[float], str]) -> str:
    return text(found["most"]) if (found := spread(values)) else NOTHING


def _count(value: float) -> str:
    return f"{value:,.0f}"
