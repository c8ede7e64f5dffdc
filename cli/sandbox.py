"""`midstream sandbox list|prune`: what there is of sandboxes on this host, and the end of what nobody owns any more."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from midstream.cli.settings import DEGRADED, FINE, debug_option
from midstream.cli.units import age, columns
from midstream.local.report.words import printable, size

if TYPE_CHECKING:
    from midstream.envs.pool.inventory import Found
    from midstream.envs.pool.reaper import Reaped

HEADER = ("what", "state", "owner", "job", "age", "size", "processes", "path")

_root_option = click.option(
    "--root",
    "roots",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A directory of sandboxes (environment.sandbox_root of a job); can be given several times.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(short_help="List sandboxes on this host, and remove what killed jobs left.")
def sandbox() -> None:
    """What there is of sandboxes on this host, and the end of what nobody owns any more.

    Looked at are the temp directory's midstream-* folders, and each directory given by --root.
    """


@sandbox.command(name="list", short_help="Show sandboxes, their owners, and whether those live.")
@_root_option
@_json_option
@debug_option
def list_sandboxes(roots: tuple[Path, ...], as_json: bool) -> int:
    """Show every sandbox and temporary folder: whose it is, its age, size on disk and processes.

    \b
    States:
      alive     its owner, a process, still runs
      gone      its owner does not: `midstream sandbox prune` removes it
      unknown   its owner cannot be seen from here (another host or container), or it has none

    \b
    Examples:
      midstream sandbox list
      midstream sandbox list --root /scratch/sandboxes --json
    """
    from midstream.envs.pool.inventory import inventory

    found = inventory(_absolute(roots), Path(tempfile.gettempdir()))
    if as_json:
        click.echo(json.dumps({"sandboxes": [each.to_json() for each in found]}, allow_nan=False))
    else:
        _print_found(found)
    return FINE


@sandbox.command(short_help="Remove what jobs that were killed have left.")
@_root_option
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@_json_option
@debug_option
def prune(roots: tuple[Path, ...], dry_run: bool, as_json: bool) -> int:
    """Remove sandboxes, temporary folders, mounts and processes whose owner does not run any more.

    Nothing of a running job is touched. What belongs to other users, or to an owner that cannot be seen from
    here, is left and named. A running job does the same by itself, at its start and every minute.

    \b
    Exit codes: 0 fine, 3 something that should go could not be removed.

    \b
    Examples:
      midstream sandbox prune --dry-run
      midstream sandbox prune --root /scratch/sandboxes
    """
    from midstream.envs.pool.reaper import reap

    reaped = reap(_absolute(roots), Path(tempfile.gettempdir()), dry_run)
    if as_json:
        click.echo(json.dumps({"dry_run": dry_run, **reaped.to_json()}, allow_nan=False))
    else:
        _print_reaped(reaped, dry_run)
    return DEGRADED if reaped.failed else FINE


def _absolute(roots: Sequence[Path]) -> list[Path]:
    return [root.absolute() for root in roots]


def _print_found(found: Sequence["Found"]) -> None:
    if not found:
        click.echo("no sandboxes")
        return
    lines = [HEADER, *(_row(each) for each in found)]
    for line in columns(lines):
        click.echo(line)
    gone = sum(each.state == "gone" for each in found)
    if gone:
        click.echo(
            f"{gone} of {len(found)} have lost their owner: `midstream sandbox prune` removes them", err=True
        )


def _row(found: "Found") -> tuple[str, ...]:
    owner = "-" if found.owner is None else f"{found.owner.pid}@{found.owner.host}"
    job = found.owner.job if found.owner is not None and found.owner.job else "-"
    taken = (">" if found.is_more else "") + size(found.bytes)
    return (
        found.kind,
        found.state,
        owner,
        job,
        age(found.age_s),
        taken,
        str(found.processes),
        printable(str(found.path)),
    )


def _print_reaped(reaped: "Reaped", dry_run: bool) -> None:
    for line in reaped.removed:
        click.echo(f"{'would remove' if dry_run else 'removed'} {printable(line)}")
    for line in reaped.skipped:
        click.echo(f"left alone: {printable(line)}", err=True)
    for line in reaped.failed:
        click.echo(f"could not remove {printable(line)}", err=True)
    click.echo(("would remove " if dry_run else "removed ") + reaped.summary())
