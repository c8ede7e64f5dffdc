"""What happens to a rollout that is unfinished when its batch is full."""

from dataclasses import dataclass
from enum import Enum

from midstream.buffers.rollout import PartialRollout


class Decision(Enum):
    """What becomes of one unfinished rollout."""

    RESUME = "resume"  # go on from its tokens
    RESTART = "restart"  # begin anew from its prompt, under the policy of the day
    DROP = "drop"  # forget it, and its group


@dataclass(frozen=True)
class ResumePolicy:
    """A named answer to "what do we do with unfinished rollouts?".

    ``waits``: the batch is complete only when every launched rollout is; nothing is cut off.
    ``keeps_environment``: a resumed rollout finds the environment as it was, by snapshot. Where it is
    False the transcript goes on in an environment that started anew: today's practice, kept to show
    what it costs.
    """

    name: str
    unfinished: Decision
    waits: bool = False
    keeps_environment: bool = True

    def decide(self, rollout: PartialRollout) -> Decision:
        """Say what becomes of ``rollout``, which its host has just cut off."""
        if rollout.status.finished:
            return Decision.RESUME if self.unfinished is not Decision.DROP else Decision.DROP
        return self.unfinished


_BUILT_IN = (
    ResumePolicy("wait", Decision.RESUME, waits=True),
    ResumePolicy("discard", Decision.DROP),
    ResumePolicy("restart", Decision.RESTART),
    ResumePolicy("continue", Decision.RESUME),
    ResumePolicy("naive", Decision.RESUME, keeps_environment=False),
)
POLICIES = {policy.name: policy for policy in _BUILT_IN}


def resume_policy(name: str) -> ResumePolicy:
    """Return the built-in policy called ``name``; raises ValueError naming the choices."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"resume_policy: got {name!r}; choose one of {', '.join(POLICIES)}") from None
