"""What must hold after a kill, found out from what lies on disk, by other ways than the job's own."""

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from midstream.buffers.journal.journal import Journal
from midstream.conf.schema import JobConfig
from midstream.envs.ownership.owners import Owner
from midstream.envs.pool.instances import layer_instances
from midstream.envs.pool.inventory import inventory
from midstream.envs.pool.reaper import reap
from midstream.envs.sandboxes.isolation.cgroups import PREFIX, find_cgroup_root
from midstream.envs.store.store import SnapshotStore
from midstream.local.args import checkpoints_of
from midstream.local.checkpoint import Checkpoints
from midstream.local.events import read_run


@dataclass(frozen=True)
class Ledger:
    """Of the history that the newest checkpoint has: what became of each group that was handed out.

    `trained` counts the steps that trained on a group, by their events; `waiting` are the snapshots that each group
    in the journal needs to go on. Groups are named by their index.
    """

    checkpoint: int | None = None
    handed_out: int = 0
    trained: Counter[int] = field(default_factory=Counter)
    dropped: frozenset[int] = frozenset()
    waiting: dict[int, frozenset[str]] = field(default_factory=dict)

    def lost(self) -> list[int]:
        """Groups that nobody has any more, and nobody said why."""
        return [
            group
            for group in range(self.handed_out)
            if group not in self.trained and group not in self.waiting and group not in self.dropped
        ]

    def trained_twice(self) -> list[int]:
        """Groups that were trained on more than once, or were trained on and still wait."""
        return [group for group, times in self.trained.items() if times > 1 or group in self.waiting]

    def missing(self, store: SnapshotStore) -> list[str]:
        """Snapshots that are needed and cannot be restored."""
        return [snapshot for snapshot in self.needed() if not store.has(snapshot)]

    def needed(self) -> frozenset[str]:
        return frozenset().union(*self.waiting.values())


def read_ledger(config: JobConfig) -> Ledger:
    """From the events, the prompts' position and a copy of the journal, as the next start will find them.

    Raises RuntimeError where the events lack a step of the history.
    """
    folder = checkpoints_of(config)
    newest = Checkpoints(folder, config.save_every).latest()
    if newest is None:
        return Ledger()
    steps = [step for step in read_run(folder.parent).steps if step["step"] <= newest]
    if [step["step"] for step in steps] != list(range(newest + 1)):
        raise RuntimeError(f"the events in {folder.parent} lack a step up to {newest}")
    position = json.loads((folder / "rollout" / f"prompts_{newest}.json").read_text())["sample_group_index"]
    return Ledger(
        newest,
        position,
        Counter(group for step in steps for group in step["trained_groups"]),
        frozenset(group for step in steps for group in step["dropped_groups"]),
        _waiting(folder.parent / "buffer", newest),
    )


def _waiting(journal_dir: Path, checkpoint: int) -> dict[int, frozenset[str]]:
    with _copy_of(journal_dir) as journal:
        restored = journal.roll_back(checkpoint)
    if restored.damaged:
        raise RuntimeError(f"the journal in {journal_dir} is damaged: {restored.damaged}")
    return {
        int(group.key): frozenset(snapshot for member in group.members for snapshot in member.snapshots)
        for group in restored.waiting
    }


@contextmanager
def _copy_of(journal_dir: Path) -> Iterator[Journal]:
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "journal"
        shutil.copytree(journal_dir, copy)
        with Journal(copy) as journal:
            yield journal


def unneeded_pins(config: JobConfig) -> frozenset[str]:
    """Snapshots that are pinned in the store though nothing refers to them, now or at a checkpoint."""
    pinned = frozenset().union(*snapshot_store(config).pins().values())
    with _copy_of(checkpoints_of(config).parent / "buffer") as journal:
        return pinned - journal.snapshots_in_use()


def snapshot_store(config: JobConfig) -> SnapshotStore:
    return SnapshotStore(checkpoints_of(config).parent / "snapshots")


def left_behind(config: JobConfig, pids: set[int]) -> list[str]:
    """What is there of the sandboxes of these processes, which have ended."""
    root, temp = _places(config)
    found = [str(each.path) for each in inventory([root], temp) if _is_of(each.owner, pids)]
    found += [str(each.directory) for each in layer_instances(root) if each.state == "gone"]
    cgroups = find_cgroup_root()
    for group in cgroups.path.glob(f"{PREFIX}*") if cgroups is not None else ():
        if _is_of(Owner.parse(group.name.removeprefix(PREFIX).rpartition("+")[0]), pids):
            found.append(str(group))
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return found + [line for line in mounts if str(config.run_dir) in line]


def reap_all(config: JobConfig) -> list[str]:
    """Has the reaper take its turn, as the next start does; returns what it cannot remove."""
    root, temp = _places(config)
    return reap([root], temp).failed


def _places(config: JobConfig) -> tuple[Path, Path]:
    return config.run_dir / "sandboxes", config.run_dir / "tmp"


def _is_of(owner: Owner | None, pids: set[int]) -> bool:
    return owner is not None and owner.pid in pids
