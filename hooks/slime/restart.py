"""The journal of a job: where it lies, and the groups that wait in it after a restart."""

import logging
import time
from argparse import Namespace
from typing import Any

from midstream.buffers.journal.errors import JournalDamaged, JournalError, JournalInUse
from midstream.buffers.journal.journal import Journal
from midstream.buffers.journal.runs import FOLDER
from midstream.buffers.ledger import Ledger
from midstream.conf.schema import LayerConfig
from midstream.envs.errors import SnapshotMissing
from midstream.envs.protocol import EnvironmentFactory
from midstream.hooks.slime.groups import SlimeGroups
from midstream.hooks.slime.payload import restored
from midstream.hooks.slime.sample import Group
from midstream.hooks.slime.settings import (
    abandoned_of,
    holds_of,
    host_keeps_groups,
    layer_of,
    policy_of,
)

# A job that was killed may take a moment to be gone.
_PATIENCE_S = 10.0
_POLL_S = 0.1

_logger = logging.getLogger(__name__)


def open_ledger(args: Namespace) -> Ledger[Group]:
    """The ledger of this job's groups, in its run directory.

    Raises:
        JournalError: another job has the run directory, it cannot be written, or its journal is of another
            version.
    """
    holds, abandoned = holds_of(args), abandoned_of(args)
    groups = SlimeGroups(
        goes_back=policy_of(args).goes_back, free=lambda freed: abandoned.extend(holds.recheck(freed))
    )
    ledger = Ledger(_opened(layer_of(args)), groups, host_keeps=host_keeps_groups(args))
    holds.in_use = ledger.is_in_use
    return ledger


def restored_groups(ledger: Ledger[Group], rollout_id: int | None, sample_class: Any) -> list[Group]:
    """The groups that waited at a checkpoint, oldest first; those that cannot be read are lost, and said.

    Raises:
        JournalError: the journal has no such checkpoint, but others; or a record is of another version of
            midstream, or of a class that is not there.
    """
    groups = []
    for key, members in ledger.restore(rollout_id).items():
        try:
            groups.append([restored(member.payload, sample_class) for member in members])
        except JournalDamaged as damage:
            ledger.lost(key, damage)
    return groups


def check_sizes(groups: list[Group], size: int) -> None:
    """Raise JournalError where a group has not as many members as the job is set to have."""
    for group in groups:
        if len(group) != size:
            raise JournalError(
                f"a group of {len(group)} waits in the journal, and --n-samples-per-prompt is {size}: set it as it "
                "was, or set another run_dir to begin with an empty buffer"
            )


def adopt_snapshots(environments: EnvironmentFactory, ledger: Ledger[Group]) -> None:
    """Have the environments drop what an earlier process of this run kept and the journal does not know.

    Raises:
        SnapshotMissing: not one of the snapshots in the journal is there.
    """
    adopt = getattr(environments, "adopt", None)
    if adopt is None:
        return
    needed = ledger.snapshots_in_use()
    missing = adopt(needed)
    if missing and len(missing) == len(needed):
        raise SnapshotMissing(
            f"none of the {len(needed)} snapshots that waiting rollouts need is in the store: set "
            "midstream.snapshots.path to where the job kept them, or move the folder "
            f"{FOLDER!r} of the run directory away to begin with an empty buffer"
        )
    if missing:
        _logger.warning(
            "%d of %d snapshots that waiting rollouts need are not in the store (%s, ...): these rollouts go on "
            "from earlier ones, or start anew",
            len(missing),
            len(needed),
            min(missing),
        )


def _opened(layer: LayerConfig) -> Journal:
    assert layer.run_dir is not None  # every host's job has one
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return Journal(layer.run_dir / FOLDER, keep_checkpoints=layer.journal.keep_checkpoints)
        except JournalInUse:
            if time.monotonic() >= until:
                raise
            time.sleep(_POLL_S)
