"""The books of layers."""

from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.overlay.stacks import Known, LayerBudget, Stacks


def known(name: str, *stack: str) -> Known:
    return Known(Snapshot(name, name, None), stack)


def test_another_snapshot_of_a_layer_leaves_its_size():
    stacks = Stacks(LayerBudget(bytes=1000))
    stacks.add(known("first", "1"), 600)
    assert stacks.add(known("first in another folder", "1"), 0) == []
    # Each of the two keeps the layer for the other, so the newest is what can make room.
    assert stacks.add(known("second", "2"), 600) == ["2"]
