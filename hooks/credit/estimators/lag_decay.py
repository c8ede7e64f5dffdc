"""The staler a token, at each of the three levels, the less its advantage counts."""

from torch import Tensor

from midstream.hooks.credit.batch import CreditBatch


def lag_decay(batch: CreditBatch, rates: Tensor) -> Tensor:
    """[S] exp(-(rates . lags)), in (0, 1].

    ``rates`` [3] are per policy version of lag, of the trajectory, the token and the environment's state.
    """
    return (-(batch.lags @ rates)).exp()
