"""What happened in a run, as append-only JSON lines: one file per process, one object a line.

A line is one `write` to a file opened for appending, so a killed process leaves at most its last line torn.
The writer removes such a tail before it appends, and takes back a line that a full disk cut short; the reader
therefore skips a torn last line and treats any other broken line as damage that somebody should know about.

Kinds of events (times in seconds since the run's start unless named `_unix`):

- `run`: strategy, seed, start_unix, rollout_batch_size, n_samples_per_prompt, machine, command; resumed_at: the
  step with which a run that was stopped goes on, null in its first part; elapsed_s: what its earlier parts took,
  from where its clock goes on
- `step`: step, version, rollout_start, rollout_end, train_start, train_end, push_end, reward_mean, counts of
  this step (trained, generated, wasted, resumes, restores), what is buffered after it, trained_groups and
  dropped_groups by their index, and for each trained rollout response_tokens, turns, environment_s,
  lag_trajectory and lag_environment
- `evaluation`: start, end, version, tasks (held-out ones that were played), failed, reward_mean, and sources: the
  last three for each source by its name; the run's clock goes on from its start
- `alarm`: t, message
- `end`: wall_s, status (`ok`, `interrupted` or `failed`)
"""

import itertools
import json
import math
import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

Event = dict[str, Any]

EVENTS_FOLDER = "events"


class EventsError(ValueError):
    """The events of a run are missing or damaged; the message names the file, the line and what to do."""


class NothingRecorded(EventsError):
    """No run has been recorded there."""


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
    """The events of one run of one strategy, by kind; `end` is None while it runs and after a kill.

    `parts` are the `run` events: one, and another for each time that it was resumed. `lost` are the steps that
    were recorded and came after the checkpoint from which it was resumed: they have been done again.
    """

    parts: Sequence[Event]
    steps: Sequence[Event] = ()
    lost: Sequence[Event] = ()
    alarms: Sequence[Event] = ()
    end: Event | None = None
    evaluations: Sequence[Event] = ()
    strategy: str = ""

    @property
    def run(self) -> Event:
        """How it began."""
        return self.parts[0]

    @property
    def evaluation(self) -> Event | None:
        """That of the policy that was scored last."""
        return self.evaluations[-1] if self.evaluations else None

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
    """The latest run recorded under `<strategy_dir>/events`, all of its parts.

    Alarms may also come from files of processes that started no run themselves. Raises NothingRecorded, or
    EventsError where the events are damaged.
    """
    folder = strategy_dir / EVENTS_FOLDER
    parts: list[list[Event]] = []
    beside: list[Event] = []
    for path in sorted(folder.glob("*.jsonl")):
        into = beside
        for event in read_file(path):
            if event["kind"] == "run":
                into = []
                parts.append(into)
            into.append(event)
    if not parts:
        raise NothingRecorded(f"no run is recorded in {folder}; expected a .jsonl file with a 'run' event")
    parts.sort(key=lambda part: float(part[0].get("start_unix") or 0.0))
    begun = max((i for i, part in enumerate(parts) if part[0].get("resumed_at") is None), default=0)
    return sort_out(itertools.chain(*parts[begun:], beside), strategy=strategy_dir.name)


def sort_out(events: Iterable[Mapping[str, Any]], strategy: str = "") -> RunEvents:
    """Events of one run in their order, by kind; `strategy` is the name where the `run` event does not give one.

    A step that was recorded twice counts as it was recorded last, and so does the score of a version.
    """
    parts: list[Event] = []
    steps: dict[int, Event] = {}
    lost: list[Event] = []
    alarms: list[Event] = []
    end: Event | None = None
    scores: dict[int, Event] = {}
    for event in map(dict, events):
        match event["kind"]:
            case "run":
                parts.append(event)
                end = None
                resumed_at = event.get("resumed_at")
                if resumed_at is not None:
                    lost += [steps.pop(number) for number in sorted(steps) if number >= resumed_at]
                    scores = {version: score for version, score in scores.items() if version <= resumed_at}
            case "step" if isinstance(event.get("step"), int):
                steps[event["step"]] = event
            case "alarm":
                alarms.append(event)
            case "evaluation":
                scores[int(event.get("version") or 0)] = event
            case "end":
                end = event
    parts = parts or [{}]
    return RunEvents(
        parts=tuple(parts),
        steps=tuple(steps[number] for number in sorted(steps)),
        lost=tuple(lost),
        alarms=tuple(sorted(alarms, key=lambda alarm: float(alarm.get("t") or 0.0))),
        end=end,
        evaluations=tuple(scores[version] for version in sorted(scores)),
        strategy=str(parts[0].get("strategy") or strategy),
    )


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
