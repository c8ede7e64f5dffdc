"""What other settings would make of a run's prompts, from what the run knows of them."""

from dataclasses import dataclass
from pathlib import Path

from midstream.buffers.curriculum.history import FOLDER, STATE
from midstream.buffers.curriculum.state import curriculum_of
from midstream.conf.schema.curriculum import CurriculumConfig

# So many groups are drawn, which tells their share of informative ones to within 1.6 %.
_GROUPS = 1_000
# Fewer where nearly all prompts are passed over, for so many are enough; a batch at a time.
_PROMPTS, _BATCH = 20_000, 5


@dataclass(frozen=True)
class Preview:
    """What the next groups of a run would be.

    Attributes:
        informative: the share of groups that are expected to inform.
        played: the share of the prompts that come up that would be played.
        prompts: in the dataset.
        known: those of which something is known.
    """

    informative: float
    played: float
    prompts: int
    known: int


def preview(
    run_dir: Path, before: CurriculumConfig, after: CurriculumConfig
) -> tuple[Preview, Preview] | None:
    """Under the settings as they are, and as they would be; None where the run has kept nothing of its prompts.

    Nothing that a group teaches is counted: it is what the next groups are, not those of next week.

    Raises:
        StateError: what the run has kept cannot be read.
    """
    path = run_dir / FOLDER / STATE
    if not path.exists():
        return None
    return _under(path, before), _under(path, after)


def _under(path: Path, config: CurriculumConfig) -> Preview:
    curriculum = curriculum_of(path, config)
    positions: list[int] = []
    skipped = 0
    while len(positions) < _GROUPS and skipped < _PROMPTS:
        taken = curriculum.take(_BATCH)
        positions += taken
        for position in taken:
            curriculum.drawing.ended(curriculum.drawing.row_of(position))
        skipped += sum(tally.skipped for tally in curriculum.end_step().values())
    expected = [curriculum.chance(position) for position in positions]
    return Preview(
        informative=sum(expected) / len(expected),
        played=len(positions) / (len(positions) + skipped),
        prompts=len(curriculum.book),
        known=sum(map(sum, curriculum.pass_rates().values())),
    )
