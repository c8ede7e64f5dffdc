"""The project's own bounds on what estimators of advantages buy, from what `attribution.py` found."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from result import target
from stateful_mdp.compositions import Composition
from stateful_mdp.findings import Found
from stateful_mdp.moments import deviation
from stateful_mdp.workspace import FORGIVING, STICKY

GRPO = Composition("grpo")
# Where states differ much in value, and where they differ little.
SUFFIX_SD = {STICKY.name: 0.55, FORGIVING.name: 0.65}
PREFIX_SD, PREFIX_BIAS = 1.0, 0.5
# So many of the intervals of 95 % lie above what they are for.
MISSED_SHARE = 0.025
# A prefix whose gradient is off by all of its norm is out of the loss.
UNTRAINED = 1e-9
# Over which a spread is told.
PARTS = 5


def targets_of(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Per case, and one for all biases that theory says are none."""
    per_case = [list(own) for _, own in groupby(found, key=lambda each: each.case)]
    targets = [entry for own in per_case if own[0].case.lag == 0 for entry in _deviations(own)]
    targets += [entry for own in per_case if own[0].case.lag > 0 for entry in _stale_bias(own)]
    known = [part.off_theory for each in found for part in each.parts.values() if part.off_theory]
    missed = [float(off.low > 0) for off in known]
    name = "share of expectations that miss what theory computes by more than their interval"
    return [*targets, target(name, [sum(missed) / len(missed)], "fraction", "<=", MISSED_SHARE)]


def _deviations(found: Sequence[Found]) -> list[dict[str, Any]]:
    reference = found[0]
    ours = [each for each in found if each.composition != GRPO]
    best = min(ours, key=lambda each: each.sd("suffix").value)
    trains_all = [each for each in ours if each.parts["prefix"].bias.value < 1 - UNTRAINED]
    worst = max(trains_all, key=lambda each: each.sd("prefix").value)
    return [
        _ratio("suffix sd, best of ours", "suffix", best, reference, SUFFIX_SD[best.case.setting.name]),
        _ratio("prefix sd, worst of ours", "prefix", worst, reference, PREFIX_SD),
    ]


def _ratio(what: str, part: str, own: Found, reference: Found, bound: float) -> dict[str, Any]:
    own_parts, other_parts = (each.parts[part].variances.chunk(PARTS) for each in (own, reference))
    ratios = [
        deviation(a, own.cost).value / deviation(b, reference.cost).value
        for a, b in zip(own_parts, other_parts, strict=True)
    ]
    return target(_named(what, own), ratios, "ratio", "<=", bound)


def _stale_bias(found: Sequence[Found]) -> Iterable[dict[str, Any]]:
    """Where GRPO trains with a lag; what is put against it may use TIS, too."""
    reference = found[0]
    ours = [each for each in found if each.composition.advantage != "grpo" or each.composition.weights]
    # By the upper end of its interval, so that noise wins nothing.
    best = min(ours, key=lambda each: each.parts["prefix"].bias.high)
    value = best.parts["prefix"].bias.high / reference.parts["prefix"].bias.value
    yield target(_named("prefix bias, best of ours", best), [value], "ratio", "<=", PREFIX_BIAS)


def _named(what: str, own: Found) -> str:
    names = own.case.names()
    tis = ", with TIS" if own.tis else ""
    return (
        f"{what} / grpo, {names['environment']}, turns {names['turns']}, lag {names['lag']} "
        f"({own.composition.name} on {own.layout}{tis})"
    )
