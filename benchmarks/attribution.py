"""What each estimator of advantages buys: bias and spread of its gradient, against the exact one.

Agents repair files in a workspace (`stateful_mdp/workspace.py`), in two settings that differ in how much the states
of a group differ in value. The first turns of every rollout, its prefix, are played by a policy that is `lag` versions
old, the others, its suffix, by the newest; the exact gradient is that of the newest policy's expected reward, by its
logits in the turns of the prefix and of the suffix. Estimators get batches of 32 groups of 8 rollouts. A group is
8 rollouts of their own (`alone`), or holds continuations of an anchor at the end of the prefix. The rollouts that had
ended before the fork are played like the others here, their suffix by the newest policy.

- `bias` is the norm of the expectation's error by that of the exact gradient, `sd` the root of the trace of the
  covariance by the same norm, for as many generated tokens as a batch of GRPO has.
- Figures with three numbers are measured: the estimate and its 95 % interval, from independent batches; an `sd` alone
  is as sure as its ratio. A bias with one number is computed by theory; `off_theory` is then how far the measured
  expectation is from that. Noise is taken out of measured biases (`stateful_mdp/moments.py`), so that an interval that
  begins at 0 has found none.
- A scale that is known is divided out: GRPO's mean holds the rollout itself, which takes 1/8 of its gradient. A
  prefix that is out of the loss has a bias of 1.
- `tis` says that the host corrects every token by min(ratio, 2).
- `sd / grpo` is against GRPO on the same lag without any correction.
- A prefix that is continued counts once. `discarded_factor` is what to multiply an `sd` with where the other
  continuations had come as far by themselves and what they had made was thrown away.

    python benchmarks/attribution.py [--json] [--quick] [--batches N] [--seed N]
"""

import argparse
import sys
from collections.abc import Iterator

import torch
from attribution_targets import GRPO, targets_of
from result import publish
from stateful_mdp.cases import FORKED, LAYOUTS, Case, Row, case_row, cases, layout_rows
from stateful_mdp.compositions import (
    Composition,
    advantages_by_batch,
    to_tokens,
    token_weights,
)
from stateful_mdp.findings import Found, errors_of
from stateful_mdp.gradients import own_ratio_weights, policy_gradients
from stateful_mdp.groups import Groups, credit_batch, log_ratios, play
from stateful_mdp.workspace import TURNS, write_lag
from torch import Tensor

from midstream.hooks.credit.batch import CreditBatch

BATCHES, QUICK_BATCHES = 300, 60
BATCH_GROUPS = 32

ON_ALONE = (GRPO, Composition("state_hash"))
ON_FORKED = tuple(map(Composition, ("anchored", "anchored_shrunk", "telescoped", "state_hash", "grpo")))
# What weighs changes nothing where there is no lag.
STALE_ON_ALONE = (
    *(Composition("grpo", (name,)) for name in ("mask_prefix", "lag_decay", "prefix_is 2", "prefix_is")),
    Composition("state_hash", ("prefix_is 2",)),
)
STALE_ON_FORKED = (
    Composition("anchored_shrunk", ("prefix_is 2",)),
    Composition("anchored_shrunk", ("prefix_is",)),
)


def main() -> None:
    options = _parse()
    torch.set_num_threads(1)
    batches = options.batches or (QUICK_BATCHES if options.quick else BATCHES)
    rows: list[Row] = []
    found: list[Found] = []
    for case in cases(quick=options.quick, seed=options.seed):
        generator = torch.Generator().manual_seed(options.seed)
        own = [
            each
            for layout in case.layouts
            for each in measure(case, layout, batches=batches, generator=generator)
        ]
        rows += [case_row(case), *(each.row(own[0]) for each in own)]
        found += own
        print(case.names(), file=sys.stderr, flush=True)
    rows += layout_rows()
    publish(
        targets_of(found), rows if options.json else [readable(row) for row in rows], as_json=options.json
    )


def measure(case: Case, layout: str, *, batches: int, generator: torch.Generator) -> Iterator[Found]:
    """All compositions on rollouts of one layout; of the first the expectation can be computed."""
    groups = play(
        case.process,
        case.made,
        LAYOUTS[layout],
        cut=case.cut,
        groups=batches * BATCH_GROUPS,
        generator=generator,
    )
    ratios = log_ratios(groups, case.now, case.made)
    is_alone = layout not in FORKED
    plain = ON_ALONE if is_alone else ON_FORKED
    weighed = () if case.lag == 0 else STALE_ON_ALONE if is_alone else STALE_ON_FORKED
    credited = {each.advantage: _credited(case, groups, each) for each in plain}
    told = _told(case, groups)
    for tis in (False, True)[: 1 + (case.lag > 0)]:
        of_host = own_ratio_weights(ratios, corrected=tis)
        control: Tensor | None = None
        for each in (*plain, *weighed):
            weights = of_host * token_weights(each, case.process, told, ratios)
            coefficients = to_tokens(case.process, credited[each.advantage]) * weights
            estimates = policy_gradients(groups, coefficients, case.now, batches)
            estimates /= BATCH_GROUPS * each.scale(LAYOUTS[layout])
            expected = each.expectation(
                case.process, case.logits, case.made, cut=case.cut, layout=LAYOUTS[layout], tis=tis
            )
            off = estimates - expected
            if control is None:
                control = off
            computable = each.computable(LAYOUTS[layout], case.lag)
            yield Found(case, layout, each, tis, errors_of(case, off, expected, control, computable))


def _credited(case: Case, groups: Groups, composition: Composition) -> Tensor:
    return advantages_by_batch(
        composition, case.process, groups, cut=case.cut, lag=case.lag, batch_groups=BATCH_GROUPS
    )


def _told(case: Case, groups: Groups) -> CreditBatch:
    first_steps = [case.process.first_step(turn) for turn in range(TURNS)]
    lags = write_lag(groups.states[:, first_steps], case.cut, case.lag)
    return credit_batch(case.process, groups, cut=case.cut, lag=case.lag, write_lags=lags)


def readable(row: Row) -> Row:
    """Estimates without their intervals, for people."""
    if row["what"] != "gradient":
        return row
    estimates = {key: value[0] if isinstance(value, list) else value for key, value in row.items()}
    return {key: value for key, value in estimates.items() if not key.endswith("off_theory")}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a look: one cut, two lags, few batches")
    parser.add_argument("--batches", type=int, help=f"per figure (default {BATCHES}, quick {QUICK_BATCHES})")
    parser.add_argument("--seed", type=int, default=0, help="of the policies and the rollouts")
    return parser.parse_args()


if __name__ == "__main__":
    main()
