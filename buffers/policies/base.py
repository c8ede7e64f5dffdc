"""What a resume policy is: what it does when rollouts are cut off, and its choice when one could go on."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

from midstream.buffers.rollout import PartialRollout
from midstream.envs.protocol import Snapshot


class CutOff(Enum):
    """What happens to the rollouts that are unfinished when their batch is full."""

    NOTHING = "nothing"  # the batch is full only when every launched rollout has ended
    DROPPED = "dropped"  # their groups are forgotten
    EMPTIED = "emptied"  # they lose what was made; their prompts wait
    KEPT = "kept"  # they wait as they are


class Action(Enum):
    """What becomes of one rollout that waited, when its group is handed out."""

    RESUME = "resume"  # it goes on where it is
    REWIND = "rewind"  # it goes on from the start of an earlier turn
    RESTART = "restart"  # it begins anew from its prompt
    DROP = "drop"  # it is forgotten, and its group


@dataclass(frozen=True)
class Choice:
    """One answer. ``turn`` is the first that goes, where the action is REWIND.

    ``reason`` is the name under which the tokens that go are counted.
    """

    action: Action
    turn: int = 0
    reason: str = "policy"

    def apply(self, rollout: PartialRollout) -> list[Snapshot]:
        """Make ``rollout`` what the choice says; returns the snapshots that leave its record."""
        if self.action is Action.REWIND:
            return rollout.rewind_to(self.turn)
        if self.action is Action.RESTART:
            return rollout.restart()
        return []


RESUME = Choice(Action.RESUME)
RESTART = Choice(Action.RESTART)
DROP = Choice(Action.DROP)


def rewind_to(turn: int) -> Choice:
    """Go on from the start of ``turn``."""
    return Choice(Action.REWIND, turn)


class Policy(ABC):
    """A resume policy. A class of your own derives from this one, and is named as ``module:Class``.

    ``name`` is what the job's settings call it. ``keeps_environment`` False lets a resumed transcript go
    on in an environment that starts anew: today's practice, kept to show what it costs. ``goes_back`` says
    that a rollout may go on from an earlier snapshot than its newest: then all of them outlast a crash.
    """

    name: str = ""
    cut_off: CutOff = CutOff.KEPT
    keeps_environment: bool = True
    goes_back: bool = False

    @abstractmethod
    def choose(self, rollout: PartialRollout, version: int) -> Choice:
        """Say how ``rollout``, which is unfinished and has tokens of the model, goes on under ``version``.

        The rollout is not to be changed. Asked when its group is handed out, not when it was cut off: what
        waits gets older.
        """
