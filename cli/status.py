"""`midstream status`: what waits in the buffer of a run, from its journal."""

import json
import time
from pathlib import Path

import click

from midstream.cli.settings import DEGRADED, FINE, debug_option


@click.command(short_help="Show the buffer of a run: what waits, how old, how far, how many bytes.")
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--groups", is_flag=True, help="Also a line for each group.")
@click.option("--snapshots", is_flag=True, help="Also the ids of the snapshots that waiting groups refer to.")
@click.option(
    "--store",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="The snapshot store, where snapshots.path of the job is not RUN/snapshots.",
)
@click.option(
    "--watch", type=click.FloatRange(min=0.1), metavar="SECONDS", help="Again so often, until Ctrl-C."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (with --watch one a line).")
@debug_option
def status(
    run: Path, groups: bool, snapshots: bool, store: Path | None, watch: float | None, as_json: bool
) -> int:
    """Show what is in the buffer of a run, beside its job or after it has died. Nothing is changed.

    RUN is the run directory of a job (midstream.run_dir), or that of a comparison, whose strategies are shown
    side by side.

    \b
    What is counted:
      waiting      groups that wait to go on
      in flight    groups that somebody generates
      in training  groups that were handed to a training step that is not over
      trained      groups that are done
      dropped      groups that were given up, by reason

    \b
    Exit codes: 0 fine, 3 rows of the journal are damaged, or snapshots that it refers to are not in the store.

    \b
    Examples:
      midstream status runs/mine
      midstream status runs/mine/continue --groups --watch 10
    """
    from midstream.cli.status_of_run import look_at
    from midstream.cli.status_text import text_of

    while True:
        found = look_at(run, store)
        if as_json:
            click.echo(json.dumps({"runs": [each.to_json() for each in found]}, allow_nan=False))
        else:
            click.echo(text_of(found, with_groups=groups, with_snapshots=snapshots))
        if watch is None:
            return DEGRADED if any(each.is_degraded for each in found) else FINE
        time.sleep(watch)
        if not as_json:
            click.echo()
