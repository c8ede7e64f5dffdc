"""One colour per strategy, told apart by people with any colour vision, on a light and on a dark page.

Plots are drawn with the light colours; in the SVG each becomes a CSS variable, so that the page can change
them. The smallest CIELAB distance between any two of the six strategies is 14 under simulated protanopia,
deuteranopia and tritanopia (Machado 2009); markers and labels carry the difference as well.
"""

from collections.abc import Iterable
from dataclasses import dataclass

INK, MUTED, GRID, SURFACE = "#1c2128", "#626c78", "#dfe3e8", "#fffffe"


@dataclass(frozen=True)
class Colour:
    variable: str
    light: str
    dark: str


PAGE = (
    Colour("ink", INK, "#e8eaed"),
    Colour("muted", MUTED, "#9aa4b0"),
    Colour("grid", GRID, "#333a44"),
    Colour("surface", SURFACE, "#171b21"),
)
STRATEGIES = {
    "wait": Colour("c-wait", "#0b5fa5", "#4a9ee8"),
    "discard": Colour("c-discard", "#b83a0b", "#e8602c"),
    "restart": Colour("c-restart", "#c79100", "#ffd166"),
    "continue": Colour("c-continue", "#1b9e77", "#2fbf98"),
    "rewind": Colour("c-rewind", "#6f2bd0", "#9054fc"),
    "anchor": Colour("c-anchor", "#0a7d8c", "#3cc4d6"),
    "ladder": Colour("c-ladder", "#8a1c4a", "#f0709f"),
    "naive": Colour("c-naive", "#c05fa8", "#e6a0d6"),
}
SPARE = (
    Colour("c-spare-0", "#4b4a8f", "#a3a1f0"),
    Colour("c-spare-1", "#6b705c", "#b7bd9f"),
    Colour("c-spare-2", "#7f5539", "#d0a283"),
)
AGES = (
    Colour("age-0", "#8fcfb0", "#2c6e5a"),
    Colour("age-1", "#55aec0", "#3f93ab"),
    Colour("age-2", "#4a7fbd", "#79aef0"),
    Colour("age-3", "#5b4a9f", "#b7a6fa"),
    Colour("age-4", "#43194f", "#f2c9ff"),
)
"""Of what the current policy version wrote, of the version before, and so on; the last is for all older ones. Their
lightness alone tells them apart."""
RATES = AGES[::-1]
"""Of prompts that are never solved to those that always are."""
SOURCES = (
    Colour("c-source-0", "#3a6ea5", "#7fb2e5"),
    Colour("c-source-1", "#b5651d", "#f0a35e"),
    Colour("c-source-2", "#5a7d2a", "#a9cf6b"),
    Colour("c-source-3", "#8e4585", "#d79acb"),
    Colour("c-source-4", "#57606a", "#aab4bf"),
)
"""Of sources of tasks, in the order in which they are shown; more are not shown one by one."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
EVERY_COLOUR = (*PAGE, *STRATEGIES.values(), *SPARE, *AGES, *SOURCES)


@dataclass(frozen=True)
class Mark:
    """How a strategy looks in every plot."""

    colour: str
    marker: str
    variable: str


def marks(strategies: Iterable[str]) -> dict[str, Mark]:
    """A strategy that midstream does not know by name takes a spare colour, in the order given."""
    known, spare = list(STRATEGIES), 0
    chosen = {}
    for name in strategies:
        if name in STRATEGIES:
            colour, marker = STRATEGIES[name], MARKERS[known.index(name)]
        else:
            colour, marker = SPARE[spare % len(SPARE)], MARKERS[(len(known) + spare) % len(MARKERS)]
            spare += 1
        chosen[name] = Mark(colour.light, marker, colour.variable)
    return chosen


def age_variable(lag: int | None) -> str:
    """The CSS variable of the colour of what is that many policy versions old; None: nobody knows."""
    return "muted" if lag is None else AGES[max(0, min(lag, len(AGES) - 1))].variable


def themed(svg: str) -> str:
    """The SVG with our colours as CSS variables, which fall back to the light values."""
    for colour in EVERY_COLOUR:
        svg = svg.replace(colour.light, f"var(--{colour.variable}, {colour.light})")
    return svg
