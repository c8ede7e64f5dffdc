"""What became of the rollouts that waited, counted."""

from collections import Counter
from dataclasses import dataclass, field

from midstream.buffers.policies.base import Action
from midstream.buffers.policies.bounds import REASONS

CUT_OFF = "cut_off"
POLICY = "policy"
_COUNTED_AS = {Action.REWIND: "rewound", Action.FORK: "forked", Action.RESTART: "restarted"}
DISCARDS = (CUT_OFF, POLICY, *REASONS.values())
"""Why tokens go: the policy drops or empties what is cut off; it drops, restarts, rewinds or forks what waited; a
bound on lag takes it away."""


@dataclass
class Lengths:
    """How long some rollouts are, in tokens of the model."""

    rollouts: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        """Count one rollout."""
        self.rollouts += 1
        self.tokens += tokens

    @property
    def mean(self) -> float:
        return self.tokens / self.rollouts if self.rollouts else 0.0


@dataclass
class Tally:
    """Counts since it was made; of rollouts unless they say otherwise.

    ``groups`` wait now. ``buffered`` came back and were kept, ``taken`` were handed out again; of these
    ``resumed`` go on as they are, ``rewound`` from an earlier turn, ``forked`` from where a sibling is, and
    ``restarted`` from their prompts, which counts those that were emptied when they were cut off too.
    ``ratio_checked`` groups were measured before they went on, of which ``ratio_anchored`` were forked for it.
    ``dropped`` went with their groups, and with
    them ``dropped_resumes`` that they had behind them. ``passed_over`` counts how often a group was left
    behind, ``stuck`` the rollouts that outlasted their deadline. ``discarded_tokens`` are by reason, one of
    ``DISCARDS``. ``beyond`` are the lengths of what a bound on lag took away, ``within`` of what it let pass:
    where they differ, the bound prefers short rollouts or long ones.
    """

    groups: int = 0
    buffered: int = 0
    taken: int = 0
    resumed: int = 0
    rewound: int = 0
    forked: int = 0
    restarted: int = 0
    dropped: int = 0
    dropped_resumes: int = 0
    passed_over: int = 0
    stuck: int = 0
    ratio_checked: int = 0
    ratio_anchored: int = 0
    discarded_tokens: Counter[str] = field(default_factory=Counter)
    beyond: Lengths = field(default_factory=Lengths)
    within: Lengths = field(default_factory=Lengths)

    def count(self, action: Action) -> None:
        """Count a rollout that was changed so."""
        if (name := _COUNTED_AS.get(action)) is not None:
            setattr(self, name, getattr(self, name) + 1)

    def metrics(self) -> dict[str, float]:
        """``buffer/*`` for the host's logger, zeros included."""
        counts = {name: float(value) for name, value in vars(self).items() if isinstance(value, int)}
        tokens = {f"discarded_tokens/{reason}": float(self.discarded_tokens[reason]) for reason in DISCARDS}
        lengths = {"beyond_bounds_length": self.beyond.mean, "within_bounds_length": self.within.mean}
        total = {"discarded_tokens": float(self.discarded_tokens.total())}
        return {f"buffer/{name}": value for name, value in (counts | total | tokens | lengths).items()}
