"""What a pool may use, and when it gives up."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

# What one isolated shell with its page tables and pipes takes of the host, measured, with room to spare.
SANDBOX_BYTES = 16 << 20
# Descriptors of this process per sandbox: socket, pipe, process, and those open while it starts.
SANDBOX_DESCRIPTORS = 8
# Descriptors that the rest of the process needs.
OTHER_DESCRIPTORS = 256
# Beyond this many sandboxes one event loop has no time for anything else.
MOST_SANDBOXES = 2048


@dataclass(frozen=True)
class PoolSettings:
    """Bounds and deadlines of a pool. Raises ValueError, naming the setting, for values that cannot work."""

    max_sandboxes: int | None = None
    """Sandboxes that exist at once, spares and hot ones included; with `shared_path`, of all processes
    together. None: as many as memory and descriptors of this host allow."""

    creations_per_s: float | None = None
    """Sandboxes begun per second; with `shared_path`, by all processes together. None: no bound. A hosted
    provider's own bound belongs here, since asking it more often only makes it refuse."""

    creations_in_flight: int = 64
    """Creations of this process that run at the same time."""

    acquire_timeout_s: float = 600.0
    """How long an acquisition waits, all its attempts together, before it fails as a SandboxFailure."""

    create_timeout_s: float = 120.0
    """How long one attempt may take before it counts as failed."""

    destroy_timeout_s: float = 60.0
    """How long a sandbox may take to go before its slot is given back without it; it is tried again later."""

    warm: int = 0
    """Spares kept ready for each base that was leased lately or named to `Pool.prepare`. 0: none."""

    warm_bases: int = 4
    """Bases that have spares at a time; those leased longest ago lose theirs."""

    hot: int = 64
    """Parked sandboxes kept alive for their rollout to go on. 0: none, all resumes come from the store."""

    hot_bytes: int | None = None
    """What the workspaces of all parked sandboxes may hold together. None: no bound."""

    lease_s: float = 3600.0
    """How long a lease lasts without a heartbeat; then its rollout counts as stuck and the sandbox ends."""

    shared_path: Path | None = None
    """A directory that all processes of the job see, where number and rate are counted. None: each process
    counts its own."""

    sandbox_root: Path | None = None
    """Where local sandboxes lie, for the reaper. None: it looks into the temp directory alone."""

    reap_interval_s: float = 60.0
    """How often, while running, the reaper looks for what killed processes left."""

    retry_attempts: int = 6
    """Attempts at one sandbox, the first included, where they fail for a passing reason."""

    retry_first_s: float = 0.5
    """The wait before the second attempt; each further one doubles."""

    retry_longest_s: float = 30.0
    """Where doubling ends."""

    breaker_window_s: float = 60.0
    """How far back results count for the breaker."""

    breaker_results: int = 10
    """Results in the window below which nothing is concluded."""

    breaker_failed_share: float = 0.5
    """Share of failures in the window from which on it is an outage: no creations but a probe."""

    breaker_open_s: float = 5.0
    """How long after an outage began the first probe waits; doubles with each that fails."""

    breaker_longest_s: float = 120.0
    """Where that doubling ends."""

    def __post_init__(self) -> None:
        for name in (
            "max_sandboxes",
            "creations_in_flight",
            "warm_bases",
            "retry_attempts",
            "breaker_results",
        ):
            self._check(name, at_least=1)
        for name in ("warm", "hot", "hot_bytes", "retry_first_s"):
            self._check(name, at_least=0)
        for name in (
            "creations_per_s",
            "acquire_timeout_s",
            "create_timeout_s",
            "destroy_timeout_s",
            "lease_s",
        ):
            self._check(name, above=0)
        for name in ("reap_interval_s", "retry_longest_s", "breaker_window_s", "breaker_open_s"):
            self._check(name, above=0)
        self._check("breaker_longest_s", at_least=self.breaker_open_s)
        if not 0 < self.breaker_failed_share <= 1:
            raise ValueError(
                f"breaker_failed_share: got {self.breaker_failed_share}; a share above 0 and at most 1"
            )

    def _check(self, name: str, at_least: float | None = None, above: float | None = None) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if at_least is not None and not value >= at_least:
            raise ValueError(f"{name}: got {value}; it must be at least {at_least:g}")
        if above is not None and not value > above:
            raise ValueError(f"{name}: got {value}; it must be above {above:g}")

    def most_sandboxes(self) -> int:
        """`max_sandboxes`, or what this host allows where it is None."""
        return derived_max_sandboxes() if self.max_sandboxes is None else self.max_sandboxes


def derived_max_sandboxes() -> int:
    """How many local sandboxes this host carries, by its memory and this process's limit on descriptors."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        descriptors = MOST_SANDBOXES * SANDBOX_DESCRIPTORS + OTHER_DESCRIPTORS
    by_descriptors = (descriptors - OTHER_DESCRIPTORS) // SANDBOX_DESCRIPTORS
    return max(1, min(memory // SANDBOX_BYTES, by_descriptors, MOST_SANDBOXES))
