"""The host's prompts: as they come, or as a curriculum chooses them."""

from argparse import Namespace
from typing import Any

from midstream.conf.schema import LayerConfig
from midstream.hooks.slime.curriculum import SlimeCurriculum
from midstream.hooks.slime.host import running_host
from midstream.hooks.slime.sample import Group
from midstream.hooks.slime.settings import (
    curriculum_of,
    engine_of,
    keep_curriculum,
    layer_of,
    siblings_of,
    steering_of,
)


class HostPrompts:
    """New groups, numbered by the host, whose own data source of prompts is ``source``.

    Where it is enabled the curriculum chooses.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self.source = running_host(args).load("prompts", "RolloutDataSource")(args)

    @property
    def dataset(self) -> Any:
        """The host's dataset; None where it has none."""
        return self.source.dataset

    def draw(self, count: int) -> list[Group]:
        """So many new groups."""
        curriculum = curriculum_of(self._args)
        if curriculum is None:
            groups: list[Group] = self.source.get_samples(count)
            return groups
        return curriculum.take(count, engine_of(self._args).version)

    def save(self, rollout_id: int) -> None:
        """Save the host's state under ``args.save``, and what the curriculum knows. Raises OSError."""
        if (curriculum := curriculum_of(self._args)) is not None:
            curriculum.save(rollout_id)
        self.source.save(rollout_id)

    def load(self, rollout_id: int | None) -> None:
        """Return to the host's state under ``args.load``."""
        self.source.load(rollout_id)

    def begin(self, rollout_id: int | None) -> None:
        """Let the curriculum begin, anew or from a checkpoint, once the host's prompts are in their order.

        Raises:
            ValueError: the host has no dataset, or its flags leave out a hook.
            StateError: what the curriculum knew cannot be read.
        """
        layer = layer_of(self._args)
        if layer.curriculum.enabled:
            curriculum = SlimeCurriculum(self._args, layer, self.source)
            keep_curriculum(self._args, curriculum)
            # First, since what was saved may have been chosen by other weights than the job's own.
            self.configure(steering_of(self._args).layer())
            # Hosts ask for -1 where there is nothing to load yet.
            if rollout_id is not None and rollout_id >= 0:
                curriculum.load(rollout_id)

    def configure(self, layer: LayerConfig) -> None:
        """Go on under other settings of the curriculum."""
        if (curriculum := curriculum_of(self._args)) is not None:
            siblings_of(self._args).decide = curriculum.configure(layer.curriculum)

    def close(self) -> None:
        """The curriculum is over."""
        keep_curriculum(self._args, None)
        siblings_of(self._args).decide = None
