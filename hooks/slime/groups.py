"""A host's groups, as the ledger sees them."""

from collections.abc import Callable, Iterable
from typing import Any

from midstream.buffers.journal.records import Member
from midstream.hooks.slime.payload import journaled
from midstream.hooks.slime.sample import Group, samples_of

_UNFINISHED = ("pending", "aborted")


class SlimeGroups:
    """Groups of samples. ``goes_back`` is the policy's; ``free`` is told which snapshots the journal let go of."""

    def __init__(self, *, goes_back: bool, free: Callable[[Iterable[str]], None]) -> None:
        self._goes_back = goes_back
        self.free = free

    def key(self, group: Group) -> str:
        """The host's own number of the group."""
        return key_of(next(samples_of(group)))

    def size(self, group: Group) -> int:
        """Its members; one that was split into several samples counts once."""
        return len(group)

    def member(self, group: Group, position: int) -> Member:
        """One member with the record that its sample carries."""
        return journaled(group[position], goes_back=self._goes_back)

    def has_ended(self, group: Group, position: int) -> bool:
        """Whether a member has all that a host asks of an ended sample.

        One that is ``aborted`` may have been cut off, or be generated further at this moment.
        """
        return all(has_ended(sample) for sample in samples_of([group[position]]))


def key_of(sample: Any) -> str:
    """The key of a sample's group.

    Raises:
        ValueError: the host did not number it.
    """
    if sample.group_index is None:
        raise ValueError(
            f"sample {sample.index} has no group_index, by which midstream keeps apart the groups of a run: "
            "let the host's prompts number their groups, as its own RolloutDataSource does"
        )
    return str(sample.group_index)


def has_ended(sample: Any) -> bool:
    """Whether a sample has all that a host asks of an ended one."""
    status = sample.status.value
    # A host's own functions set the status before the reward, and at the end of each turn.
    return status == "failed" or (status not in _UNFINISHED and sample.reward is not None)
