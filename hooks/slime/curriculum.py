"""A curriculum over a host's dataset: which of its prompts become groups, and what is learnt of those that end."""

import functools
import logging
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from midstream.buffers.curriculum.book import digest_of
from midstream.buffers.curriculum.curriculum import Curriculum
from midstream.buffers.curriculum.early_stop import Decide, decider
from midstream.buffers.curriculum.filter import Verdict
from midstream.buffers.curriculum.history import FOLDER, keep_step
from midstream.buffers.curriculum.state import restore, save
from midstream.conf.schema import CurriculumConfig, LayerConfig
from midstream.conf.schema.curriculum import EarlyStopConfig
from midstream.hooks.slime.groups import has_ended, key_of
from midstream.hooks.slime.outcomes import outcome_of, prompts_of, rewards_of
from midstream.hooks.slime.sample import Group, samples_of, was_stopped

# Of a job's time, that may go into writing what is known of its prompts, for `midstream tune --dry-run` to read.
_SHARE = 0.01
# Groups that were learnt from, by their keys; hosts may train on them some steps later.
_REMEMBERED = 65_536
_CHECKPOINT = "checkpoint-{}.npz"
_FILTER = "midstream.hooks.slime.filters.informative"
_OBSERVER = "midstream.hooks.slime.filters.observe_all"
_NEEDS_FILTER = f"it needs --dynamic-sampling-filter-path {_FILTER}, which drops the groups that are given up"
_Method = TypeVar("_Method", bound=Callable[..., Any])
_logger = logging.getLogger(__name__)


def _locked(method: _Method) -> _Method:
    @functools.wraps(method)
    def locked(self: "SlimeCurriculum", *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(_Method, locked)


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
        # Hosts that generate beside training take groups in one thread and log in another.
        self._lock = threading.RLock()
        self._args, self._layer, self._prompts = args, layer, prompts
        self._drops_given_up = getattr(args, "dynamic_sampling_filter_path", None) == _FILTER
        self._folder: Path = layer.run_dir / FOLDER
        self._seen: dict[str, None] = {}
        self._unknown = 0
        self._state_due = 0.0
        self.curriculum = Curriculum(
            layer.curriculum,
            prompts_of(prompts, layer.curriculum.source_key),
            group_size=args.n_samples_per_prompt,
            groups_per_step=args.rollout_batch_size,
            seed=args.rollout_seed,
            shuffle=args.rollout_shuffle,
        )

    @_locked
    def take(self, count: int, version: int | None) -> list[Group]:
        """New groups of the prompts that are to be played next, numbered by the host."""
        self.advance(version)
        groups: list[Group] = []
        for position in self.curriculum.take(count):
            self._prompts.sample_offset = position
            groups += self._prompts.get_samples(1)
        return groups

    @_locked
    def configure(self, config: CurriculumConfig) -> Decide | None:
        """Go on under other settings; returns what decides from now on when a group is given up, None for never."""
        if config.early_stop.min_informative > 0 and not self._drops_given_up:
            _logger.error("midstream.curriculum.early_stop stays off: %s", _NEEDS_FILTER)
            config = config.model_copy(update={"early_stop": EarlyStopConfig()})
        self._check_weights(config.sampler.weights)
        self.curriculum.configure(config)
        decide = decider(config, lambda prompt_key: self.curriculum.belief(digest_of(prompt_key)))
        return None if decide is None else self._unless_equal_are_kept(decide)

    def _unless_equal_are_kept(self, decide: Decide) -> Decide:
        # What was given up is dropped whatever gives way: a step of such groups alone would never end.
        def gives_up(prompt_key: str, rewards: Sequence[float], size: int, version: int | None) -> bool:
            keeps = self.curriculum.filter.keeps_equal(self.curriculum.config)
            return not keeps and decide(prompt_key, rewards, size, version)

        return gives_up

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

    @_locked
    def observe(self, group: Group) -> None:
        """Learn from a group that has ended; its members that are out of the loss say nothing."""
        members = list(samples_of(group))
        key = key_of(members[0])
        if key in self._seen or not all(map(has_ended, members)):
            return
        self._seen[key] = None
        if len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]
        known = self.curriculum.observe(outcome_of(self._args, group))
        if not known and not self._unknown:
            _logger.warning(
                "group %s is of a prompt that is not in the dataset, so the curriculum learns nothing from it: another "
                "hook may have changed its prompt, label or metadata",
                key,
            )
        self._unknown += not known

    @_locked
    def observe_trained(self, samples: Group) -> None:
        """Learn from the groups of a batch that no filter has seen, as slime's fully-async function calls none."""
        groups: dict[str, Group] = {}
        for sample in samples_of(samples):
            groups.setdefault(key_of(sample), []).append(sample)
        for group in groups.values():
            self.observe(group)

    @_locked
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

    @_locked
    def end_step(self, step: int) -> dict[str, float]:
        """The metrics of the step; what is known of the prompts is kept in the run directory."""
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

    @_locked
    def save(self, rollout_id: int) -> None:
        """Keep a checkpoint beside the newest of the journal's. Raises OSError."""
        save(self.curriculum, self._checkpoint(rollout_id))
        there = sorted(self._folder.glob(_CHECKPOINT.format("[0-9]" * 9)))
        # Later ones are of an earlier run, or of steps that are done again.
        ours = [path for path in there if path <= self._checkpoint(rollout_id)]
        for path in set(there).difference(ours[-self._layer.journal.keep_checkpoints :]):
            path.unlink(missing_ok=True)

    @_locked
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
