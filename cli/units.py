"""Ages as a reader of a terminal sees them, and cells in columns."""

from collections.abc import Callable, Sequence


def age(seconds: float) -> str:
    """In the largest unit of which there is one."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.0f} s"


def columns(lines: Sequence[Sequence[str]], aligned: Callable[[str, int], str] = str.ljust) -> list[str]:
    """Lines of equally many cells under each other; ``aligned`` is for all columns but the first."""
    first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join([line[0].ljust(first), *map(aligned, line[1:], others)]).rstrip() for line in lines]
