"""What is compared: environments, cuts and lags, and of what rollouts a group is made."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .groups import Layout
from .process import (
    Process,
    exact_gradient,
    expected_reward,
    mean_squared_log_ratio,
    reward_variances,
    switched,
)
from .workspace import FORGIVING, NEWEST_VERSION, STICKY, TURNS, Setting, policy_versions, workspace_process

CUTS = (2, 4, 6)
LAGS = (0, 1, 4, 8, 16)
# In the middle all lags, elsewhere none and the one up to which published jobs work.
MIDDLE, SOME_LAGS = 4, (0, 8)

ALONE = Layout(alone=8)
FORKED = {
    "4 alone, 4 from an anchor": Layout(alone=4, anchors=1, continuations=4),
    "4 from each of 2 anchors": Layout(alone=0, anchors=2, continuations=4),
    "2 from each of 4 anchors": Layout(alone=0, anchors=4, continuations=2),
    "8 from an anchor": Layout(alone=0, anchors=1, continuations=8),
}
LAYOUTS = {"8 alone": ALONE, **FORKED}
# Where there is a lag: one as the resume policy `anchor` makes it, and one that wins nothing at the prefix's expense.
STALE_LAYOUTS = ("8 alone", "4 alone, 4 from an anchor", "2 from each of 4 anchors")


Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
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

    @property
    def layouts(self) -> Sequence[str]:
        return STALE_LAYOUTS if self.lag > 0 else tuple(LAYOUTS)

    def names(self) -> Row:
        return {
            "environment": self.setting.name,
            "turns": f"{self.cut} + {TURNS - self.cut}",
            "lag": self.lag,
        }


def cases(*, quick: bool, seed: int) -> Iterator[Case]:
    for setting in (STICKY, FORGIVING):
        process = workspace_process(setting)
        versions = policy_versions(process, seed=seed)
        for cut in (MIDDLE,) if quick else CUTS:
            for lag in LAGS if cut == MIDDLE and not quick else SOME_LAGS:
                yield Case(setting, process, versions, cut, lag)


def case_row(case: Case) -> Row:
    """What the estimators are up against; variances are those of rewards within a prompt, under the newest policy."""
    between, within = reward_variances(case.process, case.now, case.cut)
    old = case.versions[NEWEST_VERSION - case.lag].softmax(-1)
    norms = exact_gradient(case.process, case.logits).pow(2).sum((1, 2))
    step = case.process.first_step(case.cut)
    return {
        "what": "case",
        **case.names(),
        "reward": round(expected_reward(case.process, case.now), 4),
        "reward_of_old": round(expected_reward(case.process, old), 4),
        "prefix_mean_squared_log_ratio": round(
            mean_squared_log_ratio(case.process, old, case.now, case.cut), 5
        ),
        "variance_between_states": round(between, 4),
        "variance_within_states": round(within, 4),
        "exact_prefix_norm": round(float(norms[:step].sum().sqrt()), 5),
        "exact_suffix_norm": round(float(norms[step:].sum().sqrt()), 5),
    }


def layout_rows() -> list[Row]:
    """What groups cost; `discarded_factor` is what to multiply a deviation with where `discarded` tokens count."""
    process, found = workspace_process(STICKY), []
    for cut in CUTS:
        for name, layout in LAYOUTS.items():
            tokens, discarded = layout.tokens(process, cut), layout.tokens(process, cut, discarded=True)
            found.append(
                {
                    "what": "layout",
                    "turns": f"{cut} + {TURNS - cut}",
                    "layout": name,
                    "tokens": tokens,
                    "tokens_with_discarded": discarded,
                    "discarded_factor": round((discarded / tokens) ** 0.5, 4),
                }
            )
    return found
