"""``--rollout-data-postprocess-path midstream.hooks.slime.credit.apply_credit``"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from midstream.conf.schema.credit import CreditConfig
from midstream.hooks.credit.estimators.prefix_is import prefix_is
from midstream.hooks.credit.joined import joined
from midstream.hooks.credit.measured import measured, measured_on_host
from midstream.hooks.credit.note import Note
from midstream.hooks.credit.ratios import Ratios, ratio_metrics, ratios_of
from midstream.hooks.credit.training import Segments, advantages_of, credit_metrics, segments_of, weights_of
from midstream.hooks.slime.credit_flags import NOTE_KEY
from midstream.hooks.slime.keeping import keep_measurements
from midstream.hooks.slime.parallel import Ranks
from midstream.hooks.slime.settings import layer_of

RolloutData = dict[str, Any]


def apply_credit(args: Namespace, rollout_id: int, rollout_data: RolloutData) -> None:
    """Take the notes out of the rollout data, and apply the estimators to its ``advantages``.

    Runs after the host's estimator and its whitening, on every rank. Where there are no advantages, as on pipeline
    stages before the last, that is all. Adds ``staleness/...`` and ``credit/...``: a number for each sample,
    which the host logs as their mean.

    Raises:
        NoteError: a note does not fit its tokens.
        ValueError: what an estimator needs is not there, or what it gets is not finite.
    """
    credit = layer_of(args).credit
    notes = _notes_of(credit, rollout_id, rollout_data)
    if not notes:
        return
    advantages: list[Tensor] = rollout_data["advantages"]
    device = advantages[0].device
    lengths = [int(length) for length in rollout_data["response_lengths"]]
    ranks = Ranks(args, rollout_data["total_lengths"], lengths)
    segments = segments_of(notes, lengths, ranks.owned, device)
    mask = ranks.owned(_flat(rollout_data["loss_masks"], device))
    ratios = _ratios(rollout_data, segments, mask, ranks)
    if ratios is not None:
        _check_finite("a log-prob", ratios.sums, lambda: segments.samples, notes)
    given = torch.cat(advantages)
    flat = _replaced(args, notes, segments, given, mask, ranks)
    of_segments = weights_of(notes, device)
    if of_segments is not None:
        flat = flat * of_segments.to(flat.dtype)[segments.of_tokens]
    weights = _prefix_weights(credit, segments, ratios) if "prefix_is" in credit.estimators else None
    if weights is not None:
        flat = flat * weights.to(flat.dtype)
    _check_finite("an advantage", flat * mask, lambda: segments.samples[segments.of_tokens], notes)
    rollout_data["advantages"] = list(flat.split([len(each) for each in advantages]))
    metrics = ratio_metrics(segments, ratios) | credit_metrics(
        given, flat, mask, weights, credit.prefix_is.bound
    )
    for name, value in metrics.items():
        rollout_data[name] = [value] * len(notes)
    if ratios is not None and ranks.is_first:
        # The thread that keeps them must not read what another stream is still computing.
        found = measured_on_host(segments, ratios)
        keep_measurements(args, rollout_id, ranks.data_parallel, partial(measured, notes, *found))


def _notes_of(credit: CreditConfig, rollout_id: int, rollout_data: RolloutData) -> list[Note]:
    """Take the notes out of the data; none where there is nothing to apply them to, or nobody needs them."""
    notes = rollout_data.pop(NOTE_KEY, None)
    if "advantages" not in rollout_data:
        return []
    # Under the same key hosts carry numbers of their own.
    if notes is not None and all(isinstance(note, Note) for note in notes):
        return list(notes)
    if credit.needs_trainer:
        raise ValueError(
            f"rollout {rollout_id} came without notes for {', '.join(credit.estimators)}: set "
            "--custom-reward-post-process-path midstream.hooks.slime.rewards.post_process; a convert function of "
            f"your own must pass on {NOTE_KEY}, from the metadata of each sample"
        )
    return []


def _replaced(
    args: Namespace, notes: list[Note], segments: Segments, flat: Tensor, mask: Tensor, ranks: Ranks
) -> Tensor:
    """Ours in place of the group's reward that the host has spread over the tokens."""
    ours = advantages_of(notes, flat.device)
    if ours is None:
        return flat
    new, spread = (values.to(flat.dtype)[segments.of_tokens] for values in ours)
    if getattr(args, "normalize_advantages", False):
        return ranks.whitened(new, mask)
    # What the host has added besides, as for distillation, stays.
    return (flat - spread) + new


def _ratios(rollout_data: RolloutData, segments: Segments, mask: Tensor, ranks: Ranks) -> Ratios | None:
    now, recorded = rollout_data.get("log_probs"), rollout_data.get("rollout_log_probs")
    if not now or not recorded:
        return None
    device = mask.device
    return ratios_of(segments, _flat(now, device), _flat(recorded, device), mask, ranks.summed)


def _flat(values: Sequence[Any], device: torch.device) -> Tensor:
    """One tensor of those of all samples, which are tensors or lists."""
    if all(isinstance(each, Tensor) for each in values):
        return torch.cat(list(values)).to(device)
    return joined(values, torch.float32).to(device)


def _prefix_weights(credit: CreditConfig, segments: Segments, ratios: Ratios | None) -> Tensor:
    """[T] Of what an older policy made: what differs where the versions are the same is the engine's rounding."""
    if ratios is None:
        raise ValueError(
            "prefix_is needs log-probs of the trainer and of the rollout: pass --get-mismatch-metrics, which makes the "
            "trainer compute its own, and leave out --use-rollout-logprobs"
        )
    is_stale = segments.lags > 0
    sums = torch.where(is_stale, ratios.sums, 0.0)
    totals = torch.zeros_like(sums).index_add_(0, segments.samples, sums)[segments.samples]
    own = torch.where(is_stale[segments.of_tokens], ratios.tokens, 0.0)
    return prefix_is(own, totals[segments.of_tokens], credit.prefix_is.bound)


def _check_finite(what: str, values: Tensor, samples_of: Callable[[], Tensor], notes: list[Note]) -> None:
    """Raise ValueError that names the rollout; `samples_of` gives the sample of each of `values`."""
    is_finite = values.isfinite()
    if not is_finite.all():
        broken = notes[int(samples_of()[~is_finite][0])]
        raise ValueError(
            f"{what} of rollout {broken.key} is not finite: look for log-probs or rewards that are not in the samples "
            "of this step"
        )
