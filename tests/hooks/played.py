"""Samples that look as if ``generate`` had played them."""

from argparse import Namespace

from midstream.buffers.rollout import PartialRollout, Span, Status
from midstream.envs.protocol import Change, Snapshot
from midstream.hooks.engine import Generation
from midstream.hooks.slime.sample import SampleSink, begin_rollout, recorded_rollout, store, task_of
from midstream.local.sample import Sample
from tests.hooks.scripted import IDS, WordTokenizer


def play(sample: Sample, *turns: tuple[int, str]) -> PartialRollout:
    """Let ``sample`` take turns as ``generate`` would, each under a version and with a path that it writes."""
    tokenizer = WordTokenizer()
    rollout = recorded_rollout(sample) or begin_rollout(sample, task_of(sample), tokenizer)
    sink = SampleSink(Namespace(), sample, tokenizer)
    if not rollout.turns:
        rollout.enter(Snapshot("s0", "d0"))
    for number, (version, path) in enumerate(turns, len(rollout.turns) + 1):
        rollout.begin_turn()
        made = Generation(
            [1, 0], [-0.5, -0.25], "add <end>", "stop", (Span(version, 0, 2),), {"finish_reason": {}}
        )
        rollout.append_action(made.tokens, made.log_probs, made.spans)
        sink.append_action(made)
        rollout.finish_action()
        rollout.append_observation([IDS["obs"]])
        sink.append_observation([IDS["obs"]], "obs")
        changes = (Change(path, "created", 1, "", f"{number}"),) if path else ()
        rollout.enter(Snapshot(f"s{number}", f"d{number}", f"s{number - 1}", changes))
    rollout.status = Status.ABORTED
    store(sample, rollout)
    return rollout
