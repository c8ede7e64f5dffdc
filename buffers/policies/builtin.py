"""The policies that come with the layer, by name."""

from collections.abc import Callable

from midstream.buffers.policies.anchor import Anchoring
from midstream.buffers.policies.base import DROP, RESTART, RESUME, Choice, CutOff, Policy
from midstream.buffers.policies.ladder import Ladder
from midstream.buffers.policies.rewind import Rewind
from midstream.buffers.rollout import PartialRollout
from midstream.conf.schema import PoliciesConfig
from midstream.conf.schema.policies import BUILT_IN


class Uniform(Policy):
    """The same choice for every rollout."""

    def __init__(self, name: str, choice: Choice, *, keeps_environment: bool = True) -> None:
        self.name = name
        self.cut_off = CutOff(BUILT_IN[name])
        self.keeps_environment = keeps_environment
        self._choice = choice

    def choose(self, rollout: PartialRollout, version: int) -> Choice:
        """The policy's one choice."""
        return self._choice


MAKERS: dict[str, Callable[[PoliciesConfig], Policy]] = {
    "wait": lambda _: Uniform("wait", RESUME),
    "discard": lambda _: Uniform("discard", DROP),
    "restart": lambda _: Uniform("restart", RESTART),
    "continue": lambda _: Uniform("continue", RESUME),
    "rewind": lambda parameters: Rewind(parameters.rewind.max_lag),
    "anchor": lambda parameters: Anchoring(parameters.anchor.prefix),
    "ladder": lambda parameters: Ladder(**parameters.ladder.model_dump()),
    "naive": lambda _: Uniform("naive", RESUME, keeps_environment=False),
}
"""How each of `conf.schema.policies.BUILT_IN` is made from its parameters."""
