"""An agent that repairs files in a workspace: the process, and the policies that were trained on it.

A file is untouched and broken, right, or written wrong. A turn has two tokens: the name of a file and one of
`CONTENTS` contents, of which one is right. What is written stays: nothing resets the workspace, and a rollout succeeds
where all files are right in the end, but for a few verdicts that are wrong. That stands for coding agents whose success
is decided by tests of a workspace in which everything that they did is still there. Tasks begin in any workspace that
is not right yet, with one file written wrong at most, so that some are harder than others.

`STICKY` and `FORGIVING` differ in one number, how likely it is that a file that was written, or right, can be
written again. In the first an early mistake is hard to undo, as where later work builds on it, so that states differ
much in value; in the second nearly everything can still be mended or spoiled later, and they differ little.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .process import Process, ascend

FILES = 3
CONTENTS = 3
UNTOUCHED, RIGHT, WRONG = range(3)
WORKSPACES = 3**FILES
TURNS = 8
TOKENS_PER_TURN = 2
# A first write to an untouched file; tools fail now and then.
TAKES_EFFECT = 0.9
# Of verdicts on a workspace, either way.
WRONG_VERDICTS = 0.05
WRONG_AT_START = 1

# Policy version 0 is half trained: it prefers what helps by these logits, beside a taste of its own.
PREFERS_BROKEN, PREFERS_RIGHT_CONTENT, TASTE = 0.5, 1.0, 0.5
# The newest version, and the step of exact gradient ascent between two: so large that with a lag of 8, up to which
# published jobs work, the first half of a rollout comes near the mean squared log-ratio of 0.04 at which M2PO
# (arXiv 2510.01161) draws the line.
NEWEST_VERSION, STEP_SIZE = 16, 40.0


@dataclass(frozen=True)
class Setting:
    """What makes one environment of the two: how likely a write to a file that is not untouched takes effect."""

    name: str
    undo: float


STICKY = Setting("sticky", undo=0.1)
FORGIVING = Setting("forgiving", undo=0.9)


def workspace_process(setting: Setting, *, turns: int = TURNS) -> Process:
    """Its states are workspaces, and between a turn's tokens (workspace, named file) pairs, numbered row by row."""
    states, files = torch.arange(WORKSPACES), torch.arange(FILES)
    named = torch.zeros(WORKSPACES * FILES, FILES, WORKSPACES * FILES, dtype=torch.float64)
    named[states[:, None], files, states[:, None] * FILES + files] = 1.0
    named[WORKSPACES:, :, 0] = 1.0  # no rollout gets there
    written = torch.zeros_like(named)
    for workspace in range(WORKSPACES):
        for file in range(FILES):
            was = int(files_of(torch.tensor(workspace))[file])
            chance = TAKES_EFFECT if was == UNTOUCHED else setting.undo
            for content in range(CONTENTS):
                becomes = RIGHT if content == right_content(file) else WRONG
                row = written[workspace * FILES + file, content]
                row[workspace + (becomes - was) * 3**file] += chance
                row[workspace] += 1 - chance
    files_in = files_of(states)
    is_task = (files_in != RIGHT).any(-1) & ((files_in == WRONG).sum(-1) <= WRONG_AT_START)
    is_right = (files_of(torch.arange(WORKSPACES * FILES) % WORKSPACES) == RIGHT).all(-1)
    return Process(
        prompts=states[is_task],
        transitions=torch.stack([named, written] * turns),
        success=WRONG_VERDICTS + (1 - 2 * WRONG_VERDICTS) * is_right.to(torch.float64),
        turns=torch.arange(turns).repeat_interleave(TOKENS_PER_TURN),
    )


def first_policy(*, seed: int, turns: int = TURNS) -> Tensor:
    """[N, S, A] Logits of policy version 0."""
    generator = torch.Generator().manual_seed(seed)
    shape = (turns * TOKENS_PER_TURN, WORKSPACES * FILES, CONTENTS)
    logits = TASTE * torch.randn(shape, generator=generator, dtype=torch.float64)
    broken = files_of(torch.arange(WORKSPACES)) != RIGHT
    logits[0::TOKENS_PER_TURN, :WORKSPACES] += PREFERS_BROKEN * broken
    for file in range(FILES):
        logits[1::TOKENS_PER_TURN, file::FILES, right_content(file)] += PREFERS_RIGHT_CONTENT
    return logits


def policy_versions(process: Process, *, seed: int) -> list[Tensor]:
    """Logits [N, S, A] of version 0 to `NEWEST_VERSION`."""
    first = first_policy(seed=seed, turns=process.turn_count)
    return ascend(process, first, step_size=STEP_SIZE, versions=NEWEST_VERSION)


def files_of(workspaces: Tensor) -> Tensor:
    """[..., FILES] The state of each file: UNTOUCHED, RIGHT or WRONG."""
    return workspaces[..., None] // 3 ** torch.arange(FILES) % 3


def right_content(file: int) -> int:
    return file % CONTENTS


def write_lag(workspaces: Tensor, cut: int, lag: int) -> Tensor:
    """[R, T] The environment's lag at each turn: `lag` times the share of surviving writes made before turn `cut`.

    `workspaces` [R, T] is where each turn acts; surviving writes are files that differ from the start. Where nothing
    is written there is no lag.
    """
    files = files_of(workspaces)
    is_old = torch.zeros_like(files[:, 0], dtype=torch.bool)
    shares = []
    for turn in range(workspaces.shape[1]):
        if turn > 0:
            changed = files[:, turn] != files[:, turn - 1]
            is_old = torch.where(changed, turn - 1 < cut, is_old)
        differs = files[:, turn] != files[:, 0]
        shares.append((is_old & differs).sum(-1) / differs.sum(-1).clamp(min=1))
    return lag * torch.stack(shares, dim=1).to(torch.float64)
