"""Only what the newest policy of each rollout made is trained."""

from torch import Tensor

from midstream.hooks.credit.batch import CreditBatch, is_outdated


def mask_prefix(batch: CreditBatch) -> Tensor:
    """[S] bool, False for model tokens that are older than the newest version in their own rollout.

    A rollout that one version made from its start to its end stays whole, however old it is: that is where a
    host's own mask of everything that was there at a resume is wrong about siblings that had ended.
    """
    return ~is_outdated(batch.versions, batch.rollouts, len(batch.rewards))
