"""The processes that a test has started; those of fixtures that serve the whole session are not its own."""

import os

from midstream.envs.sandboxes.processes import descendants

earlier: set[int] = set()


def started_here() -> list[int]:
    """Processes below this one that were not there when the test began."""
    return [pid for pid in descendants(os.getpid()) if pid not in earlier]
