"""Train what was made under nearly the same policy, fork the group where it was not, and go back beyond a cap."""

from collections.abc import Sequence

from midstream.buffers.lags import lags
from midstream.buffers.policies.anchor import anchored, newest_boundary
from midstream.buffers.policies.base import RESUME, Action, Choice, CutOff, Policy, goes_on
from midstream.buffers.policies.rewind import Rewind
from midstream.buffers.rollout import PartialRollout
from midstream.conf.schema.policies import BUILT_IN


class Ladder(Policy):
    """Three rungs, for a group as a whole.

    1. While no trained token is older than ``small_lag`` and the mean squared log-ratio of the trained tokens
       is at most ``max_log_ratio``, all go on as they are.
    2. Else the group is forked from one of its members, and what is there so far is out of the loss.
    3. A member whose environment has a write older than ``max_lag`` can be forked from only at its newest
       snapshot without one; where no member has such a snapshot, they start anew.

    Where ``max_log_ratio`` is None, the lag alone decides.
    """

    name = "ladder"
    cut_off = CutOff(BUILT_IN["ladder"])
    goes_back = True

    def __init__(self, small_lag: int, max_lag: int, max_log_ratio: float | None) -> None:
        self.small_lag = small_lag
        self.max_lag = max_lag
        self.max_log_ratio = max_log_ratio
        self._rewind = Rewind(max_lag)

    def choose(self, rollout: PartialRollout, version: int) -> Choice:
        """The rung of a group of one."""
        return self.choose_group([rollout], version)[0]

    def choose_group(self, rollouts: Sequence[PartialRollout], version: int) -> list[Choice]:
        """The rung by lag; the first rung asks for a measurement where weights have changed since."""
        open_ = [rollout for rollout in rollouts if goes_on(rollout)]
        lag = max((trained_lag(rollout, version) for rollout in open_), default=0)
        too_old = any(lags(rollout, version).environment > self.max_lag for rollout in open_)
        if lag > self.small_lag or too_old:
            return self._forked(rollouts, version)
        measured = Choice(Action.RESUME, measured=lag > 0 and self.max_log_ratio is not None)
        return [measured if goes_on(rollout) else RESUME for rollout in rollouts]

    def choose_measured(
        self, rollouts: Sequence[PartialRollout], version: int, log_ratio: float
    ) -> list[Choice]:
        """The second rung where the policy has moved too far from the one that made the tokens."""
        if self.max_log_ratio is None or log_ratio <= self.max_log_ratio:
            return [RESUME] * len(rollouts)
        return self._forked(rollouts, version)

    def _forked(self, rollouts: Sequence[PartialRollout], version: int) -> list[Choice]:
        return anchored(rollouts, [self._boundary(each, version) for each in rollouts], masked=True)

    def _boundary(self, rollout: PartialRollout, version: int) -> int | None:
        """The turn before which no write is too old; None where there is no such state."""
        if not goes_on(rollout):
            return newest_boundary(rollout)
        back = self._rewind.choose(rollout, version)
        if back.action is Action.RESTART:
            return None
        return back.turn if back.action is Action.REWIND else newest_boundary(rollout)


def trained_lag(rollout: PartialRollout, version: int) -> int:
    """Versions between the oldest token of ``rollout`` that the loss sees and ``version``; 0 where there is none."""
    made = [span.version for span in rollout.spans if any(rollout.loss_mask[span.start : span.end])]
    return version - min(made) if made else 0
