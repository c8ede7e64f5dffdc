"""What is kept of each rollout that was trained on, in the run directory: one file for each training step.

`rollouts/000012.jsonl.zst` holds a JSON object a line, one for each rollout of step 12, compressed. It is there whole
or not at all. A step that is done again replaces its file; what trainers measured in it, and all that later steps left,
is of a history that was undone, and goes. Paths that are not UTF-8 stand there as surrogate escapes, as Python's
`os.fsencode` takes them.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from midstream.buffers.lags import Lags, lags
from midstream.buffers.rollout import PartialRollout, Span, Status
from midstream.hooks.credit.blame import Blame, blame_of
from midstream.hooks.credit.lines import FOLDER, KeptError, damaged, read_lines, write_lines

_OF_A_STEP = re.compile(r"([0-9]{6,})\.jsonl\.zst")
# What trainers measured beside it (`measured`), too.
_OF_ANY_KIND = re.compile(r"([0-9]{6,})\.(?:ratios-[0-9]+\.json|jsonl)\.zst")


@dataclass(frozen=True)
class KeptRollout:
    """A rollout without its tokens.

    Attributes:
        reward: None where there is none, as after a failure of the infrastructure, and where it is no finite number.
        step: The training step that it was handed to; None where it waits to go on.
        index: The host's number of its sample.
        version: The policy version that trains on it, or the newest that is known. Lags count from it.
        tokens: Of the response, those of the environment included.
        lags: The largest, in policy versions.
    """

    step: int | None
    index: int | None
    group_key: str
    prompt_key: str
    reward: float | None
    status: str
    fault: str | None
    failure: str | None
    version: int
    dispatch_version: int | None
    spans: tuple[Span, ...]
    tokens: int
    turns: int
    resumes: int
    lags: Lags
    blame: Blame

    def to_json(self) -> dict[str, Any]:
        """JSON-able values; `from_json` is the inverse."""
        value = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        value["spans"] = [span.to_json() for span in self.spans]
        value["lags"] = dataclasses.asdict(self.lags)
        value["blame"] = self.blame.to_json()
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Raises TypeError, ValueError or LookupError where it is not what `to_json` made."""
        parts = {
            "spans": tuple(Span(*span) for span in value["spans"]),
            "lags": Lags(**value["lags"]),
            "blame": Blame.from_json(value["blame"]),
        }
        return cls(**{**value, **parts})


def described(
    rollout: PartialRollout, *, version: int, index: int | None, step: int | None = None
) -> KeptRollout:
    """What is kept of a rollout on which the policy at ``version`` trains."""
    return KeptRollout(
        step=step,
        index=index,
        group_key=rollout.group_key,
        prompt_key=rollout.prompt_key,
        reward=_reward_of(rollout),
        status=rollout.status.value,
        fault=rollout.fault,
        failure=rollout.failure,
        version=version,
        dispatch_version=rollout.dispatch_version,
        spans=tuple(rollout.spans),
        tokens=len(rollout.tokens),
        turns=len(rollout.turns),
        resumes=rollout.resumes,
        lags=lags(rollout, version),
        blame=blame_of(rollout),
    )


def _reward_of(rollout: PartialRollout) -> float | None:
    reward: object = rollout.reward  # a host's own may be anything
    is_number = isinstance(reward, int | float) and math.isfinite(reward)
    return rollout.reward if is_number and rollout.status is not Status.FAILED else None


def keep(run_dir: Path, step: int, rollouts: Iterable[KeptRollout]) -> None:
    """Write the file of a step, and remove those of later ones and what was measured in it, before a trainer measures
    anew. Raises OSError, with the step's old file as it was.
    """
    mine = run_dir / FOLDER / f"{step:06d}.jsonl.zst"
    for other, path in _files(run_dir / FOLDER, _OF_ANY_KIND):
        if other >= step and path != mine:
            path.unlink(missing_ok=True)
    write_lines(mine, (rollout.to_json() for rollout in rollouts))


def kept_rollouts(run_dir: Path, tell: Callable[[KeptError], None]) -> Iterator[KeptRollout]:
    """What all steps of a run kept, newest step first; none where there is nothing.

    A file that cannot be read is told to ``tell``, and passed over.
    """
    for _, path in sorted(_files(run_dir / FOLDER, _OF_A_STEP), reverse=True):
        try:
            rollouts = read_step(path)
        except KeptError as error:
            tell(error)
        else:
            yield from rollouts


def read_step(path: Path) -> list[KeptRollout]:
    """What one step kept, in the order of its batch. Raises KeptError."""
    values = read_lines(path)
    try:
        return [KeptRollout.from_json(value) for value in values]
    except (ValueError, TypeError, LookupError) as error:
        raise damaged(path, error) from error


def has_kept(run_dir: Path) -> bool:
    """Whether a run has kept any rollouts."""
    return any(True for _ in _files(run_dir / FOLDER, _OF_A_STEP))


def _files(folder: Path, names: re.Pattern[str]) -> Iterator[tuple[int, Path]]:
    """The steps that have a file, in no order."""
    if folder.is_dir():
        for path in folder.iterdir():
            if found := names.fullmatch(path.name):
                yield int(found[1]), path
