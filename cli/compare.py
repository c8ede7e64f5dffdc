"""`midstream compare`: the same training job once per strategy, and what each of them made of it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from midstream.cli.settings import DEGRADED, FINE, INTERRUPTED, Settings, debug_option

if TYPE_CHECKING:
    from midstream.conf.schema import JobConfig


@click.command(short_help="Train once per strategy for unfinished rollouts, and compare.")
@click.argument("overrides", nargs=-1)
@click.option("--strategies", metavar="A,B,…", help="Which strategies, in this order.")
@click.option("--steps", type=click.IntRange(min=1), help="Training steps per strategy.")
@click.option("--seed", type=int, help="Seed of tasks, sampling and model.")
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False), help="Where everything goes.")
@click.option("--tasks", type=click.Path(path_type=Path), help="Your own tasks, a JSONL file.")
@click.option("--resume", is_flag=True, help="Go on with the comparison in --run-dir, with its arguments.")
@click.option("--dry-run", is_flag=True, help="Check everything, print the resolved configuration, stop.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout instead of a table.")
@debug_option
@click.pass_obj
def compare(
    settings: Settings,
    overrides: tuple[str, ...],
    strategies: str | None,
    steps: int | None,
    seed: int | None,
    run_dir: Path | None,
    tasks: Path | None,
    resume: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Train the same agentic job once per strategy, on a real SGLang server and a real Megatron-core
    trainer on this machine, and compare what became of the rollouts that a step cut off.

    \b
    Strategies:
      wait        cut nothing off: every rollout of a step is waited for
      discard     start more than needed, drop what is unfinished
      restart     start what is unfinished anew, under the new policy
      continue    resume what is unfinished, tokens and environment, where it was
      rewind      resume it from before what too old policies did to its environment (only on request)
      anchor      fork its group anew from the member that came furthest (only on request)
      anchored    the same, with advantages that compare continuations of one state (only on request)
      ladder      resume it while it is young, then fork, then go back (only on request)
      dapo        as continue; drop groups whose rewards are all equal (only on request)
      curriculum  as dapo; pass over prompts that are unlikely to inform (only on request)
      naive       tokens go on but the environment starts anew (only on request: it shows the damage)

    OVERRIDES are Hydra overrides of the configuration, such as trainer.lr=1e-4; job=quick and job=smoke
    choose shorter jobs, job=mixed one whose tasks mostly teach nothing.

    \b
    Examples:
      midstream compare
      midstream compare job=quick --strategies wait,continue
      midstream compare --tasks my_tasks.jsonl --steps 50 --seed 1 --run-dir runs/mine
      midstream compare save_every=2 --run-dir runs/mine
      midstream compare save_every=2 --run-dir runs/mine --resume
      midstream compare --json > result.json

    A comparison that was stopped or killed goes on with --resume and the same arguments: strategies that have
    ended are kept, the one that was under way goes on at its last checkpoint. Those are written every
    save_every steps; without them it starts again.

    \b
    Outputs, in the run directory (runs/<date>-<time> unless --run-dir says otherwise):
      report.html                 the comparison in pictures, one self-contained page
      compare.json                the object that --json prints
      <strategy>/config.yaml      the resolved configuration
      <strategy>/events/*.jsonl   everything that was recorded; `midstream report` reads it again
      <strategy>/checkpoints/     where save_every is set: what --resume goes on from

    Progress goes to stderr. Ctrl-C stops the job cleanly and keeps what was recorded; a second one stops it
    at once.
    """
    from midstream.cli.progress import progress_on_stderr
    from midstream.conf.compose import compose_runs

    words = [*overrides, *_as_overrides(strategies, steps, seed, run_dir, tasks)]
    if resume and not any(word.lstrip("+").startswith("run_dir=") for word in words):
        raise click.UsageError("--resume needs --run-dir: which comparison is to go on?")
    configs = compose_runs(words)
    _check_run_dir(configs, resume)
    _check_tasks(configs)
    _check_parts(configs)
    if dry_run:
        click.echo(_resolved(configs, as_json))
        return FINE
    progress = progress_on_stderr()
    try:
        result = _compare(configs, progress, settings, resume)
    except KeyboardInterrupt:
        where = next(iter(configs.values())).run_dir
        click.echo(
            f"midstream: interrupted; what was recorded is in {where}, --resume goes on with it", err=True
        )
        return INTERRUPTED
    finally:
        progress.close()
    if as_json:
        click.echo(json.dumps(result, allow_nan=False))
    else:
        _print(result)
    return _exit_code(result, asked=len(configs))


def _compare(
    configs: "Mapping[str, JobConfig]", progress: Any, settings: Settings, resume: bool
) -> dict[str, Any]:
    from midstream.cli.streams import stdout_to_stderr

    progress.note("loading torch, SGLang and Megatron-core")
    with stdout_to_stderr():
        from midstream.local import compare as job

        command = ("midstream", *settings.arguments)
        return job.compare(configs, progress=progress, command=command, resume=resume)


def _as_overrides(
    strategies: str | None, steps: int | None, seed: int | None, run_dir: Path | None, tasks: Path | None
) -> list[str]:
    """The options as what they stand for in the configuration; they win over OVERRIDES."""
    found = []
    if strategies is not None:
        names = [name.strip() for name in strategies.split(",") if name.strip()]
        found.append(f"strategies=[{','.join(map(_quoted, names))}]")
    if steps is not None:
        found.append(f"steps={steps}")
    if seed is not None:
        found.append(f"seed={seed}")
    if run_dir is not None:
        found.append(f"run_dir={_quoted(str(run_dir))}")
    if tasks is not None:
        found.append(f"tasks.path={_quoted(str(tasks))}")
    return found


def _quoted(text: str) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text=text, quote=Quote.single).with_quotes()


def _check_run_dir(configs: "Mapping[str, JobConfig]", resume: bool) -> None:
    """Look at the run directory now: a wrong one should be known before anything is started."""
    from midstream.local.resume import check_resumable, refuse_used

    if resume:
        check_resumable(configs)
    else:
        refuse_used(next(iter(configs.values())).run_dir)


def _check_tasks(configs: "Mapping[str, JobConfig]") -> None:
    """Read the user's tasks now: a broken line should be known before anything is started."""
    from midstream.envs.protocol import find_factory
    from midstream.envs.tasks import load_tasks

    # Strategies mostly share them, and a file may be long.
    distinct = {
        (config.tasks.path, config.midstream.environment.factory): config for config in configs.values()
    }
    for config in distinct.values():
        check = getattr(find_factory(config.midstream), "check_task", None)
        if config.tasks.path is not None:
            load_tasks(config.tasks.path, check)


def _check_parts(configs: "Mapping[str, JobConfig]") -> None:
    """Import hooks and policies now: a wrong name should be known before anything is started."""
    from midstream.local.parts import check_parts

    check_parts(configs)


def _resolved(configs: "Mapping[str, JobConfig]", as_json: bool) -> str:
    resolved = {name: config.model_dump(mode="json") for name, config in configs.items()}
    if as_json:
        return json.dumps(resolved)
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(resolved)).rstrip()


def _print(result: Mapping[str, Any]) -> None:
    from midstream.cli.table import print_comparison

    print_comparison(result["runs"])
    click.echo(f"\nReport: {result['report']}")


def _exit_code(result: Mapping[str, Any], asked: int) -> int:
    runs: Sequence[Mapping[str, Any]] = result["runs"]
    sound = [run["status"] == "ok" and not run["restores_bad"] and not run["failed_rollouts"] for run in runs]
    return FINE if len(runs) == asked and all(sound) else DEGRADED
