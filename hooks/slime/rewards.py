"""``--custom-reward-post-process-path midstream.hooks.slime.rewards.post_process``"""

from argparse import Namespace
from dataclasses import replace
from typing import Any

from midstream.hooks.credit.batch import CreditBatch
from midstream.hooks.credit.equal_groups import equal_groups
from midstream.hooks.credit.estimates import Estimates, estimates_of
from midstream.hooks.credit.measured import rollout_key
from midstream.hooks.credit.note import Note
from midstream.hooks.credit.segments import batch_of
from midstream.hooks.slime.credit_flags import NOTE_KEY, centres_rewards, divides_rewards, takes_notes
from midstream.hooks.slime.earned import Batch, earned_by, training_version
from midstream.hooks.slime.groups import key_of
from midstream.hooks.slime.outcomes import reward_of
from midstream.hooks.slime.settings import credit_counts_of, curriculum_of, engine_of, layer_of


def post_process(args: Namespace, samples: list[Any]) -> tuple[list[float], list[float]]:
    """Subtract each group's mean, and divide by its deviation, where the host would.

    Whether it does either, its flags say; the formula is slime's own (deviation with n - 1). Groups are the real
    ones, by ``group_index``: a batch may hold groups of several sizes. A sample that is out of the loss enters no
    mean and gets 0.

    What estimators take out of the loss leaves the samples' masks here. What else they say goes with each sample
    to the trainer's hook.

    Returns:
        ``(raw_rewards, rewards)``, each of length ``len(samples)``.

    Raises:
        ValueError: a reward that is not finite, of a sample that is in the loss: it would spoil its whole group.
    """
    raw = [reward_of(args, sample) for sample in samples]
    version = training_version(samples, engine_of(args).version)
    batch = earned_by(samples, raw, version)
    tensors = batch_of(batch.rollouts)
    estimates = estimates_of(tensors, layer_of(args).credit, normalise=divides_rewards(args))
    estimates = _with_equal_groups(args, tensors, estimates)
    credit_counts_of(args).update(estimates.fallbacks)
    of_rollouts = [float(value) for value in estimates.group]
    spread = [of_rollouts[rollout] for rollout in batch.whose] if centres_rewards(args) else raw
    _write(samples, spread, batch, estimates, version, with_notes=takes_notes(args))
    return raw, spread


def _with_equal_groups(args: Namespace, batch: CreditBatch, estimates: Estimates) -> Estimates:
    """Groups without an advantage get one where the curriculum keeps them and is set to weigh them."""
    curriculum = curriculum_of(args)
    if curriculum is None or not curriculum.weight_of_equal:
        return estimates
    outcome = curriculum.curriculum.config.outcome
    more = equal_groups(
        batch, weight=curriculum.weight_of_equal, threshold=outcome.threshold, spread=outcome.spread
    )
    ours = estimates.advantages
    return replace(
        estimates,
        group=estimates.group + more,
        advantages=None if ours is None else ours + more[batch.rollouts],
    )


def _write(
    samples: list[Any],
    spread: list[float],
    batch: Batch,
    estimates: Estimates,
    version: int,
    *,
    with_notes: bool,
) -> None:
    """Mask what is not trained, and attach the notes; `spread` is what the host gives to all tokens of each sample."""
    at = 0
    for position, segments in zip(batch.samples, batch.segments, strict=True):
        sample, here = samples[position], slice(at, at + len(segments))
        at = here.stop
        start = 0
        for segment, trained in zip(segments, estimates.trained[here].tolist(), strict=True):
            end = start + segment.length
            if not trained:
                if sample.loss_mask is None:
                    sample.loss_mask = [1] * sample.response_length
                sample.loss_mask[start:end] = [0] * segment.length
            start = end
        if with_notes:
            advantages = estimates.advantages
            note = Note(
                key=rollout_key(key_of(sample), sample.index),
                version=version,
                lengths=[segment.length for segment in segments],
                versions=[segment.version for segment in segments],
                at_snapshot=[segment.at_snapshot for segment in segments],
                spread=spread[position],
                advantages=None if advantages is None else advantages[here].tolist(),
                weights=None if estimates.weights is None else estimates.weights[here].tolist(),
            )
            # Not in place: samples that were made of one rollout may share their metadata.
            sample.metadata = {**(sample.metadata or {}), NOTE_KEY: note}
