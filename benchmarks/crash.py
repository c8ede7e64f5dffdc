"""Kills a real job at random moments and resumes it each time: nothing may be lost, done twice or left behind.

The job trains with `continue` on a real server in real sandboxes, cuts off half of what it starts, and writes a
checkpoint after every step. A kill is SIGKILL: at a moment drawn from two steps' time, or from the time that one of
the phases takes. Every twentieth, from the tenth on, kills the server, too. After each, and when the job has at last
come to its end unharmed, what lies on disk is compared with what the events say:

- every prompt that was handed out has been trained on once, waits, or was dropped by the host;
- every snapshot that a waiting rollout needs is in the store, and at the end no other is pinned there;
- of the sandboxes of jobs that were killed nothing is left once the next one, or its reaper, has had its turn.

    python benchmarks/crash.py [--json] [--quick] [--kills N] [--seed N] [--keep FOLDER]
"""

import argparse
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crash_checks import left_behind, read_ledger, reap_all, snapshot_store, unneeded_pins
from crash_job import PHASES, job_config, live
from result import publish, target

from midstream.conf.schema import JobConfig
from midstream.envs.sandboxes.processes import descendants
from midstream.local.engine.control import ServerError
from midstream.local.engine.flags import EngineAddress
from midstream.local.server import EngineServer
from midstream.local.tasks.chain_fix import write_tasks
from midstream.local.warm_start import warm_start

KILLS, QUICK_KILLS = 200, 12
SERVER_DIES_FIRST, SERVER_DIES_EVERY = 10, 20
# The exit code of what Ctrl-C has stopped.
INTERRUPTED = 130
# Steps that a run has left whenever it starts: more than it lives to see.
FAR = 1000
STEPS_AT_THE_END = 2
# Between that, what a killed job left is the next one's to remove.
REAPED_EVERY = 5
# Of a kill's aims, so many are any moment at all.
ANYWHERE_SHARE = 0.3
# Until phases have been timed.
FIRST_GUESS_S = 0.2
LIFE_TIMEOUT_S = 120.0
GONE_WITHIN_S = 20.0


@dataclass
class Found:
    """Faults, in words, and what the kills were."""

    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    pinned: list[str] = field(default_factory=list)
    died: list[str] = field(default_factory=list)
    killed_in: Counter[str] = field(default_factory=Counter)
    servers_killed: int = 0
    kills: int = 0


class Life:
    """One process of the job, from its start until it is killed or ends."""

    def __init__(self, config: JobConfig, address: EngineAddress, checkpoint: Path, log: Path) -> None:
        self.phase = "start"
        self._phases, theirs = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=live, args=(config, address, checkpoint, theirs, log))
        self.process.start()
        theirs.close()
        self.began_at = time.monotonic()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def next_phase(self, timeout_s: float) -> str | None:
        """Waits for the next phase; None where it does not come in time, or the process has ended."""
        with suppress(EOFError):
            if self._phases.poll(timeout_s):
                self.phase = self._phases.recv()
                return self.phase
        return None

    def kill(self) -> list[int]:
        """Ends the process, and returns those that it had started."""
        started = descendants(self.pid)
        self.process.kill()
        self.process.join()
        with suppress(EOFError):
            while self._phases.poll():
                self.phase = self._phases.recv()
        self._phases.close()
        return started


class Timings:
    """How long phases and steps take, from what was seen of them."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def add(self, what: str, seconds: float) -> None:
        self._seconds[what].append(seconds)

    def guess_s(self, what: str) -> float:
        seen = self._seconds[what]
        return statistics.median(seen) if seen else FIRST_GUESS_S


def let_live(life: Life, phase: str, times: int, seconds: float, timings: Timings) -> bool:
    """Returns so many seconds after the phase has begun so many times; False where the job ends before."""
    since = give_up_at = time.monotonic()
    give_up_at += LIFE_TIMEOUT_S
    kill_at: float | None = None
    step_began_at: float | None = None
    while (left_s := (kill_at or give_up_at) - time.monotonic()) > 0:
        before = life.phase
        begun = life.next_phase(left_s)
        now = time.monotonic()
        if begun is None:
            if not life.process.is_alive():
                return False
            continue
        timings.add(before, now - since)
        since = now
        if begun == "checkpoint":
            if step_began_at is not None:
                timings.add("step", now - step_began_at)
            step_began_at = now
        times -= begun == phase
        if times <= 0 and kill_at is None:
            kill_at = now + seconds
    if kill_at is None:
        raise RuntimeError(f"phase {phase} did not begin {times} times more within {LIFE_TIMEOUT_S:g} s")
    return True


def drawn_moment(draw: random.Random, timings: Timings) -> tuple[str, int, float]:
    """When to kill, as `let_live` takes it."""
    if draw.random() < ANYWHERE_SHARE:
        return "generation", 1, draw.uniform(0, 2 * timings.guess_s("step"))
    phase = draw.choice(PHASES)
    # Of what comes more than once in a step, not only the first.
    most = {"start": 1, "generation": 20, "snapshot": 20}.get(phase, 2)
    return phase, draw.randint(1, most), draw.uniform(0, timings.guess_s(phase))


class CrashTest:
    """The run that is killed again and again."""

    def __init__(self, run_dir: Path, seed: int) -> None:
        self.found = Found()
        self._config = job_config(run_dir, FAR, seed)
        self._draw = random.Random(seed)
        self._timings = Timings()
        self._log = run_dir / "job.log"
        self._pids: set[int] = set()
        for folder in (run_dir, run_dir / "sandboxes", run_dir / "tmp"):
            folder.mkdir(exist_ok=True)
        assert self._config.tasks.path is not None
        tasks = self._config.tasks
        write_tasks(tasks.path, tasks.count, seed=seed, difficulty=tasks.difficulty)
        self._checkpoint = warm_start(self._config.model, self._config.warm_start)
        self._server = self._new_server()

    def _new_server(self) -> EngineServer:
        log_path = self._config.run_dir / "server.log"
        return EngineServer(self._config.server, model_path=self._checkpoint, log_path=log_path)

    def run(self, kills: int) -> None:
        """All kills, and the end. Whatever happens, neither server nor job is left."""
        try:
            self._server.start(weight_version=0)
            for number in range(1, kills + 1):
                self._kill_once(number, server_too=number % SERVER_DIES_EVERY == SERVER_DIES_FIRST)
                self._check(number, reaper_first=number % REAPED_EVERY == 0)
            self._end()
            self._check(kills, reaper_first=True)
        finally:
            self._server.stop()
        self.found.pinned += sorted(unneeded_pins(self._config))

    def _kill_once(self, number: int, *, server_too: bool) -> None:
        with self._life(self._config) as life:
            died = not let_live(life, *drawn_moment(self._draw, self._timings), self._timings)
            if server_too and self._server.pid is not None:
                os.kill(self._server.pid, signal.SIGKILL)
                time.sleep(self._draw.uniform(0, 1))
            started = life.kill()
        self.found.kills += 1
        self.found.killed_in[life.phase] += 1
        if died:
            self.found.died.append(f"life {number} in {life.phase}: see the end of its log {self._log}")
        give_up_at = time.monotonic() + GONE_WITHIN_S
        while (alive := [pid for pid in started if is_alive(pid)]) and time.monotonic() < give_up_at:
            time.sleep(0.02)
        self.found.left += [f"process {pid} of life {number}" for pid in alive]
        if server_too:
            self.found.servers_killed += 1
            self._revive_server()

    def _revive_server(self) -> None:
        try:
            self._server.restart(self._checkpoint, 0)
        except ServerError as error:
            # Another process may have taken its port meanwhile.
            print(f"the server does not come back ({error}): a new one is started", file=sys.stderr)
            self._server.stop()
            self._server = self._new_server()
            self._server.start(weight_version=0)

    def _end(self) -> None:
        newest = read_ledger(self._config).checkpoint
        steps = STEPS_AT_THE_END if newest is None else newest + 1 + STEPS_AT_THE_END
        with self._life(self._config.model_copy(update={"steps": steps})) as life:
            life.process.join()
        if life.process.exitcode != 0:
            self.found.died.append(f"the last life: see the end of its log {self._log}")

    @contextmanager
    def _life(self, config: JobConfig) -> Iterator[Life]:
        life = Life(config, EngineAddress(self._server.host, self._server.port), self._checkpoint, self._log)
        self._pids.add(life.pid)
        try:
            yield life
        finally:
            life.process.kill()
            life.process.join()

    def _check(self, number: int, *, reaper_first: bool) -> None:
        ledger = read_ledger(self._config)
        at = f"after kill {number}, at checkpoint {ledger.checkpoint}"
        self.found.lost += [f"group {group} {at}" for group in ledger.lost()]
        self.found.twice += [f"group {group} {at}" for group in ledger.trained_twice()]
        missing = ledger.missing(snapshot_store(self._config))
        self.found.missing += [f"snapshot {snapshot} {at}" for snapshot in missing]
        if reaper_first:
            left = reap_all(self._config) + left_behind(self._config, self._pids)
            self.found.left += [f"{each} {at}" for each in left]
        if sys.stderr.isatty():
            print(f"\rkill {number}, checkpoint {ledger.checkpoint}", end="", file=sys.stderr)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that nobody has waited for has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def main() -> int:
    options = parse_options()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["midstream.local.compare"])
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="midstream-crash-") as scratch:
        test = CrashTest(options.keep or Path(scratch), options.seed)
        # Whoever stops it, or whatever does, what was found until then is told.
        try:
            test.run(options.kills)
        except KeyboardInterrupt:
            pass
        except Exception:  # noqa: BLE001  whatever it is, what was found is worth an hour
            traceback.print_exc()
    found = test.found
    counts = {
        "prompts lost": found.lost,
        "prompts trained twice": found.twice,
        "snapshots missing": found.missing,
        "snapshots pinned for nobody": found.pinned,
        "remains of sandboxes": found.left,
        "jobs that ended without being killed": found.died,
    }
    targets = [target(name, [len(faults)], "", "<=", 0) for name, faults in counts.items()]
    targets.append(target("kills", [found.kills], "", ">=", KILLS))
    rows: list[dict[str, Any]] = [{"killed in": phase, "kills": found.killed_in[phase]} for phase in PHASES]
    rows.append({"servers killed": found.servers_killed, "minutes": (time.monotonic() - began) / 60})
    rows += [{"fault": name, "what": fault} for name, faults in counts.items() for fault in faults]
    publish(targets, rows, as_json=options.json)
    if any(counts.values()):
        return 1
    return 0 if found.kills == options.kills else INTERRUPTED


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_KILLS} kills")
    parser.add_argument("--kills", type=int, default=None, help=f"how many (default {KILLS})")
    parser.add_argument("--seed", type=int, default=0, help="of the moments, and of the job")
    parser.add_argument("--keep", type=Path, help="a new folder for the run, which stays")
    options = parser.parse_args()
    options.kills = options.kills or (QUICK_KILLS if options.quick else KILLS)
    return options


if __name__ == "__main__":
    sys.exit(main())
