"""A member of a host's group as bytes for the journal, and back.

The host's own fields are pickled, all but those that the record of the rollout has; the record is encoded as
the journal does it. A member that was split into several samples keeps them together.
"""

import logging
import pickle
from dataclasses import replace
from typing import Any

from midstream.buffers.journal.encoding import decode, member_of
from midstream.buffers.journal.errors import JournalDamaged, JournalError
from midstream.buffers.journal.records import Member, Summary, versions_of
from midstream.buffers.rollout import PartialRollout, RecordError
from midstream.hooks.slime.foreign import is_foreign, rollout_of
from midstream.hooks.slime.sample import RECORD_KEY, samples_of, store

_ARRAYS = ("tokens", "loss_mask", "rollout_log_probs")
# The host's fields of one sample, and the record of its rollout if that has begun.
Part = tuple[dict[str, Any], bytes | None]

_left_out: set[str] = set()

_logger = logging.getLogger(__name__)


def journaled(member: Any, *, goes_back: bool) -> Member:
    """A sample, or a list of samples of one rollout, for the journal.

    Its summary names the snapshots without which it could not go on: the newest, and with ``goes_back`` all
    earlier ones too.
    """
    samples = list(samples_of([member]))
    parts: list[Part] = []
    summaries: list[Summary] = []
    for sample in samples:
        host = dict(sample.to_dict())
        rollout = rollout_of(sample)
        if rollout is None:
            parts.append((host, None))
            summaries.append(Summary(status=sample.status.value))
            continue
        found = member_of(rollout)
        if is_foreign(sample):
            parts.append((host, None))
            summaries.append(found.summary)
            continue
        for name in _ARRAYS:
            del host[name]
        host["metadata"] = {key: value for key, value in host["metadata"].items() if key != RECORD_KEY}
        parts.append((host, found.payload))
        summaries.append(replace(found.summary, snapshots=needed_snapshots(rollout, goes_back=goes_back)))
    return Member(_pickled((isinstance(member, list), parts)), _together(summaries))


def restored(payload: bytes, sample_class: Any) -> Any:
    """What ``journaled`` was given.

    Raises:
        JournalDamaged: the bytes are not what it made.
        JournalError: a record is of another version of midstream, or of a class that cannot be imported.
    """
    try:
        is_split, parts = pickle.loads(payload)
    except (ImportError, AttributeError) as error:
        raise JournalError(
            f"a sample holds what cannot be imported here ({error}): start the job with the code and the PYTHONPATH "
            "that it was saved with, or set another run_dir to begin with an empty buffer"
        ) from error
    except Exception as error:
        # Unpickling raises anything.
        raise JournalDamaged(f"a sample cannot be unpacked ({type(error).__name__}: {error})") from error
    samples = [_sample(host, record, sample_class) for host, record in parts]
    return samples if is_split else samples[0]


def _sample(host: dict[str, Any], record: bytes | None, sample_class: Any) -> Any:
    if record is None:
        return sample_class.from_dict(host)
    try:
        rollout = decode(record)
    except RecordError as error:
        raise JournalError(f"{error}; set another run_dir to begin with an empty buffer") from error
    arrays = {
        "tokens": rollout.prompt_tokens + rollout.tokens,
        "loss_mask": rollout.loss_mask,
        "rollout_log_probs": rollout.log_probs,
    }
    if not rollout.tokens:
        # As a host leaves a sample that has no token yet.
        arrays |= {"loss_mask": None, "rollout_log_probs": None}
    sample = sample_class.from_dict(host | arrays)
    is_removed = sample.remove_sample
    store(sample, rollout)
    sample.remove_sample = is_removed
    return sample


def needed_snapshots(rollout: PartialRollout, *, goes_back: bool) -> tuple[str, ...]:
    """The ids of the snapshots without which a rollout could not go on, as ``journaled`` says."""
    if rollout.status.finished:
        return ()
    if goes_back:
        return tuple(rollout.snapshots)
    newest = rollout.newest_snapshot
    return () if newest is None else (newest,)


def _together(summaries: list[Summary]) -> Summary:
    first = summaries[0]
    if len(summaries) == 1:
        return first
    oldest, newest = versions_of(summaries) or (None, None)
    return Summary(
        tokens=sum(summary.tokens for summary in summaries),
        turns=sum(summary.turns for summary in summaries),
        oldest_version=oldest,
        newest_version=newest,
        snapshots=tuple(dict.fromkeys(key for summary in summaries for key in summary.snapshots)),
        status=first.status,
    )


def _pickled(value: tuple[bool, list[Part]]) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001  pickling raises anything
        is_split, parts = value
        kept = [({k: v for k, v in host.items() if _can_be_kept(k, v)}, record) for host, record in parts]
        return pickle.dumps((is_split, kept), pickle.HIGHEST_PROTOCOL)


def _can_be_kept(name: str, value: Any) -> bool:
    try:
        pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001
        if name not in _left_out:
            _left_out.add(name)
            _logger.warning(
                "what samples hold under %r cannot outlast this process (%s): left out", name, error
            )
        return False
    return True
