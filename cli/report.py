"""`midstream report`: the page of a comparison, built again from what was recorded."""

import json
from pathlib import Path

import click

from midstream.cli.settings import FINE, debug_option


@click.command(short_help="Build report.html of a run directory again from its events.")
@click.argument("run_dir", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as `compare --json` does.")
@debug_option
def report(run_dir: Path, as_json: bool) -> int:
    """Build RUN_DIR/report.html again from RUN_DIR/<strategy>/events, also of a run that is still going on or
    that was stopped.

    \b
    Example:
      midstream report runs/20260101-120000
    """
    from midstream.local.report.page import read_comparison, write_report
    from midstream.local.summary import summarise

    path = write_report(run_dir)
    if as_json:
        runs = [summarise(run) for run in read_comparison(run_dir).runs]
        click.echo(json.dumps({"report": str(path), "runs": runs}, allow_nan=False))
    else:
        click.echo(path)
    return FINE
