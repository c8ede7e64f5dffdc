"""What can go wrong with an environment, and whose fault it is.

The infrastructure's failures are EnvironmentFailure: never a reward, the rollout is retried. The agent's own
faults are AgentFault: never retried, the rollout ends with nothing.
"""

from typing import Literal

FailureKind = Literal["throttled", "quota", "transient", "permanent"]
"""Why a sandbox could not be had, which says what helps.

throttled: ask less often. quota: wait until another one is given back. transient: ask again.
permanent: asking again gives the same answer.
"""


class AgentFault(Exception):
    """What the agent did makes going on impossible: the episode ends, and scores 0."""


class WorkspaceLimit(AgentFault):
    """The workspace holds more than it may, or what cannot be recorded; the message names the path."""


class EnvironmentFailure(Exception):
    """The infrastructure failed: a sandbox died, a disk is full. Never a reward; the rollout is retried."""


class SandboxFailure(EnvironmentFailure):
    """A sandbox could not be created. `retry_after_s` is how long its provider asks to wait, None if unsaid."""

    def __init__(self, message: str, kind: FailureKind = "transient", retry_after_s: float | None = None):
        super().__init__(message)
        self.kind: FailureKind = kind
        self.retry_after_s = retry_after_s


class SnapshotError(EnvironmentFailure):
    """A snapshot could not be taken, written, read or restored; the message names the path."""


class SnapshotMissing(SnapshotError):
    """The store has no snapshot of this id."""


class SnapshotDamaged(SnapshotError):
    """What the store holds is not what was put into it; the message names the file and the content."""


class RestoreMismatch(SnapshotError):
    """What was restored is not what the snapshot says."""
