"""Numbers go through bytes unchanged or not at all, and the native functions say what those in Python say."""

import math
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from midstream.buffers.journal.columns import (
    floats_in_python,
    floats_of,
    integers_in_python,
    integers_of,
)

whole = st.integers(-(2**63), 2**63 - 1) | st.integers(-200_000, 200_000) | st.integers(-2, 2) | st.booleans()
doubles = st.floats() | st.floats(width=32) | st.integers(-9, 9) | st.just(-0.0)
PACKING = [("integers", integers_in_python), ("floats", floats_in_python)]


def bits(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


@given(st.lists(whole), st.integers(1, 8))
def test_whole_numbers_go_through_bytes_where_they_fit(values: list[int], width: int) -> None:
    column = integers_in_python(values, width)
    fit = all(-(1 << (8 * width - 1)) <= value < 1 << (8 * width - 1) for value in values)
    assert (column is not None) == fit
    if column is not None:
        assert len(column) == width * len(values)
        assert integers_of(column, width) == values


@given(st.lists(doubles), st.sampled_from([4, 8]))
@example([struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000001))[0], -math.nan, math.inf, 1e300], 4)
def test_floating_point_keeps_every_bit_or_is_refused(values: list[float], width: int) -> None:
    column = floats_in_python(values, width)
    assert width == 4 or column is not None
    if column is not None:
        assert len(column) == width * len(values)
        assert bits(floats_of(column, width)) == bits(values)


def test_single_precision_is_told() -> None:
    assert floats_in_python([0.5, -math.inf, struct.unpack("f", struct.pack("f", 0.1))[0]], 4) is not None
    assert floats_in_python([0.5, 0.1], 4) is None
    assert floats_in_python([1e300], 4) is None


def test_a_column_is_the_same_on_every_machine() -> None:
    assert integers_in_python([1, -2, 150_000], 3) == bytes.fromhex("010000 feffff f04902")
    assert floats_in_python([-1.5, 0.0], 4) == bytes.fromhex("0000c0bf 00000000")


@given(st.lists(whole), st.lists(doubles), st.integers(1, 8), st.sampled_from([4, 8]))
def test_the_native_columns_are_those_in_python(
    numbers: list[int], reals: list[float], width: int, float_width: int
) -> None:
    native = pytest.importorskip("midstream.buffers.journal._native", reason="built without a compiler")
    assert native.integers(numbers, width) == integers_in_python(numbers, width)
    assert native.floats(reals, float_width) == floats_in_python(reals, float_width)


class Shrinking:
    """A number that empties the list that it is in."""

    def __init__(self, home: list[object]) -> None:
        self._home = home

    def __index__(self) -> int:
        self._home.clear()
        return 1


@pytest.mark.parametrize(("name", "in_python"), PACKING)
@pytest.mark.parametrize("what", ["a", None, 10**400])
def test_what_is_no_number_is_refused(name: str, in_python, what: object) -> None:
    native = pytest.importorskip("midstream.buffers.journal._native", reason="built without a compiler")
    for packed in (in_python, getattr(native, name)):
        with pytest.raises((TypeError, OverflowError)):
            packed([1, what], 8)


def test_a_list_that_changes_while_it_is_read_does_no_harm() -> None:
    native = pytest.importorskip("midstream.buffers.journal._native", reason="built without a compiler")
    values: list[object] = []
    values += [Shrinking(values), 2, 3]
    with pytest.raises(IndexError):
        native.integers(values, 3)
