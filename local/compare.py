"""The same job once per strategy, on the same tasks, seeds, server and warm start."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from midstream.conf.compose import write_resolved
from midstream.conf.schema import JobConfig
from midstream.envs.tasks import load_tasks
from midstream.local.args import slime_args
from midstream.local.events import EVENTS_FOLDER, EventWriter, read_run
from midstream.local.job import Run
from midstream.local.machine import describe_machine
from midstream.local.model.checkpoint import build_hf_checkpoint
from midstream.local.progress import Progress
from midstream.local.report.page import write_report
from midstream.local.server import EngineServer
from midstream.local.summary import summarise
from midstream.local.tasks.chain_fix import write_tasks
from midstream.local.warm_start import warm_start

RESULT_FILE = "compare.json"
REPORT_FILE = "report.html"


def compare(runs: Mapping[str, JobConfig], *, progress: Progress, command: Sequence[str] = ()) -> dict[str, Any]:
    """Train once per entry of ``runs`` and return the object that ``midstream compare --json`` prints.

    The entries differ only in what their strategy says; ``run_dir`` of the first is everybody's. The
    server's start hides the warm start. Whatever happens, the server is stopped; the report and the
    result are written from what was recorded, also after an interruption.

    Raises:
        TasksError: the tasks cannot be used; nothing has been started.
        ServerError: the server cannot be started, or died too often.
    """
    shared = next(iter(runs.values()))
    run_dir = shared.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    tasks = _tasks(shared, run_dir)
    for config in runs.values():
        write_resolved(config, _strategy_dir(config) / "config.yaml")
    fresh = run_dir / "fresh"
    if not fresh.exists():
        build_hf_checkpoint(fresh, shared.model)
    server = EngineServer(shared.server, model_path=fresh, log_path=run_dir / "server.log")
    try:
        server.launch(weight_version=0)
        progress.note(f"starting the SGLang server (log: {server.log_path})")
        checkpoint = warm_start(shared.model, shared.warm_start, progress=lambda *_: None)
        server.wait_healthy()
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        for config in runs.values():
            _run(config, server, checkpoint, tasks, tokenizer, progress, command)
    finally:
        server.stop()
        progress.close()
        result = _write_result(run_dir, runs)
    return result


def _run(
    config: JobConfig,
    server: EngineServer,
    checkpoint: Path,
    tasks: Path,
    tokenizer: Any,
    progress: Progress,
    command: Sequence[str],
) -> None:
    progress.strategy_started(config.strategy, config.steps)
    args = slime_args(config, engine_host=server.host, engine_port=server.port, checkpoint=checkpoint, tasks=tasks)
    with EventWriter(_strategy_dir(config) / EVENTS_FOLDER) as events:
        events.write(
            "run",
            strategy=config.strategy,
            seed=config.seed,
            start_unix=time.time(),
            rollout_batch_size=config.rollout.rollout_batch_size,
            n_samples_per_prompt=config.rollout.n_samples_per_prompt,
            machine=describe_machine(),
            command=list(command),
        )
        Run(
            config,
            args,
            server=server,
            warm_start=checkpoint,
            tokenizer=tokenizer,
            events=events,
            progress=progress,
        ).train()
    progress.strategy_finished(config.strategy, summarise(read_run(_strategy_dir(config))))


def _tasks(config: JobConfig, run_dir: Path) -> Path:
    """The user's tasks, checked, or generated ones in the run directory."""
    path = config.tasks.path
    if path is None:
        path = run_dir / "tasks.jsonl"
        write_tasks(path, config.tasks)
    load_tasks(path)
    return path


def _write_result(run_dir: Path, runs: Mapping[str, JobConfig]) -> dict[str, Any]:
    recorded = [_strategy_dir(config) for config in runs.values() if (_strategy_dir(config) / EVENTS_FOLDER).exists()]
    report = write_report(run_dir, run_dir / REPORT_FILE)
    result = {"report": str(report), "runs": [summarise(read_run(folder)) for folder in recorded]}
    temporary = run_dir / f".{RESULT_FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(run_dir / RESULT_FILE)
    return result


def _strategy_dir(config: JobConfig) -> Path:
    assert config.midstream.run_dir is not None
    return config.midstream.run_dir
