"""What each estimator of advantages buys: bias and spread of its gradient, against the exact one.

Agents repair files in a workspace (`stateful_mdp/workspace.py`), in two settings that differ in how much the states
of a group differ in value. The first turns of every rollout, its prefix, are played by a policy that is `lag` versions
old, the others, its suffix, by the newest; the exact gradient is that of the newest policy's expected reward, by its
logits in the turns of the prefix and of the suffix. Estimators get batches of 32 groups of 8 rollouts. A group is
8 rollouts of their own (`alone`), or holds continuations of an anchor at the end of the prefix. The rollouts that had
ended before the fork are played like the others here, their suffix by the newest policy.

- `bias` is the norm of the expectation's error by that of the exact gradient, `sd` the root of the trace of the
  covariance by the same norm, for as many generated tokens as a batch of GRPO has; both with their 95 % interval, from
  independent batches. Noise is taken out of the bias (`stateful_mdp/moments.py`).
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from attribution_targets import GRPO, targets_of
from result import publish
from stateful_mdp.compositions import (
    Composition,
    advantages_by_batch,
    of_turns,
    segment_weights,
    to_tokens,
)
from stateful_mdp.gradients import own_ratio_weights, policy_gradients
from stateful_mdp.groups import Groups, Layout, credit_batch, log_ratios, play
from stateful_mdp.moments import Interval, deviation, relative_bias, relative_variances
from stateful_mdp.process import (
    Process,
    exact_gradient,
    expected_reward,
    mean_squared_log_ratio,
    reward_variances,
    switched,
)
from stateful_mdp.workspace import (
    FORGIVING,
    NEWEST_VERSION,
    STICKY,
    Setting,
    policy_versions,
    workspace_process,
    write_lag,
)
from torch import Tensor

BATCHES, QUICK_BATCHES = 400, 40
BATCH_GROUPS = 32

TURNS = 8
CUTS = (2, 4, 6)
LAGS = (0, 1, 4, 8, 16)
# In the middle all lags, elsewhere none and the one up to which published jobs work.
MIDDLE, SOME_LAGS = 4, (0, 8)

ALONE = Layout(alone=8)
FORKED = {
    "4 alone, 4 from an anchor": Layout(alone=4, anchors=1, continuations=4),
    "4 from each of 2 anchors": Layout(alone=0, anchors=2, continuations=4),
    "8 from an anchor": Layout(alone=0, anchors=1, continuations=8),
}
LAYOUTS = {"8 alone": ALONE, **FORKED}

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
    Composition("state_hash", ("prefix_is 2",)),
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One environment, cut and lag."""

    setting: Setting
    process: Process
    versions: Sequence[Tensor]
    cut: int
    lag: int

    @property
    def logits(self) -> Tensor:
        return self.versions[NEWEST_VERSION]

    @property
    def now(self) -> Tensor:
        return self.logits.softmax(-1)

    @property
    def made(self) -> Tensor:
        """The policy that every token was drawn from."""
        old = self.versions[NEWEST_VERSION - self.lag].softmax(-1)
        return switched(self.process, old, self.now, self.cut)

    def names(self) -> Row:
        return {"environment": self.setting.name, "turns": f"{self.cut} + {TURNS - self.cut}", "lag": self.lag}


@dataclass(frozen=True)
class Part:
    """Errors in one part of the gradient.

    Attributes:
        bias: computed where the expectation can be, else measured.
        off_theory: where it was computed, how far what was measured is from it, by the exact gradient's norm.
        variances: [B] of batches, see `relative_variances`.
    """

    bias: Interval
    off_theory: Interval | None
    variances: Tensor


@dataclass(frozen=True)
class Found:
    """What one composition does on one layout of one case, per part of the gradient."""

    case: Case
    layout: str
    composition: Composition
    tis: bool
    parts: dict[str, Part]

    @property
    def cost(self) -> float:
        """Generated tokens of a group, by those of one of GRPO."""
        process, cut = self.case.process, self.case.cut
        return LAYOUTS[self.layout].tokens(process, cut) / ALONE.tokens(process, cut)

    def sd(self, part: str) -> Interval:
        return deviation(self.parts[part].variances, self.cost)

    def row(self, reference: "Found") -> Row:
        """`reference` is GRPO of the same case."""
        found: Row = {
            "what": "gradient",
            **self.case.names(),
            "layout": self.layout,
            "credit": self.composition.name,
            "tis": self.tis,
        }
        for name, part in self.parts.items():
            found[f"{name}_bias"] = part.bias.rounded()
            found[f"{name}_off_theory"] = part.off_theory and part.off_theory.rounded()
            found[f"{name}_sd"] = self.sd(name).rounded()
            found[f"{name}_sd / grpo"] = self.sd(name).over(reference.sd(name)).rounded()
        return found


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
            for layout in LAYOUTS
            for each in measure(case, layout, batches=batches, generator=generator)
        ]
        rows += [case_row(case), *(each.row(own[0]) for each in own)]
        found += own
        print(case.names(), file=sys.stderr, flush=True)
    rows += [layout_row(name, cut) for cut in CUTS for name in FORKED]
    publish(targets_of(found), rows, as_json=options.json)


def cases(*, quick: bool, seed: int) -> Iterator[Case]:
    for setting in (STICKY, FORGIVING):
        process = workspace_process(setting, turns=TURNS)
        versions = policy_versions(process, seed=seed)
        for cut in (MIDDLE,) if quick else CUTS:
            for lag in LAGS if cut == MIDDLE and not quick else SOME_LAGS:
                yield Case(setting, process, versions, cut, lag)


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
            weights = segment_weights(each, told, of_turns(case.process, ratios).flatten())
            coefficients = to_tokens(case.process, credited[each.advantage] * weights) * of_host
            estimates = policy_gradients(groups, coefficients, case.now, batches)
            estimates /= BATCH_GROUPS * each.scale(LAYOUTS[layout])
            expected = each.expectation(
                case.process, case.logits, case.made, cut=case.cut, layout=LAYOUTS[layout], tis=tis
            )
            off = estimates - expected
            if control is None:
                control = off
            computable = each.computable(LAYOUTS[layout], case.lag)
            yield Found(case, layout, each, tis, _parts(case, off, expected, control, computable))


def _credited(case: Case, groups: Groups, composition: Composition) -> Tensor:
    return advantages_by_batch(
        composition, case.process, groups, cut=case.cut, lag=case.lag, batch_groups=BATCH_GROUPS
    )


def _told(case: Case, groups: Groups):
    first_steps = [case.process.first_step(turn) for turn in range(TURNS)]
    lags = write_lag(groups.states[:, first_steps], case.cut, case.lag)
    return credit_batch(case.process, groups, cut=case.cut, lag=case.lag, write_lags=lags)


def _parts(
    case: Case, off: Tensor, expected: Tensor, control: Tensor, computable: frozenset[str]
) -> dict[str, Part]:
    """Of the logits of the prefix, of the suffix, and of both; `off` [B, N, S, A] is what estimates are off `expected`.

    `control` [B, N, S, A] is the same of a composition whose expectation can be computed, on the same rollouts: what it
    is off by chance is taken out of a bias that has to be measured.
    """
    exact = exact_gradient(case.process, case.logits)
    step = case.process.first_step(case.cut)
    found = {}
    for name, steps in {"prefix": slice(step), "suffix": slice(step, None), "total": slice(None)}.items():
        norm = exact[steps].norm()
        products = _products(off[:, steps])
        is_computable = name in computable or (name == "total" and len(computable) == 2)
        bias = float((expected - exact)[steps].norm() / norm)
        found[name] = Part(
            bias=Interval(bias, bias, bias)
            if is_computable
            else relative_bias(_products((off - control + expected - exact)[:, steps]), float(norm**2)),
            off_theory=relative_bias(products, float(norm**2)) if is_computable else None,
            variances=relative_variances(products, float(norm**2)),
        )
    return found


def _products(errors: Tensor) -> Tensor:
    """[B, B] Inner products of [B, ...]."""
    flat = errors.flatten(1)
    return flat @ flat.T


def case_row(case: Case) -> Row:
    """What the estimators are up against; variances are those of the reward within a prompt, under the newest policy."""
    between, within = reward_variances(case.process, case.now, case.cut)
    old = case.versions[NEWEST_VERSION - case.lag].softmax(-1)
    norms = exact_gradient(case.process, case.logits).pow(2).sum((1, 2))
    step = case.process.first_step(case.cut)
    return {
        "what": "case",
        **case.names(),
        "reward": round(expected_reward(case.process, case.now), 4),
        "reward_of_old": round(expected_reward(case.process, old), 4),
        "prefix_mean_squared_log_ratio": round(mean_squared_log_ratio(case.process, old, case.now, case.cut), 5),
        "variance_between_states": round(between, 4),
        "variance_within_states": round(within, 4),
        "exact_prefix_norm": round(float(norms[:step].sum().sqrt()), 5),
        "exact_suffix_norm": round(float(norms[step:].sum().sqrt()), 5),
    }


def layout_row(name: str, cut: int) -> Row:
    process, layout = workspace_process(STICKY, turns=TURNS), LAYOUTS[name]
    tokens, discarded = layout.tokens(process, cut), layout.tokens(process, cut, discarded=True)
    return {
        "what": "layout",
        "turns": f"{cut} + {TURNS - cut}",
        "layout": name,
        "tokens": tokens,
        "tokens_of_grpo": ALONE.tokens(process, cut),
        "discarded_factor": round((discarded / tokens) ** 0.5, 4),
    }


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
