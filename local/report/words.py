"""Numbers, names and lists as a reader sees them, in the table, the captions and on the terminal."""

from collections.abc import Sequence

MISSING = "–"


def count(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.0f}"


def decimal(value: float | None) -> str:
    """Two decimals below 10, one below 100, none above."""
    if value is None:
        return MISSING
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f}"


def seconds(value: float | None) -> str:
    return MISSING if value is None else f"{decimal(value)} s"


def percent(value: float | None) -> str:
    """A fraction as per cent, with a decimal where it is small but not nothing."""
    if value is None:
        return MISSING
    return f"{100 * value:.1f} %" if 0 < abs(value) < 0.1 else f"{100 * value:.0f} %"


def ratio(value: float | None) -> str:
    return MISSING if value is None else f"{decimal(value)}×"


def tiny(value: float | None) -> str:
    """A number whose order of magnitude is what matters."""
    return MISSING if value is None else f"{value:.1e}" if value else "0"


def memory(value_bytes: float | None) -> str:
    return MISSING if value_bytes is None else f"{value_bytes / 2**30:.1f} GiB"


def size(count: float) -> str:
    """Of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def printable(text: str) -> str:
    """Names on disk may hold what a terminal obeys, or what no encoding has."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def listed(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
