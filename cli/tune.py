"""`midstream tune`: settings of a job, changed while it runs."""

import json
from pathlib import Path

import click

from midstream.cli.settings import DEGRADED, FINE, INTERRUPTED, debug_option


@click.command(short_help="Change settings of a job while it runs.")
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("changes", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--list", "listing", is_flag=True, help="Show what can be changed: value, default, range.")
@click.option("--log", is_flag=True, help="Show all changes so far: when, who, from what to what.")
@click.option("--undo", is_flag=True, help="Take the last change back; again: the one before it.")
@click.option("--dry-run", is_flag=True, help="Check, say what would change and what would come of it, stop.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    default=600.0,
    show_default=True,
    help="How long to wait until the job has taken the change up.",
)
@click.option("--no-wait", is_flag=True, help="Do not wait for that.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@debug_option
def tune(
    run: Path,
    changes: tuple[str, ...],
    listing: bool,
    log: bool,
    undo: bool,
    dry_run: bool,
    wait_s: float,
    no_wait: bool,
    as_json: bool,
) -> int:
    """Change settings of the job whose run directory is RUN (midstream.run_dir). The job takes them up at its
    next step, and keeps them through a restart.

    Keys are those of the configuration, with or without `midstream.` before them. All values are checked before
    anything is written, as the job would check them. An entry of a mapping can be given alone, as
    curriculum.sampler.weights.math=2; null takes it out.

    \b
    Exit codes: 0 fine, 1 failed (somebody else was quicker, nothing to undo), 2 a key or value is wrong,
    3 written, but refused by the job or not taken up in time; with --log: files that cannot be used.

    \b
    Examples:
      midstream tune runs/mine --list
      midstream tune runs/mine curriculum.gate.min_informative=0.4 --dry-run
      midstream tune runs/mine curriculum.gate.min_informative=0.4 bounds.token=8
      midstream tune runs/mine --undo
    """
    if [bool(changes), listing, log, undo].count(True) != 1:
        raise click.UsageError("say one of: KEY=VALUE to change something, --list, --log, --undo")
    if dry_run and (listing or log):
        raise click.UsageError("--dry-run goes with KEY=VALUE or --undo: nothing else changes anything")

    from midstream.cli import tune_text as text
    from midstream.cli.tune_of_run import Outcome, chain_in, effect_of, next_change, taken_up
    from midstream.conf.control.tuning import commit

    chain = chain_in(run)
    if listing:
        click.echo(json.dumps(text.listed(chain)) if as_json else text.list_text(chain))
        return FINE
    if log:
        click.echo(json.dumps(text.logged(chain)) if as_json else text.log_text(chain))
        return DEGRADED if any(entry.problem for entry in chain.entries) else FINE
    change = next_change(chain, changes, undo)
    outcome = Outcome(chain, change, dry_run)
    if dry_run:
        outcome.effect = effect_of(chain, change)
    elif change is not None:
        commit(chain.run_dir, change)
        if not no_wait:
            outcome.waited = True
            try:
                outcome.answer = taken_up(chain, change, wait_s)
            except KeyboardInterrupt:
                click.echo(f"midstream: not waited for; {text.written(chain, change)}", err=True)
                return INTERRUPTED
    click.echo(json.dumps(text.told(outcome), allow_nan=False) if as_json else text.outcome_text(outcome))
    return FINE if outcome.is_fine else DEGRADED
