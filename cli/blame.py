"""`midstream blame`: which policy version wrote what is left in the workspace of a rollout."""

import json
from pathlib import Path

import click

from midstream.cli.settings import DEGRADED, FINE, debug_option


@click.command(short_help="Show which policy version wrote what is in a rollout's workspace.")
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("rollout", type=int, required=False)
@click.option("--waiting", is_flag=True, help="Without ROLLOUT: list those that wait in the buffer instead.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Without ROLLOUT: list so many of each run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@debug_option
def blame(run: Path, rollout: int | None, waiting: bool, limit: int, as_json: bool) -> int:
    """Show, as a version-control blame does, which policy version and turn wrote each change that survives in the
    workspace of ROLLOUT, and the share of each version by bytes. Without ROLLOUT, list the rollouts, the newest
    first. Nothing is changed.

    RUN is the run directory of a job (midstream.run_dir), or that of a comparison, whose strategies are shown
    one after another. ROLLOUT is the index of a sample, as the host numbers it: one that was trained on, or one
    that waits to go on.

    \b
    Exit codes: 0 fine, 1 there is no such rollout, 3 files of the run could not be read.

    \b
    Examples:
      midstream blame runs/mine
      midstream blame runs/mine/continue 0
    """
    from midstream.cli import blame_of_run
    from midstream.cli.blame_text import print_list, print_workspaces

    if rollout is not None:
        found = blame_of_run.with_index(run, rollout)
    elif waiting:
        found = blame_of_run.waiting(run, limit)
    else:
        found = blame_of_run.newest(run, limit)
    if as_json:
        click.echo(json.dumps({"runs": [each.to_json() for each in found]}, allow_nan=False))
    elif rollout is not None:
        print_workspaces(found)
    else:
        print_list(found)
    for each in found:
        for damage in each.damaged:
            click.echo(f"midstream: {damage}", err=True)
    return DEGRADED if any(each.damaged for each in found) else FINE
