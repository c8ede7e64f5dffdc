"""The same job once per strategy, on the same tasks, seeds, server and warm start."""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from midstream.buffers.journal.errors import JournalError, JournalInUse
from midstream.buffers.journal.lock import DirectoryLock
from midstream.conf.compose import write_resolved
from midstream.conf.errors import ConfigError, Problem
from midstream.conf.files import replace_file
from midstream.conf.schema import JobConfig
from midstream.envs.ownership.claims import temp_prefix
from midstream.envs.protocol import find_factory
from midstream.envs.tasks import load_tasks
from midstream.local.args import checkpoints_of, slime_args
from midstream.local.attached import AttachedServer
from midstream.local.checkpoint import Checkpoints
from midstream.local.events import EVENTS_FOLDER, EventWriter, read_run
from midstream.local.job import Run
from midstream.local.machine import describe_machine
from midstream.local.model.checkpoint import build_hf_checkpoint
from midstream.local.parts import check_parts
from midstream.local.progress import Progress
from midstream.local.report.page import write_report
from midstream.local.resume import (
    CONFIG_FILE,
    check_resumable,
    has_ended,
    recorded_run,
    refuse_used,
    strategy_dir,
)
from midstream.local.server import EngineServer
from midstream.local.summary import summarise, wall_s
from midstream.local.tasks.chain_fix import Split, write_tasks
from midstream.local.tasks.mixed import write_mixed_tasks
from midstream.local.warm_start import warm_start

RESULT_FILE = "compare.json"
LOCK_FILE = "compare.lock"


def compare(
    runs: Mapping[str, JobConfig], *, progress: Progress, command: Sequence[str] = (), resume: bool = False
) -> dict[str, Any]:
    """Train once per entry of ``runs`` and return the object that ``midstream compare --json`` prints.

    The entries differ only in what their strategy says; ``run_dir`` of the first is everybody's. The
    server's start hides the warm start. Whatever happens, the server is stopped; the report and the
    result are written from what was recorded, also after an interruption.

    With ``resume`` the comparison in ``run_dir`` goes on: strategies that have ended are kept, the one that was
    under way goes on at its last checkpoint, or at its beginning where it has none.

    Raises:
        ConfigError: ``run_dir`` holds another comparison, or, to be resumed, one with other settings or none; or
            it cannot be written.
        JournalInUse: another comparison runs there.
        TasksError: the tasks cannot be used; nothing has been started.
        ServerError: the server cannot be started, or died too often.
    """
    shared = next(iter(runs.values()))
    run_dir = shared.run_dir
    if resume:
        check_resumable(runs)
    else:
        refuse_used(run_dir)
    check_parts(runs)
    with closing(_taken(run_dir)):
        return _compare(runs, progress, command)


def _taken(run_dir: Path) -> DirectoryLock:
    """The run directory, there and nobody else's. Raises JournalInUse, ConfigError where it cannot be written."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return DirectoryLock(run_dir, LOCK_FILE)
    except JournalInUse:
        raise
    except (OSError, JournalError) as error:
        fix = f"name a directory that can be made and written ({error})"
        raise ConfigError([Problem("run_dir", str(run_dir), fix)]) from error


def _compare(runs: Mapping[str, JobConfig], progress: Progress, command: Sequence[str]) -> dict[str, Any]:
    shared = next(iter(runs.values()))
    run_dir = shared.run_dir
    tasks, held_out = _tasks(shared, run_dir), _held_out(shared, run_dir)
    for config in runs.values():
        write_resolved(config, strategy_dir(config) / CONFIG_FILE)
    pending = [config for config in runs.values() if not has_ended(strategy_dir(config))]
    if len(pending) < len(runs):
        progress.note(
            f"kept, since they have ended: {', '.join(runs.keys() - {c.strategy for c in pending})}"
        )
    if not pending:
        return _publish(run_dir, runs)
    with tempfile.TemporaryDirectory(prefix=temp_prefix("fresh")) as scratch:
        fresh = build_hf_checkpoint(Path(scratch) / "checkpoint", shared.model)
        server = EngineServer(
            shared.server, model_path=fresh, log_path=run_dir / "server.log", random_seed=shared.seed
        )
        try:
            progress.note(f"starting the SGLang server (log: {server.log_path})")
            server.launch(weight_version=0)
            checkpoint = warm_start(shared.model, shared.warm_start, progress=_told(progress))
            server.wait_healthy()
            tokenizer = AutoTokenizer.from_pretrained(checkpoint)
            for config in pending:
                run_strategy(config, server, checkpoint, tasks, held_out, tokenizer, progress, command)
        finally:
            try:
                server.stop()
            finally:
                progress.close()
                result = _publish(run_dir, runs)
    return result


def run_strategy(
    config: JobConfig,
    server: EngineServer | AttachedServer,
    checkpoint: Path,
    tasks: Path,
    held_out: Path | None,
    tokenizer: Any,
    progress: Progress,
    command: Sequence[str] = (),
) -> None:
    """Train with one strategy on a server that runs, from where its folder says that it was.

    Raises what `Run.train` does; the events have been written either way.
    """
    progress.strategy_started(config.strategy, config.steps)
    args = slime_args(
        config, engine_host=server.host, engine_port=server.port, checkpoint=checkpoint, tasks=tasks
    )
    before = recorded_run(strategy_dir(config))
    elapsed_s = wall_s(before) if before is not None else 0.0
    newest = Checkpoints(checkpoints_of(config), config.save_every).latest()
    with EventWriter(strategy_dir(config) / EVENTS_FOLDER) as events:
        events.write(
            "run",
            strategy=config.strategy,
            seed=config.seed,
            start_unix=time.time(),
            rollout_batch_size=config.rollout.rollout_batch_size,
            n_samples_per_prompt=config.rollout.n_samples_per_prompt,
            machine=describe_machine(),
            command=list(command),
            resumed_at=None if before is None else 0 if newest is None else newest + 1,
            elapsed_s=elapsed_s,
        )
        Run(
            config,
            args,
            server=server,
            warm_start=checkpoint,
            held_out=held_out,
            tokenizer=tokenizer,
            events=events,
            progress=progress,
            elapsed_s=elapsed_s,
        ).train()
    progress.strategy_finished(config.strategy, summarise(read_run(strategy_dir(config))))


def _tasks(config: JobConfig, run_dir: Path) -> Path:
    """The user's tasks, checked, or generated ones in the run directory."""
    path = config.tasks.path
    if path is None:
        path = _generated(config, run_dir / "tasks.jsonl", config.tasks.count, "train")
    return _checked(config, path)


def _held_out(config: JobConfig, run_dir: Path) -> Path | None:
    """The tasks that policies are scored on, checked; None where they are not."""
    count, path = config.tasks.held_out, config.tasks.held_out_path
    if not count:
        return None
    if path is None:
        path = _generated(config, run_dir / "held_out.jsonl", count, "held_out")
    return _checked(config, path)


def _generated(config: JobConfig, path: Path, count: int, split: Split) -> Path:
    chosen = config.tasks
    if not chosen.sources:
        return write_tasks(path, count, seed=chosen.seed, difficulty=chosen.difficulty, split=split)
    key = config.midstream.curriculum.source_key
    return write_mixed_tasks(path, count, chosen.sources, source_key=key, seed=chosen.seed, split=split)


def _checked(config: JobConfig, path: Path) -> Path:
    load_tasks(path, getattr(find_factory(config.midstream), "check_task", None))
    return path


def _told(progress: Progress) -> Callable[[int, int, float], None]:
    """The warm start's steps as notes: its first, and how it ended."""

    def tell(done: int, steps: int, loss: float) -> None:
        if done == 1:
            progress.note(f"warm start: {steps} supervised steps; kept for later runs")
        elif done == steps:
            progress.note(f"warm start: done, {loss:.3f} nats a token")

    return tell


def _publish(run_dir: Path, runs: Mapping[str, JobConfig]) -> dict[str, Any]:
    """Write report and result from what was recorded; nothing where nothing was."""
    recorded = [recorded_run(strategy_dir(config)) for config in runs.values()]
    summaries = [summarise(run) for run in recorded if run is not None]
    if not summaries:
        return {"report": None, "runs": []}
    result = {"report": str(write_report(run_dir)), "runs": summaries}
    replace_file(run_dir / RESULT_FILE, f"{json.dumps(result, indent=1, allow_nan=False)}\n".encode())
    return result
