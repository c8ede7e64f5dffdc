"""What happened in a run, as append-only JSON lines: one file per process, one object a line.

A line is one `write` to a file opened for appending, so a killed process leaves at most its last line torn.
The writer removes such a tail before it appends, and takes back a line that a full disk cut short; the reader
therefore skips a torn last line and treats any other broken line as damage that somebody should know about.

Kinds of events (times in seconds since the run's start unless named `_unix`):

- `run`: strategy, seed, start_unix, rollout_batch_size, n_samples_per_prompt, machine, command
- `step`: step, version, rollout_start, rollout_end, train_start, train_end, push_end, reward_mean, counts of
  this step (trained, generated, wasted, resumes, restores), what is buffered after it, and for each trained
  rollout response_tokens, turns, environment_s, lag_trajectory and lag_environment
- `evaluation`: start, end, version, tasks (held-out ones that were played), failed, reward_mean
- `alarm`: t, message
- `end`: wall_s, status (`ok`, `interrupted` or `failed`)
"""

import json
import math
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

Event = dict[str, Any]

EVENTS_FOLDER = "events"


class EventsError(ValueError):
    """The events of a run are missing or damaged; the message names the file, the line and what to do."""


class EventWriter:
    """Appends the events of this process to `<folder>/<host>-<pid>.jsonl`; threads may share it.

    A finished `write` survives the death of the process, not a power cut (no fsync).
    Raises OSError when the disk refuses, with nothing of the event left in the file.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        host = re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname()) or "host"
        self.path = folder / f"{host}-{os.getpid()}.jsonl"
        self._lock = threading.Lock()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        _cut_torn_tail(self._file)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event. NaN and infinities become null; arrays and tensors become lists."""
        line = json.dumps(_finite({"kind": kind, **fields}), allow_nan=False, separators=(",", ":")) + "\n"
        with self._lock:
            start_bytes = os.fstat(self._file).st_size
            try:
                _write_all(self._file, line.encode())
            except OSError:
                os.ftruncate(self._file, start_bytes)
                raise

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def __enter__(self) -> "EventWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class RunEvents:
    """The events of one run of one strategy, by kind; `end` is None while it runs and after a kill."""

    run: Event
    steps: Sequence[Event] = ()
    alarms: Sequence[Event] = ()
    end: Event | None = None
    evaluation: Event | None = None
    strategy: str = ""

    @property
    def status(self) -> str:
        """`ok`, `interrupted` or `failed` as the run recorded it; `unfinished` where it recorded no end."""
        return str(self.end.get("status", "unfinished")) if self.end else "unfinished"


def read_file(path: Path) -> Iterator[Event]:
    """The events of one file in the order of writing, without a torn last line.

    Raises EventsError, naming file and line, for a complete line that is not a JSON object with a `kind`.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                event = json.loads(line)
            except ValueError as error:
                raise EventsError(
                    f"{path}:{number}: not JSON ({error}); remove this line to read the rest"
                ) from None
            if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
                raise EventsError(
                    f"{path}:{number}: not an event (no object with a 'kind'); remove this line"
                )
            yield event


def read_run(strategy_dir: Path) -> RunEvents:
    """The latest run recorded under `<strategy_dir>/events`.

    The file whose `run` event started last holds the run; alarms may also come from files of processes that
    started no run themselves. A step recorded twice counts as it was recorded last.
    Raises EventsError where no run has been recorded.
    """
    folder = strategy_dir / EVENTS_FOLDER
    latest: list[Event] = []
    beside: list[Event] = []
    for path in sorted(folder.glob("*.jsonl")):
        events = list(read_file(path))
        starts = [index for index, event in enumerate(events) if event["kind"] == "run"]
        if not starts:
            beside += events
        elif not latest or _start_unix(events[starts[-1]]) >= _start_unix(latest[0]):
            latest = events[starts[-1] :]
    if not latest:
        raise EventsError(f"no run is recorded in {folder}; expected a .jsonl file with a 'run' event")
    return sort_out(latest + beside, strategy=strategy_dir.name)


def sort_out(events: Sequence[Mapping[str, Any]], strategy: str = "") -> RunEvents:
    """Events of one run, by kind; `strategy` is the name where the `run` event does not give one."""
    by_kind: dict[str, list[Event]] = {}
    for event in events:
        by_kind.setdefault(event["kind"], []).append(dict(event))
    run = by_kind.get("run", [{}])[-1]
    steps = {event["step"]: event for event in by_kind.get("step", []) if isinstance(event.get("step"), int)}
    return RunEvents(
        run=run,
        steps=tuple(steps[number] for number in sorted(steps)),
        alarms=tuple(sorted(by_kind.get("alarm", []), key=lambda alarm: float(alarm.get("t") or 0.0))),
        end=by_kind["end"][-1] if "end" in by_kind else None,
        evaluation=by_kind["evaluation"][-1] if "evaluation" in by_kind else None,
        strategy=str(run.get("strategy") or strategy),
    )


def _start_unix(run: Event) -> float:
    return float(run.get("start_unix") or 0.0)


def _write_all(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]


def _cut_torn_tail(file: int) -> None:
    """Drop what follows the last newline: a line that a killed process of the same host and pid left."""
    size_bytes = os.fstat(file).st_size
    content = os.pread(file, size_bytes, 0)
    complete_bytes = content.rfind(b"\n") + 1
    if complete_bytes < size_bytes:
        os.ftruncate(file, complete_bytes)


def _finite(value: Any) -> Any:
    """`value` as strict JSON: no NaN or infinity, no arrays, no keys but strings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if hasattr(value, "tolist"):
        return _finite(value.tolist())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"an event cannot hold {value!r} of type {type(value).__name__}; pass JSON-able values")
