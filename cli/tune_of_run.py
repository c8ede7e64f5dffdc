"""What `midstream tune` does: finds the run, makes the change, foretells it, and waits for the job to take it up."""

import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from midstream.buffers.journal.errors import JournalError
from midstream.buffers.journal.lock import holder_of
from midstream.buffers.journal.runs import FOLDER as BUFFER
from midstream.buffers.runs import named_below, runs_with
from midstream.cli.units import age
from midstream.conf.control.acknowledged import Acknowledgement, acknowledgement_in
from midstream.conf.control.changes import Change, path_of
from midstream.conf.control.live import merged
from midstream.conf.control.strict import ControlError
from midstream.conf.control.tuning import Chain, chain_of, changed, has_control, undone
from midstream.conf.control.wanted import wanted_values
from midstream.local.report.words import printable

if TYPE_CHECKING:
    from midstream.buffers.curriculum.preview import Preview

WEIGHTS = "curriculum.sampler.weights"
_POLL_S = 0.2


@dataclass(frozen=True)
class Answer:
    """What the job said; `problem` where it refused the change."""

    acknowledgement: Acknowledgement
    problem: str | None = None


@dataclass
class Outcome:
    """What became of a change; `change` is None where all is so already."""

    chain: Chain
    change: Change | None
    dry_run: bool
    effect: "tuple[Preview, Preview] | None" = None
    """Before and after; None where it was not asked for, or the run has no statistics."""
    waited: bool = False
    answer: Answer | None = None

    @property
    def is_fine(self) -> bool:
        if self.answer is not None:
            return self.answer.problem is None
        return not self.waited


def chain_in(run: Path) -> Chain:
    """The control folder of a run, which may be the only one in a folder. Raises ControlError."""
    try:
        found = runs_with(run, has_control)
        below = "" if found else named_below(run, has_control)
    except OSError as error:
        raise ControlError(f"cannot read {run} ({error.strerror}): mend access") from error
    if len(found) > 1:
        raise ControlError(f"{run} holds {len(found)} runs: name one of {', '.join(map(str, found))}")
    if below:
        raise ControlError(f"{run} holds no run that can be tuned, but there is one in {below}: name it")
    if not found:
        raise ControlError(
            f"{run} holds no run that can be tuned: its job has not begun, or midstream.run_dir is not set to this"
            " directory"
        )
    return chain_of(found[0])


def next_change(chain: Chain, words: Sequence[str], undo: bool) -> Change | None:
    """The change that was asked for; None where all is so already. Raises ConfigError, ControlError."""
    if undo:
        return undone(chain)
    values, problems = wanted_values(words, chain.layer)
    return changed(chain, values, problems)


def effect_of(chain: Chain, change: Change | None) -> "tuple[Preview, Preview] | None":
    """What the curriculum would do before and after, by the run's own statistics; None without any."""
    after = chain.layer if change is None else merged(chain.base, change.values)
    if after.curriculum == chain.layer.curriculum:
        return None
    from midstream.buffers.curriculum.preview import preview

    return preview(chain.run_dir, chain.layer.curriculum, after.curriculum)


def unknown_sources(chain: Chain, change: Change) -> tuple[list[str], list[str]]:
    """Sources that the change names and no prompt of the run is of, and those that there are, as far as is known."""
    from midstream.buffers.curriculum.history import FOLDER, STATE
    from midstream.buffers.curriculum.state import StateError, sources_in

    delta = change.changes.get(WEIGHTS)
    path = chain.run_dir / FOLDER / STATE
    if delta is None or not path.exists():
        return [], []
    try:
        known = sources_in(path)
    except StateError:
        # What a job has kept for us must not keep anybody from tuning it.
        return [], []
    return [name for name in delta.new if name not in known], known


def taken_up(chain: Chain, change: Change, wait_s: float) -> Answer | None:
    """What the job says of a change that is written; None where it says nothing for so long."""
    begun_s, on_terminal = time.monotonic(), sys.stderr.isatty()
    said = f"waiting for the job's next step, {_last_seen(chain)} (Ctrl-C: the change stands)"
    click.echo(printable(said), err=True)
    try:
        while True:
            answer, waited_s = _answer(chain, change), time.monotonic() - begun_s
            if answer is not None or waited_s >= wait_s:
                return answer
            if on_terminal:
                click.echo(f"\r{age(waited_s)} ", err=True, nl=False)
            time.sleep(_POLL_S)
    finally:
        if on_terminal:
            click.echo(err=True)


def _answer(chain: Chain, change: Change) -> Answer | None:
    said = acknowledgement_in(chain.run_dir)
    # What was said before the change was written is not of it.
    if said is None or said == chain.acknowledgement:
        return None
    if said.version >= change.version:
        return Answer(said)
    name = path_of(chain.run_dir, change.version).name
    problems = [refusal.problem for refusal in said.refused if refusal.file == name]
    return Answer(said, problems[0]) if problems else None


def _last_seen(chain: Chain) -> str:
    said = chain.acknowledgement
    if said is None:
        return "of which nothing was seen yet"
    ended = (
        "; no process here has the run open, so that its job may have ended" if _is_left(chain, said) else ""
    )
    return f"which was seen at step {said.step}, {said.time}{ended}"


def _is_left(chain: Chain, said: Acknowledgement) -> bool:
    """Whether the job ran on this host, and nobody has its journal open."""
    try:
        return said.host == socket.gethostname() and holder_of(chain.run_dir / BUFFER) is None
    except JournalError:
        return False
