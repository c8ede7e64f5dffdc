"""Snapshots that the journal refers to outlast their rollouts, and not for longer than that."""

from midstream.buffers.holds import Holds
from midstream.envs.protocol import Snapshot

SNAPSHOT = Snapshot("s", "digest")


def test_what_is_freed_while_it_is_released_is_not_kept_back() -> None:
    """The journal lets go of it in another thread, right after it was seen to be in use."""
    holds = Holds()
    seen = []

    def in_use(snapshot_id: str) -> bool:
        seen.append(snapshot_id)
        if len(seen) > 1:
            return False
        assert holds.recheck([snapshot_id]) == []
        return True

    holds.in_use = in_use
    assert holds.release([SNAPSHOT]) == [SNAPSHOT]
    assert holds.recheck(["s"]) == []


def test_what_is_in_use_is_kept_back_until_it_is_freed() -> None:
    holds = Holds()
    holds.in_use = {"s"}.__contains__
    assert holds.release([SNAPSHOT]) == []
    assert holds.recheck(["another"]) == []
    assert holds.recheck(["s"]) == [SNAPSHOT]
