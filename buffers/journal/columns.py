"""A list of numbers as bytes, the same on every machine: so many for each, little-endian.

Whole numbers are signed and may be narrower than a machine's own: three bytes hold the token ids of every
vocabulary. Floating point has 4 bytes (single precision, as engines compute) or 8. A width that would lose
a bit is refused, never rounded.
"""

import struct

# The byte that continues a number's sign, by the highest of its bytes.
_SIGN = bytes(0xFF if byte & 0x80 else 0 for byte in range(256))
_LONG = 8
_FLOATS = {4: "f", 8: "d"}


def integers_in_python(values: list[int], width: int) -> bytes | None:
    """The numbers in `width` bytes each (1 to 8), None where one does not fit.

    Raises TypeError or OverflowError for what is no whole number of 64 bits.
    """
    try:
        column = struct.pack(f"<{len(values)}q", *values)
    except struct.error as error:
        raise TypeError(str(error)) from error
    planes = [column[index::_LONG] for index in range(_LONG)]
    sign = planes[width - 1].translate(_SIGN)
    if any(plane != sign for plane in planes[width:]):
        return None
    packed = bytearray(len(values) * width)
    for index, plane in enumerate(planes[:width]):
        packed[index::width] = plane
    return bytes(packed)


def floats_in_python(values: list[float], width: int) -> bytes | None:
    """The numbers in `width` bytes each (4 or 8), None where one would lose a bit.

    Raises TypeError for what is no number.
    """
    try:
        exact = struct.pack(f"<{len(values)}d", *values)
    except struct.error as error:
        raise TypeError(str(error)) from error
    if width == struct.calcsize("<d"):
        return exact
    try:
        packed = struct.pack(f"<{len(values)}f", *values)
    except OverflowError:
        return None
    again = struct.pack(f"<{len(values)}d", *struct.unpack(f"<{len(values)}f", packed))
    return packed if again == exact else None


def integers_of(column: bytes, width: int) -> list[int]:
    """The inverse of `integers`; `column` is of whole numbers of `width` bytes."""
    length = len(column) // width
    planes = [column[index::width] for index in range(width)]
    planes += [planes[-1].translate(_SIGN)] * (_LONG - width)
    whole = bytearray(length * _LONG)
    for index, plane in enumerate(planes):
        whole[index::_LONG] = plane
    return list(struct.unpack(f"<{length}q", whole))


def floats_of(column: bytes, width: int) -> list[float]:
    """The inverse of `floats`."""
    return list(struct.unpack(f"<{len(column) // width}{_FLOATS[width]}", column))


try:
    from midstream.buffers.journal._native import floats as floats
    from midstream.buffers.journal._native import integers as integers
except ImportError:  # no compiler where this was installed: slower, and the same
    floats = floats_in_python
    integers = integers_in_python
