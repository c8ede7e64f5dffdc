"""What a curriculum foretells of its settings, in place of one that has played."""

from pathlib import Path

from midstream.buffers.curriculum.preview import Preview
from midstream.conf.schema import CurriculumConfig


def preview(
    run_dir: Path, before: CurriculumConfig, after: CurriculumConfig
) -> tuple[Preview, Preview] | None:
    """The stricter the gate the fewer prompts, and the more of them inform; None where nothing was played."""
    if not (run_dir / "played").exists():
        return None
    strict = [config.gate.min_informative for config in (before, after)]
    first, second = (Preview(informative, 1 - informative, 1200, 900) for informative in strict)
    return first, second
