"""Resume from the newest state of the environment in which too old policies have no hand."""

from midstream.buffers.lags import state_lag
from midstream.buffers.policies.base import RESTART, RESUME, Choice, CutOff, Policy, rewind_to
from midstream.buffers.rollout import PartialRollout
from midstream.conf.schema.policies import BUILT_IN


class Rewind(Policy):
    """Go on from the newest snapshot whose lag is within ``max_lag``; restart where there is none.

    A snapshot's lag is the age of the oldest write that survives in it. An action that is not executed yet
    counts like the write that it would be: it goes where its tokens are too old.

    The tokens before that snapshot stay, however old. Versions grow along a rollout, so its first tokens are
    its oldest: to ask them to be young is to ask for a restart, and that is what the bounds on lag are for.
    """

    name = "rewind"
    cut_off = CutOff(BUILT_IN["rewind"])
    goes_back = True

    def __init__(self, max_lag: int) -> None:
        self.max_lag = max_lag

    def choose(self, rollout: PartialRollout, version: int) -> Choice:
        """Resume where nothing is too old, else rewind by as few turns as it takes."""
        if self._is_young(rollout, rollout.snapshot, version) and self._action_is_young(rollout, version):
            return RESUME
        for index in range(len(rollout.turns) - 1, -1, -1):
            if self._is_young(rollout, rollout.turns[index].snapshot_before, version):
                return rewind_to(index)
        return RESTART

    def _is_young(self, rollout: PartialRollout, snapshot: str | None, version: int) -> bool:
        return snapshot is not None and state_lag(rollout.snapshots, snapshot, version) <= self.max_lag

    def _action_is_young(self, rollout: PartialRollout, version: int) -> bool:
        turn = rollout.open_turn
        made = [] if turn is None else [span.version for span in rollout.spans if span.start >= turn.start]
        return not made or version - min(made) <= self.max_lag
