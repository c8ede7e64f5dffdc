"""What a member's payload in the journal says, to somebody who has neither the host nor its classes.

A payload is a pickle, and to unpickle is to run what it names. Here nothing is imported or called: whatever is not
plain data becomes an inert object.
"""

import io
import pickle
from typing import Any, Self

from midstream.buffers.journal.errors import JournalDamaged


def records_in(payload: bytes) -> list[tuple[int | None, bytes]]:
    """The host's number of each sample of a member, and the encoded record of its rollout; those without one left out.

    Raises:
        JournalDamaged: the bytes are not what `payload.journaled` makes.
    """
    try:
        _, parts = _PlainUnpickler(io.BytesIO(payload)).load()
        found = [(host.get("index"), record) for host, record in parts]
    except Exception as error:
        # Unpickling raises anything.
        raise JournalDamaged(f"a sample cannot be unpacked ({type(error).__name__}: {error})") from error
    return [(index, record) for index, record in found if isinstance(record, bytes)]


class _Inert:
    """In place of an object of any class: takes all that unpickling does to it, and does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        return object.__new__(cls)

    def __call__(self, *_: Any, **__: Any) -> Self:
        return self

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, _: Any, __: Any) -> None: ...

    def append(self, _: Any) -> None: ...

    def extend(self, _: Any) -> None: ...

    def add(self, _: Any) -> None: ...


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, _: str, __: str) -> Any:
        return _Inert

    def persistent_load(self, _: Any) -> Any:
        return _Inert()
