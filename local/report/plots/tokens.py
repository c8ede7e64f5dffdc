"""Where the generated tokens went."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from midstream.local.events import RunEvents
from midstream.local.report import words
from midstream.local.report.palette import INK, MUTED, SURFACE, Mark
from midstream.local.report.plots.figure import Plot, drawn
from midstream.local.summary import number, total

ACCOUNTED_WITHIN = 0.01
"""A difference between tokens generated and tokens accounted for is shown from this share on."""


@dataclass(frozen=True)
class TokenUse:
    """Model tokens of one run by where they went; `unknown` of them are not in the events."""

    trained: int
    dropped: int
    buffered: int
    unknown: int

    @property
    def generated(self) -> int:
        return self.trained + self.dropped + self.buffered + self.unknown

    def share(self, tokens: int) -> float:
        return tokens / self.generated if self.generated else 0.0


def token_use(run: RunEvents) -> TokenUse:
    trained = total(run.steps, "trained_tokens")
    dropped = total(run.steps, "wasted_tokens")
    buffered = int(number(run.steps[-1].get("buffered_tokens")) or 0) if run.steps else 0
    generated = total(run.steps, "generated_tokens")
    unknown = generated - trained - dropped - buffered
    return TokenUse(trained, dropped, buffered, unknown if unknown > ACCOUNTED_WITHIN * generated else 0)


def tokens_plot(runs: Sequence[RunEvents], marks: dict[str, Mark]) -> Plot | None:
    uses = {run.strategy: use for run in runs if (use := token_use(run)).generated}
    if not uses:
        return None

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        axes.grid(axis="y", visible=False)
        for row, (strategy, use) in enumerate(uses.items()):
            colour, left = marks[strategy].colour, 0
            for tokens, look in (
                (use.trained, {"color": colour}),
                (use.buffered, {"color": colour, "alpha": 0.4}),
                (use.dropped, {"facecolor": colour, "hatch": "////", "edgecolor": SURFACE, "linewidth": 0}),
                (use.unknown, {"facecolor": "none", "edgecolor": MUTED, "linewidth": 1, "linestyle": ":"}),
            ):
                axes.barh(row, tokens, left=left, height=0.52, **look)
                left += tokens
            axes.annotate(
                f"{words.percent(use.share(use.dropped + use.buffered))} wasted",
                (left, row),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=10,
            )
        axes.set_yticks(range(len(uses)), list(uses), fontsize=10.5, fontweight="bold")
        for label, strategy in zip(axes.get_yticklabels(), uses, strict=True):
            label.set_color(marks[strategy].colour)
        axes.tick_params(length=0)
        axes.invert_yaxis()
        axes.set_xlim(0, max(use.generated for use in uses.values()) * (1.34 if narrow else 1.2))
        axes.set_xlabel("model tokens")
        axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 6))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        _legend(figure, any(use.unknown for use in uses.values()))

    return drawn(
        "tokens",
        "Where the tokens went",
        paint,
        reading=(
            "Length: tokens that the generator made. Solid reached the loss, pale is still buffered "
            "at the end, hatched was dropped or restarted."
        ),
        finding=_finding(uses),
        height_px=100 + 52 * len(uses),
    )


def _legend(figure: Figure, has_unknown: bool) -> None:
    entries = [
        Patch(facecolor=INK, label="trained"),
        Patch(facecolor=INK, alpha=0.4, label="buffered"),
        Patch(facecolor=INK, hatch="////", edgecolor=SURFACE, linewidth=0, label="dropped"),
    ]
    if has_unknown:
        entries.append(Patch(facecolor="none", edgecolor=MUTED, linestyle=":", label="not recorded"))
    figure.legend(
        handles=entries, loc="outside upper left", ncols=len(entries), handlelength=1.4, columnspacing=1.2
    )


def _finding(uses: dict[str, TokenUse]) -> str:
    parts = [
        f"{words.percent(use.share(use.trained))} of {words.count(use.generated)} with {strategy}"
        for strategy, use in sorted(uses.items(), key=lambda item: -item[1].share(item[1].trained))
    ]
    return f"Tokens that reached the loss: {words.listed(parts)}."
