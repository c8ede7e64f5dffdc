"""What the steps of a run did with its prompts, a line for each: `curriculum/history.jsonl` of the run directory."""

import json
from collections.abc import Mapping
from pathlib import Path

from midstream.buffers.curriculum.curriculum import Curriculum
from midstream.buffers.curriculum.tally import StepTally

FOLDER = "curriculum"
HISTORY = "history.jsonl"
STATE = "state.npz"


def append(
    run_dir: Path, step: int, version: int, curriculum: Curriculum, tallies: Mapping[str, StepTally]
) -> None:
    """Add a step; the last line of a step that was done again counts. Raises OSError."""
    sizes, pass_rates = curriculum.sizes(), curriculum.pass_rates()
    sources = {
        name: {
            "prompts": sizes[name],
            "known": sum(pass_rates[name]),
            "pass_rates": pass_rates[name],
            **tally.to_json(),
        }
        for name, tally in tallies.items()
    }
    line = json.dumps({"step": step, "version": version, "sources": sources}) + "\n"
    path = run_dir / FOLDER / HISTORY
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(line)
