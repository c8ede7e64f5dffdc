"""What a resume policy is: what it does when rollouts are cut off, and its choice when one could go on."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from midstream.buffers.fork import fork
from midstream.buffers.rollout import Anchor, PartialRollout
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
    FORK = "fork"  # it goes on from where a sibling is, with that sibling's tokens
    RESTART = "restart"  # it begins anew from its prompt
    DROP = "drop"  # it is forgotten, and its group


@dataclass(frozen=True)
class Choice:
    """One answer. ``turn`` is the first that goes, where the action is REWIND or FORK.

    ``source`` is the position in the group of the sibling that a FORK goes on from, ``anchors`` says that
    siblings go on from here, ``masked`` that the tokens which stay are out of the loss. ``measured`` asks for
    the log-probs of those tokens under the weights of the day before the group goes on, and for
    ``Policy.choose_measured`` then. ``reason`` is the name under which the tokens that go are counted.
    """

    action: Action
    turn: int = 0
    reason: str = "policy"
    source: int = 0
    anchors: bool = False
    masked: bool = False
    measured: bool = False

    @property
    def changes(self) -> bool:
        """Whether the rollout becomes another one."""
        return self.action is not Action.RESUME or self.anchors or self.masked

    def apply(self, rollout: PartialRollout, source: PartialRollout | None = None) -> list[Snapshot]:
        """Make ``rollout`` what the choice says; returns the snapshots that leave its record.

        ``source`` is the sibling at that position, as it was when the choice was made.
        """
        left: list[Snapshot] = []
        if self.action is Action.REWIND:
            left = rollout.rewind_to(self.turn)
        elif self.action is Action.FORK and source is not None:
            left = fork(rollout, source, self.turn)
        elif self.action is Action.RESTART:
            left = rollout.restart()
        if self.anchors and rollout.snapshot is not None:
            rollout.anchor = Anchor(rollout.snapshot, len(rollout.tokens))
        if self.masked:
            rollout.loss_mask = [0] * len(rollout.loss_mask)
        return left


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

    def choose_group(self, rollouts: Sequence[PartialRollout], version: int) -> list[Choice]:
        """Say how each rollout of a group goes on; by default each on its own, as ``choose`` says.

        Those that have ended are among them, as siblings: RESUME leaves them what they are. One that has not
        begun is an empty record.
        """
        return [self.choose(rollout, version) if goes_on(rollout) else RESUME for rollout in rollouts]

    def choose_measured(
        self, rollouts: Sequence[PartialRollout], version: int, log_ratio: float
    ) -> list[Choice]:
        """Say it again for a group of which a choice asked to be ``measured``; by default, as it stands.

        ``log_ratio`` is the mean square, over the trained tokens of those that go on, of their log-prob under
        the weights of the day minus the one with which they were made. The group is on its way already: DROP
        is no answer.
        """
        return [RESUME] * len(rollouts)


def goes_on(rollout: PartialRollout) -> bool:
    """Whether the rollout is unfinished and has tokens of the model, so that there is a choice to make."""
    return not rollout.status.finished and rollout.generated_tokens > 0
