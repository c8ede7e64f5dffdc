"""What nobody waits for."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# Whoever brings more than can be done waits: each piece may hold a mount, and so a descriptor.
MAX_WAITING = 256

_logger = logging.getLogger(__name__)


class Background:
    """One thread that does what it is given, in order; what fails there is logged."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._room = threading.BoundedSemaphore(MAX_WAITING)
        self._inside = threading.local()

    def run(self, work: Callable[[], object]) -> None:
        """Has it done some time; waits while too much is waiting already. What runs there asks for more freely."""
        waits = not getattr(self._inside, "here", False)
        if waits:
            self._room.acquire()
        try:
            self._thread.submit(self._done, work, waits)
        except RuntimeError:
            # It is closing: what it still has to do asks for more, and does that at once.
            self._done(work, waits)

    def _done(self, work: Callable[[], object], took_room: bool) -> None:
        self._inside.here = True
        try:
            _logged(work)
        finally:
            if took_room:
                self._room.release()

    def settle(self) -> None:
        """Returns when all that it was given is done."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Returns when all is done, and what that asked for; nobody else gives it anything any more."""
        self._thread.shutdown()


def _logged(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception:
        _logger.exception("in the background of layers: %s failed", work)
