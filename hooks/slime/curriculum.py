"""A curriculum over a host's dataset: which of its prompts become groups, and what is learnt of those that end."""

import logging
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from midstream.buffers.curriculum.book import Cost, digest_of
from midstream.buffers.curriculum.curriculum import Curriculum, Outcome
from midstream.buffers.curriculum.drawing import Prompts
from midstream.buffers.curriculum.early_stop import Decide, decider, tokens_saved
from midstream.buffers.curriculum.filter import Verdict
from midstream.buffers.curriculum.history import FOLDER, keep_step
from midstream.buffers.curriculum.state import restore, save
from midstream.conf.schema import CurriculumConfig, LayerConfig
from midstream.conf.schema.curriculum import EarlyStopConfig
from midstream.hooks.slime.groups import has_ended, key_of
from midstream.hooks.slime.sample import RECORD_KEY, Group, samples_of, task_of, was_stopped

MOST_SOURCES = 1_000
_DEFAULT_SOURCE = "default"
# Of a job's time, that may go into writing what is known of its prompts, for `midstream tune --dry-run` to read.
_SHARE = 0.01
_CHECKPOINT = "checkpoint-{}.npz"
_FILTER = "midstream.hooks.slime.filters.informative"
_OBSERVER = "midstream.hooks.slime.filters.observe_all"
_NEEDS_FILTER = f"it needs --dynamic-sampling-filter-path {_FILTER}, which drops the groups that are given up"
_logger = logging.getLogger(__name__)


class SlimeCurriculum:
    """Between a host's groups and the curriculum. Groups are learnt from once, whichever hook sees them first."""

    def __init__(self, args: Namespace, layer: LayerConfig, prompts: Any) -> None:
        """`prompts` are the host's own, whose dataset has been loaded and shuffled by now.

        Raises:
            ValueError: the host has no dataset whose prompts could be chosen, its flags leave out a hook, its groups
                have one member, or its prompts have too many sources.
        """
        assert layer.run_dir is not None  # every host's job has one
        _check_flags(args, layer.curriculum)
        if args.n_samples_per_prompt < 2:
            raise ValueError(
                f"midstream.curriculum.enabled with --n-samples-per-prompt {args.n_samples_per_prompt}: rewards of a "
                "group never differ then, and all groups would be dropped; use 2 or more"
            )
        self._args, self._layer, self._prompts = args, layer, prompts
        self._drops_given_up = getattr(args, "dynamic_sampling_filter_path", None) == _FILTER
        self._folder: Path = layer.run_dir / FOLDER
        self._seen: set[str] = set()
        self._unknown = 0
        self._state_due = 0.0
        self.curriculum = Curriculum(
            layer.curriculum,
            _prompts_of(prompts, layer.curriculum.source_key),
            group_size=args.n_samples_per_prompt,
            groups_per_step=args.rollout_batch_size,
            seed=args.rollout_seed,
            shuffle=args.rollout_shuffle,
        )

    def take(self, count: int, version: int | None) -> list[Group]:
        """New groups of the prompts that are to be played next, numbered by the host."""
        self.advance(version)
        groups: list[Group] = []
        for position in self.curriculum.take(count):
            self._prompts.sample_offset = position
            groups += self._prompts.get_samples(1)
        return groups

    def configure(self, config: CurriculumConfig) -> Decide | None:
        """Go on under other settings; returns what decides from now on when a group is given up, None for never."""
        if config.early_stop.min_informative > 0 and not self._drops_given_up:
            _logger.error("midstream.curriculum.early_stop stays off: %s", _NEEDS_FILTER)
            config = config.model_copy(update={"early_stop": EarlyStopConfig()})
        self._check_weights(config.sampler.weights)
        self.curriculum.configure(config)
        decide = decider(config, lambda prompt_key: self.curriculum.belief(digest_of(prompt_key)))
        if decide is None:
            return None

        def unless_all_is_kept(
            prompt_key: str, rewards: Sequence[float], size: int, version: int | None
        ) -> bool:
            # What is given up cannot be kept, and then the step would never end.
            return not self.curriculum.filter.keeps_all(config) and decide(prompt_key, rewards, size, version)

        return unless_all_is_kept

    def _check_weights(self, weights: Mapping[str, float]) -> None:
        names = self.curriculum.names
        if unknown := weights.keys() - set(names):
            _logger.warning(
                "midstream.curriculum.sampler.weights names %s, and no prompt is of such a source: there are %s",
                ", ".join(map(repr, sorted(unknown))),
                ", ".join(map(repr, names)),
            )
        if not any(weights.get(name, 1.0) for name in names):
            _logger.warning(
                "midstream.curriculum.sampler.weights leaves no prompt to play, so it does not count: give one of %s a "
                "weight above 0",
                ", ".join(map(repr, names)),
            )

    def advance(self, version: int | None) -> None:
        """The policy has come to this version, as far as that is known."""
        if version is not None:
            self.curriculum.advance(version)

    def observe(self, group: Group) -> None:
        """Learn from a group that has ended; its members that are out of the loss say nothing."""
        members = list(samples_of(group))
        key = key_of(members[0])
        if key in self._seen or not all(map(has_ended, members)):
            return
        self._seen.add(key)
        stopped = [sample for sample in members if was_stopped(sample)]
        ended = [sample for sample in members if not sample.remove_sample]
        outcome = Outcome(
            _digest(members[0]),
            rewards_of(self._args, group),
            _cost(ended),
            tokens_saved(_own_tokens(ended), _own_tokens(stopped)) if stopped else None,
        )
        known = self.curriculum.observe(outcome)
        if not known and not self._unknown:
            _logger.warning(
                "group %s is of a prompt that is not in the dataset, so the curriculum learns nothing from it: another "
                "hook may have changed its prompt, label or metadata",
                key,
            )
        self._unknown += not known

    def judge(self, group: Group) -> Verdict:
        """Whether a group is trained on."""
        relaxed = self.curriculum.filter.relaxed(self.curriculum.config)
        verdict = self.curriculum.filter.judge(
            rewards_of(self._args, group),
            self.curriculum.config,
            stopped=any(map(was_stopped, samples_of(group))),
        )
        now = self.curriculum.filter.relaxed(self.curriculum.config)
        if now > relaxed:
            _logger.warning(
                "%d groups were dropped in this step: %s", self.curriculum.filter.dropped, _GIVES_WAY[now - 1]
            )
        return verdict

    @property
    def weight_of_equal(self) -> float:
        """The advantage of a success in a group of successes; 0 where such groups get none."""
        rules = self.curriculum.config.filter
        return rules.zero_variance_weight if rules.zero_variance == "keep" else 0.0

    def end_step(self, step: int) -> dict[str, float]:
        """The metrics of the step; what is known of the prompts is kept in the run directory."""
        self._seen.clear()
        relaxed = self.curriculum.filter.relaxed(self.curriculum.config)
        tallies = self.curriculum.end_step()
        begun = time.monotonic()
        try:
            keep_step(self._folder, step, self.curriculum, tallies, with_state=begun >= self._state_due)
        except OSError as error:
            _logger.warning("cannot keep what is known of the prompts (%s): free space or mend access", error)
        if begun >= self._state_due:
            self._state_due = begun + (time.monotonic() - begun) / _SHARE
        for name, tally in tallies.items():
            if tally.relaxed:
                _logger.warning(
                    "the gate had to open for %d groups of source %s: too few of its prompts are expected to inform",
                    tally.relaxed,
                    name,
                )
        found = {
            f"curriculum/{name}/{metric}": value
            for name, tally in tallies.items()
            for metric, value in tally.metrics(self.curriculum.calibrations[name]).items()
        }
        return found | {
            "curriculum/filter_relaxed": float(relaxed),
            "curriculum/unknown_prompts": float(self._unknown),
        }

    def save(self, rollout_id: int) -> None:
        """Keep a checkpoint beside the newest of the journal's. Raises OSError."""
        save(self.curriculum, self._checkpoint(rollout_id))
        there = sorted(self._folder.glob(_CHECKPOINT.format("[0-9]" * 9)))
        # Later ones are of an earlier run, or of steps that are done again.
        ours = [path for path in there if path <= self._checkpoint(rollout_id)]
        for path in set(there).difference(ours[-self._layer.journal.keep_checkpoints :]):
            path.unlink(missing_ok=True)

    def load(self, rollout_id: int) -> None:
        """Go on from a checkpoint; where there is none, as before the curriculum was switched on, begin anew.

        Raises:
            StateError: it cannot be read.
        """
        path = self._checkpoint(rollout_id)
        if path.exists():
            known = restore(self.curriculum, path)
            _logger.info("the curriculum goes on with what it knows of %d prompts", known)
        else:
            _logger.warning("%s is not there: the curriculum begins anew", path)

    def _checkpoint(self, rollout_id: int) -> Path:
        return self._folder / _CHECKPOINT.format(f"{rollout_id:09d}")


_GIVES_WAY = (
    "the band of pass rates is open until the step ends",
    "groups whose rewards are all equal are kept until the step ends, so that it does",
)


def rewards_of(args: Namespace, group: Group) -> list[float]:
    """Those of the members that are in the loss; the samples of one that was split count once if theirs are equal."""
    rewards: list[float] = []
    for member in group:
        parts = [sample for sample in samples_of([member]) if not sample.remove_sample]
        rewards += dict.fromkeys(float(sample.get_reward_value(args)) for sample in parts)
    return rewards


def _check_flags(args: Namespace, config: CurriculumConfig) -> None:
    """Raise ValueError where nothing would tell the curriculum what became of its groups."""
    filters = getattr(args, "dynamic_sampling_filter_path", None)
    if filters != _FILTER and getattr(args, "rollout_all_samples_process_path", None) != _OBSERVER:
        raise ValueError(
            "midstream.curriculum.enabled learns from the groups that end: add --dynamic-sampling-filter-path "
            f"{_FILTER}, or, beside a filter of your own, --rollout-all-samples-process-path {_OBSERVER}"
        )
    if config.early_stop.min_informative > 0 and filters != _FILTER:
        raise ValueError(f"midstream.curriculum.early_stop.min_informative is above 0: {_NEEDS_FILTER}")


def _prompts_of(prompts: Any, source_key: str) -> Prompts:
    samples: Sequence[Any] | None = getattr(prompts.dataset, "samples", None)
    if samples is None or not hasattr(prompts, "sample_offset"):
        raise ValueError(
            "midstream.curriculum.enabled needs a dataset to choose from, and the host's prompts have none: pass "
            "--prompt-data, without --disable-rollout-global-dataset"
        )
    if not samples:
        raise ValueError(
            "midstream.curriculum.enabled needs prompts, and the dataset is empty: see --prompt-data"
        )
    names: dict[str, int] = {}
    sources = [names.setdefault(_source_of(sample, source_key), len(names)) for sample in samples]
    if len(names) > MOST_SOURCES:
        raise ValueError(
            f"midstream.curriculum.source_key={source_key} names {len(names):,} sources, and each needs metrics and "
            f"groups of its own: use at most {MOST_SOURCES:,}, or a key that prompts share"
        )
    digests = np.fromiter((_digest(sample) for sample in samples), np.uint64, len(samples))
    return Prompts(digests, np.array(sources, np.int32), list(names))


def _source_of(sample: Any, source_key: str) -> str:
    named = (sample.metadata or {}).get(source_key)
    return _DEFAULT_SOURCE if named is None or named == "" else str(named)


def _digest(sample: Any) -> int:
    # A host's functions may change a sample's metadata on the way; the record has the key of the task as it began.
    record = (sample.metadata or {}).get(RECORD_KEY)
    return digest_of(record["prompt_key"] if record else task_of(sample).key)


def _cost(samples: Sequence[Any]) -> Cost:
    records = [record for sample in samples if (record := (sample.metadata or {}).get(RECORD_KEY))]
    if not records:
        return Cost()
    return Cost(
        tokens=fmean(_own_tokens(samples)),
        turns=fmean(len(record["turns"]) for record in records),
        seconds=fmean(sum(turn["seconds"] for turn in record["turns"]) for record in records),
    )


def _own_tokens(samples: Sequence[Any]) -> list[int]:
    """Tokens of the policy in each sample that has a record."""
    records = [(sample.metadata or {}).get(RECORD_KEY) for sample in samples]
    return [sum(end - start for _, start, end in record["spans"]) for record in records if record]
