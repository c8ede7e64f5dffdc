"""Who holds which sandbox, and until when."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from midstream.envs.pool.ending import Live
from midstream.envs.sandboxes.protocol import Sandbox, SandboxSpec


@dataclass
class Lease:
    """The use of one sandbox until `deadline_s`, in seconds of time.monotonic(); `Pool.heartbeat` moves it.

    Past the deadline its rollout counts as stuck: the sandbox is destroyed under it, and whatever it then
    does with it raises EnvironmentFailure.
    """

    id: str
    owner: str
    spec: SandboxSpec
    live: Live
    deadline_s: float

    @property
    def sandbox(self) -> Sandbox:
        return self.live.sandbox


class Leases:
    """The open leases. Times are passed in."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._open: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, spec: SandboxSpec, live: Live, now: float) -> Lease:
        lease = Lease(secrets.token_hex(8), spec.owner, spec, live, now + self.lease_s)
        self._open[lease.id] = lease
        return lease

    def extend(self, lease: Lease, now: float) -> bool:
        """Moves the deadline to a whole lease from now; False where the lease is over."""
        if lease.id not in self._open:
            return False
        lease.deadline_s = now + self.lease_s
        return True

    def close(self, lease: Lease) -> bool:
        """Ends it; False where it was over already. Whoever gets True has the sandbox to see to."""
        return self._open.pop(lease.id, None) is not None

    def close_expired(self, now: float) -> list[Lease]:
        """Ends and returns those past their deadline."""
        return self._closed(lease for lease in self._open.values() if lease.deadline_s <= now)

    def close_all(self) -> list[Lease]:
        return self._closed(self._open.values())

    def _closed(self, leases: Iterable[Lease]) -> list[Lease]:
        ended = list(leases)
        for lease in ended:
            del self._open[lease.id]
        return ended
