"""Sizes, ages and names as a reader of a terminal sees them, and columns of them."""

from collections.abc import Callable, Sequence


def size(count: float) -> str:
    """Of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def age(seconds: float) -> str:
    """In the largest unit of which there is one."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.0f} s"


def printable(text: str) -> str:
    """Names on disk may hold what a terminal obeys, or what no encoding has."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def columns(lines: Sequence[Sequence[str]], aligned: Callable[[str, int], str] = str.ljust) -> list[str]:
    """Lines of equally many cells under each other; ``aligned`` is for all columns but the first."""
    first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join([line[0].ljust(first), *map(aligned, line[1:], others)]).rstrip() for line in lines]
