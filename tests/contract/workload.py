"""Tasks that make a host abort where a test wants it, whatever the model says and however slow the machine is.

A model with random weights writes random words. Of each turn the first letter from `a` to `v` is taken as the
command, which no shell knows, so that all of them run the task's `command_not_found_handle`. A rollout ends
when the answer to its last step fills up the response.
"""

import json
from pathlib import Path
from typing import Any

TURN_TOKENS = 200  # a random word ends a turn once in 128
LONG_STEPS = 8
QUEUED = 5
LONG, UNEVEN = QUEUED, QUEUED + 1  # numbers of groups
LONG_UNTIL = 4
HANGS_S = 300
RESPONSE_TOKENS = 12 * TURN_TOKENS  # a turn without a letter takes no step

LAYER = {
    "environment": {"step_timeout_s": 600.0},
    "turns": {
        "max_turns": 100,
        "max_tokens_per_turn": TURN_TOKENS,
        "action_pattern": "([a-v])",
        "abort_grace_s": 0.2,
    },
}


def task(name: str, *, steps: int = 1, when_called: str = ":", eval_cmd: str = "") -> dict[str, Any]:
    """A task that takes `steps` steps; in each `when_called` is run first, with the letter in `$1`.

    The workspace counts the steps that were completed, and answers each but the last with their number. Unless
    `eval_cmd` says otherwise the reward is 1 if it has counted exactly `steps`.
    """
    handler = f"""\
command_not_found_handle() {{
  {when_called}
  echo step >>steps
  local count=$(wc -l <steps)
  if ((count < {steps})); then echo "$count"; else printf 'ok %.0s' {{1..{RESPONSE_TOKENS}}}; fi
}}
"""
    metadata = {
        "files": {".bashrc": handler},
        "pre_commands": [],
        "eval_cmd": eval_cmd or f'test "$(wc -l <steps)" -eq {steps}',
        "workdir": ".",
    }
    return {"prompt": f"start {name} <act>", "label": name, "metadata": metadata}


def cut_off_tasks(run_dir: Path) -> list[dict[str, Any]]:
    """Three groups a step, six launched; the steps of some wait for a later rollout.

    Rollout 0 ends with f0 to f2, which wait until f3 or f4 is past its second step and f5 is in its only one;
    f3 and f4 do not end before it. Rollout 1 ends with f3 to f5, while f6 to f8 are in their only step, which
    rollout 2 finishes. The rest waits for a rollout that never comes. The file `rollout_id` in `run_dir` names
    the rollout that runs; the steps leave word for each other there.
    """
    in_step, under_way = run_dir / "f5-is-in-its-step", run_dir / "a-long-one-is-under-way"

    def wait_until(condition: str) -> str:
        return f"until [[ {condition} ]]; do sleep 0.05; done"

    def waits_for(rollout_id: int) -> str:
        return wait_until(f"$(<{run_dir / 'rollout_id'}) -ge {rollout_id}")

    last = wait_until(f"-e {in_step} && -e {under_way}")
    done = "local done=0; [[ ! -e steps ]] || done=$(wc -l <steps)"
    long = (
        f"{done}; ((done < 2)) || : >{under_way}; {wait_until(f'-e {in_step}')}; "
        f"((done < {LONG_STEPS - 1})) || {waits_for(1)}"
    )
    return [
        *(task(f"f{i}", when_called=last) for i in (0, 1, 2)),
        *(task(f"f{i}", steps=LONG_STEPS, when_called=long) for i in (3, 4)),
        task("f5", when_called=f": >{in_step}; {waits_for(1)}"),
        *(task(f"f{i}", when_called=waits_for(2)) for i in (6, 7, 8)),
        *(task(f"f{i}", when_called=waits_for(3)) for i in (9, 10, 11)),
    ]


def queued_tasks(run_dir: Path) -> list[dict[str, Any]]:
    """The first QUEUED groups end as soon as they can, and leave a file ``ended-*`` in ``run_dir`` for each member.

    Both members of LONG wait for rollout LONG_UNTIL; of UNEVEN one ends like the first groups do, and one waits. The
    rest ends as soon as it can.
    """
    leave_word = f"mktemp {run_dir}/ended-XXXXXX"
    wait = f"until (($(<{run_dir / 'rollout_id'}) >= {LONG_UNTIL})); do sleep 0.05; done"
    one_waits = f"if mkdir {run_dir / 'one-ends'}; then : >mine; else {wait}; fi"
    tasks = [task(f"f{i}", eval_cmd=leave_word) for i in range(QUEUED)]
    tasks += [task(f"f{LONG}", when_called=wait)]
    tasks += [task(f"f{UNEVEN}", when_called=one_waits, eval_cmd=f"test ! -e mine || {leave_word}")]
    return tasks + [task(f"f{i}") for i in range(len(tasks), 4 * QUEUED)]


def uneven_tasks() -> list[dict[str, Any]]:
    """Two groups whose rewards are all 1, then groups whose rewards depend on the letters, and mostly differ."""
    even = [task(f"f{i}") for i in (0, 1)]
    return even + [
        task(f"f{i}", when_called="[[ $1 > f ]] && : >late", eval_cmd="test -e late") for i in range(2, 10)
    ]


def given_up_tasks(run_dir: Path) -> list[dict[str, Any]]:
    """A group of which one member hangs and the others get 1, then groups of which the first to end gets 1."""
    hang = f"if mkdir {run_dir / 'one-hangs'}; then sleep {HANGS_S}; fi"
    others = [task(f"f{i}", eval_cmd=f"mkdir {run_dir}/ended-{i}") for i in range(1, 8)]
    return [task("f0", when_called=hang), *others]


def write(tasks: list[dict[str, Any]], path: Path) -> Path:
    """Write the tasks as JSONL, the form in which a host reads its prompts."""
    path.write_text("".join(json.dumps(line) + "\n" for line in tasks))
    return path
