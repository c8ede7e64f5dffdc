"""What was found about one composition: bias and spread of the parts of its gradient."""

from dataclasses import dataclass

from torch import Tensor

from .cases import ALONE, LAYOUTS, Case, Row
from .compositions import Composition
from .moments import Interval, deviation, relative_bias, relative_variances
from .process import exact_gradient


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
            if part.off_theory is None:
                found[f"{name}_bias"] = part.bias.rounded()
            else:
                found[f"{name}_bias"] = part.bias.rounded()[0]
                found[f"{name}_off_theory"] = part.off_theory.rounded()
            found[f"{name}_sd"] = self.sd(name).rounded()[0]
            found[f"{name}_sd / grpo"] = self.sd(name).over(reference.sd(name)).rounded()
        return found


def errors_of(
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
