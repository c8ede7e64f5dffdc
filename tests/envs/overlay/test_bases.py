"""What layers leave in the store."""

from collections.abc import Callable
from pathlib import Path

from midstream.envs.sandboxes.overlay.layers import Layers
from midstream.envs.sandboxes.overlay.stacks import LayerBudget
from midstream.envs.sandboxes.protocol import SandboxSpec
from midstream.envs.store.store import SnapshotStore
from tests.envs.overlay.conftest import Box


def forget(layers: Layers, snapshots: list) -> None:
    layers.store.delete(layers.forget(snapshots), "resting")


def test_compactions_and_cold_restores_record_nothing(
    new_layers: Callable[..., Layers], new_box: Callable[..., Box], store: SnapshotStore
):
    layers = new_layers(compact_at=3)
    box = new_box(of=layers)
    taken = []
    for turn in range(8):
        box.run(f"echo {turn} > file{turn}; rm -f file{turn - 1}")
        taken.append(box.snapshot())
        layers.settle()
    assert len(box.lowers()) < 6
    new_box(taken[-1], of=new_layers())
    assert store.statistics().snapshots == 1 + len(taken)


def test_a_snapshot_in_place_of_a_collected_one_goes_again(
    new_layers: Callable[..., Layers], new_box: Callable[..., Box], store: SnapshotStore
):
    layers = new_layers(compact_at=3)
    box = new_box(of=layers)
    for turn in range(6):
        store.collect()
        box.run(f"echo {turn} > file")
        snapshot = box.snapshot()
        layers.settle()
    # That of the task is pinned.
    assert store.statistics().snapshots == 2
    forget(layers, [snapshot])
    assert store.statistics().snapshots == 1


def test_a_base_that_nobody_was_given_goes_with_its_layers(
    new_layers: Callable[..., Layers], new_box: Callable[..., Box], store: SnapshotStore
):
    layers = new_layers()
    box = new_box(of=layers)
    box.run("echo 1 > x")
    snapshot = box.snapshot()
    store.collect([snapshot])
    assert store.statistics().snapshots == 2
    box.close()
    forget(layers, [snapshot])
    layers.bases.close()
    assert store.statistics().snapshots == 0 and store.pins() == {}


def test_a_base_that_was_given_is_kept_until_it_is_forgotten(
    new_layers: Callable[..., Layers], new_box: Callable[..., Box], store: SnapshotStore
):
    layers = new_layers()
    base = new_box(of=layers).snapshot()
    store.pin([base], "resting")
    forget(layers, [base])
    assert base in store and "resting" not in store.pins()
    assert new_box(of=layers).snapshot() == base
    layers.bases.close()
    assert base in store and store.pins() == {}


def test_bases_that_no_sandbox_needs_go_when_there_are_many(
    new_layers: Callable[..., Layers], store: SnapshotStore
):
    layers = new_layers(budget=LayerBudget(layers=3))
    for number in range(9):
        layers.release(layers.base(SandboxSpec({"number": f"{number}"}, base=f"task {number}")).stack)
    layers.settle()
    assert 0 < store.statistics().snapshots <= 4


def test_pins_of_a_killed_process_are_taken_off(
    new_layers: Callable[..., Layers], new_box: Callable[..., Box], store: SnapshotStore, tmp_path: Path
):
    layers = new_layers()
    base = new_box(of=layers).snapshot()
    store.pin([base], f"layers {tmp_path / 'layers' / '1-killed'}")
    new_layers().settle()
    assert set(store.pins()) == {f"layers {layers.places.path}"}
