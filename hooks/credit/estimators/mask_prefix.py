"""Only what the newest policy of each rollout made is trained."""

import torch
from torch import Tensor

from midstream.hooks.credit.batch import NONE, CreditBatch


def mask_prefix(batch: CreditBatch) -> Tensor:
    """[S] bool, False for model tokens that are older than the newest version in their own rollout.

    A rollout that one version made from its start to its end stays whole, however old it is: that is where a
    host's own mask of everything that was there at a resume is wrong about siblings that had ended.
    """
    newest = torch.full((len(batch.rewards),), NONE, dtype=torch.int64)
    newest = newest.scatter_reduce(0, batch.rollouts, batch.versions, "amax")
    return ~batch.by_the_model | (batch.versions == newest[batch.rollouts])
