"""Builds `report.html` of a comparison from its run directory: one file that needs nothing beside it."""

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from midstream.conf.files import replace_file
from midstream.hooks.credit.kept import has_kept
from midstream.local.events import EVENTS_FOLDER, EventsError, RunEvents, read_run
from midstream.local.report import curriculum, findings, palette, table, words
from midstream.local.report.history import History, read_history
from midstream.local.report.plots import lag as lags
from midstream.local.report.plots import length, reward, tokens
from midstream.local.report.plots import timeline as timelines
from midstream.local.report.plots.figure import Plot
from midstream.local.report.tuned import Tuned, read_tuned
from midstream.local.report.workspaces import Workspaces, lag_text, read_workspaces
from midstream.local.summary import summarise

REPORT_NAME = "report.html"
CONFIG_NAME = "config.yaml"


@dataclass(frozen=True)
class Comparison:
    """All that the page shows: one run per strategy, and its resolved config where that was written."""

    runs: tuple[RunEvents, ...]
    configs: Mapping[str, str] = field(default_factory=dict)
    """Strategy → YAML."""
    workspaces: tuple[Workspaces, ...] = ()
    """Of the strategies that have kept their rollouts."""
    histories: tuple[History, ...] = ()
    """Of the strategies that have a curriculum."""
    tuned: tuple[Tuned, ...] = ()
    """Of all strategies."""


def write_report(run_dir: Path, target: Path | None = None) -> Path:
    """(Re)build the page from the events under `<run_dir>/<strategy>/events`; it is there whole or not.

    `target` is `<run_dir>/report.html` where it is not given.
    Raises EventsError where the directory holds no events, or damaged ones.
    """
    content = render(read_comparison(run_dir))
    target = target or run_dir / REPORT_NAME
    replace_file(target, content.encode())
    return target


def read_comparison(run_dir: Path) -> Comparison:
    """The runs of a directory, in the order in which strategies are always shown.

    Raises EventsError as `write_report` does.
    """
    if not run_dir.is_dir():
        raise EventsError(f"{run_dir} is not a directory; pass the run directory of a comparison")
    folders = [folder.parent for folder in run_dir.glob(f"*/{EVENTS_FOLDER}") if any(folder.glob("*.jsonl"))]
    if not folders:
        raise EventsError(f"{run_dir} holds no events; expected {run_dir}/<strategy>/events/*.jsonl")
    order = list(palette.STRATEGIES)
    folders.sort(key=lambda f: (order.index(f.name) if f.name in order else len(order), f.name))
    configs = {folder.name: folder / CONFIG_NAME for folder in folders}
    runs = tuple(read_run(folder) for folder in folders)
    return Comparison(
        runs=runs,
        configs={name: path.read_text(encoding="utf-8") for name, path in configs.items() if path.exists()},
        workspaces=tuple(
            read_workspaces(folder, run.strategy)
            for folder, run in zip(folders, runs, strict=True)
            if has_kept(folder)
        ),
        histories=tuple(
            history
            for folder, run in zip(folders, runs, strict=True)
            if (history := read_history(folder, run)) is not None
        ),
        tuned=tuple(read_tuned(folder, run.strategy) for folder, run in zip(folders, runs, strict=True)),
    )


def render(comparison: Comparison) -> str:
    """The page as one HTML document."""
    events = comparison.runs
    runs = [summarise(run) for run in events]
    marks = palette.marks(run.strategy for run in events)
    template = _templates().get_template("page.html.j2")
    return template.render(
        title=f"midstream compare: {words.listed([run.strategy for run in events])}",
        runs=runs,
        marks=marks,
        facts=_facts(events),
        findings=findings.findings(runs),
        warnings=[
            *findings.warnings(events, runs),
            *(tuned.warning for tuned in comparison.tuned if tuned.changes),
            *_damage(comparison),
        ],
        rows=table.comparison(runs),
        reference=table.REFERENCE if any(run["strategy"] == table.REFERENCE for run in runs) else None,
        plots=_plots(events, marks),
        curricula=curriculum.told(comparison.histories, marks),
        curriculum_columns=curriculum.COLUMNS,
        workspaces=comparison.workspaces,
        colours=palette.EVERY_COLOUR,
        configs=comparison.configs,
        changes={
            tuned.strategy: "\n".join(map(words.printable, tuned.changes)) for tuned in comparison.tuned
        },
        command=_command(events),
    )


def _plots(events: Sequence[RunEvents], marks: dict[str, palette.Mark]) -> list[Plot]:
    makers = (
        reward.reward_over_time,
        reward.reward_over_tokens,
        reward.held_out_over_tokens,
        timelines.timeline,
        timelines.timeline_zoom,
        tokens.tokens_plot,
        lags.lag_plot,
        length.length_plot,
    )
    return [plot for make in makers if (plot := make(events, marks)) is not None]


def _damage(comparison: Comparison) -> list[str]:
    read: list[Workspaces | History | Tuned] = [
        *comparison.workspaces,
        *comparison.histories,
        *comparison.tuned,
    ]
    return [f"{found.strategy}: {words.printable(text)}" for found in read for text in found.damaged]


def _facts(events: Sequence[RunEvents]) -> list[tuple[str, str]]:
    """(name, value) pairs for the head of the page; runs that differ show every value."""
    machines = [run.run.get("machine") or {} for run in events]
    batch = [
        f"{groups} prompts × {samples} rollouts"
        for run in events
        if (groups := run.run.get("rollout_batch_size")) and (samples := run.run.get("n_samples_per_prompt"))
    ]
    facts = [
        ("Seed", _distinct([run.run.get("seed") for run in events])),
        ("Steps", _distinct([len(run.steps) for run in events])),
        ("Batch", _distinct(batch)),
        ("Started", _distinct([_utc(run.run.get("start_unix")) for run in events][:1])),
        ("Processor", _distinct([_processor(machine) for machine in machines])),
        ("Memory", _distinct([words.memory(machine.get("memory_bytes")) for machine in machines])),
        ("System", _distinct([_system(machine) for machine in machines])),
        ("Versions", _distinct([_versions(machine) for machine in machines])),
    ]
    return [(name, value or "not recorded") for name, value in facts]


def _distinct(values: Sequence[Any]) -> str:
    shown = [str(value) for value in values if value not in (None, "", words.MISSING)]
    return ", ".join(dict.fromkeys(shown))


def _processor(machine: dict[str, Any]) -> str:
    if not machine.get("cpu"):
        return ""
    cores = machine.get("cores")
    parts = [f"{machine['cpu']}, {cores} {'core' if cores == 1 else 'cores'}", *(machine.get("gpus") or ())]
    return " + ".join(parts)


def _system(machine: dict[str, Any]) -> str:
    python = machine.get("python")
    return ", ".join(part for part in (machine.get("system"), f"Python {python}" if python else None) if part)


def _versions(machine: dict[str, Any]) -> str:
    known = machine.get("versions") or {}
    return " · ".join(f"{name} {version or 'not installed'}" for name, version in known.items())


def _utc(unix_s: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_s)) if unix_s else ""


def _command(events: Sequence[RunEvents]) -> str:
    commands = (run.run.get("command") for run in events)
    return next((shlex.join(map(str, command)) for command in commands if command), "")


def _templates() -> Environment:
    loader = PackageLoader("midstream.local.report", package_path=".")
    templates = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {
        "svg": Markup,
        "age": palette.age_variable,
        "lag": lag_text,
        "percent": words.percent,
    }
    return templates
