"""What the steps of a run did with its prompts, a line for each, and what is known of the prompts after the last.

`curriculum/history.jsonl` and `curriculum/state.npz` of the run directory.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from midstream.buffers.curriculum.curriculum import Curriculum
from midstream.buffers.curriculum.state import save
from midstream.buffers.curriculum.tally import StepTally

FOLDER = "curriculum"
HISTORY = "history.jsonl"
STATE = "state.npz"


def keep_step(
    folder: Path, step: int, curriculum: Curriculum, tallies: Mapping[str, StepTally], *, with_state: bool
) -> None:
    """Add a step to the history, whose last line counts where one was done again; and write the state, if asked.

    Raises OSError.
    """
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
    line = json.dumps({"step": step, "version": curriculum.version, "sources": sources}) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / HISTORY).open("a+b") as file:
        if file.tell():
            # A full disk, or the end of the process, may have torn the last line.
            file.seek(-1, os.SEEK_END)
            line = line if file.read() == b"\n" else "\n" + line
        file.write(line.encode())
    if with_state:
        save(curriculum, folder / STATE)
